"""The house itself: namesake tests, short modules and chains of imports, errors that help."""

import ast
import functools
import sys
import warnings
from pathlib import Path

import pytest
import torch
from laplace.baselaplace import KronLaplace
from laplace.lllaplace import KronLLLaplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, compare, sweep_prior_precision
from laplace_debias.posterior.kron import DebiasedKronLaplace, DebiasedKronLLLaplace
from laplace_debias.quadratics import curvature_bias_report

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    path.relative_to(ROOT / "laplace_debias")
    for path in (ROOT / "laplace_debias").glob("*/*.py")
    if path.name != "__init__.py"
)
MOST_LINES = 300
LONGER = {
    # THE engine: one pass, and all that is done with it.
    "kfac/engine.py": 380,
    # The class that laplace-torch's users see, all of its methods in one body.
    "posterior/debiased.py": 790,
    # Every kind of layer, from its calls to its contraction.
    "predictive/layer_jacobians.py": 345,
    # One predictor and the one that several posteriors share.
    "predictive/predictor.py": 385,
    # Plain and debiased CG, which share their recursion.
    "quadratics/cg.py": 350,
}

WITHOUT_REMEDY = {
    # Made by a method whose own message ends with the remedy.
    "self.too_few",
    # Hands on the error of a mini-batch, which has its remedy, with the report so far.
    "EvaluationError",
}


# The check of a model is one behaviour, seen from the outside; its parts are asked through it.
TESTED_TOGETHER = {
    # Several processes are started once, and asked through fits.
    "data/map_style.py": "data/test_pool.py",
    "data/processes.py": "posterior/test_several.py",
    "debias/packing.py": "debias/test_checkpoint.py",
    "debias/pool_news.py": "posterior/test_several.py",
    "debias/shared_eigen.py": "posterior/test_several.py",
    "debias/shared_folds.py": "posterior/test_several.py",
    # Thin bases and laplace-torch's products with them are one behaviour.
    "kfac/thin_kron.py": "kfac/test_thin.py",
    "network/live_bytes.py": "kfac/test_budget.py",
    "network/model_check.py": "network/test_check.py",
    "network/products.py": "network/test_check.py",
    "network/verify.py": "network/test_check.py",
    "predictive/row_check.py": "network/test_check.py",
}


LONGEST_CHAIN = 10
# Files of the library that everyday calls pass. Merge what is one concept, and let calls skip what
# does not concern them, before one of these is raised.
MOST_FILES = {
    "fit, two-batch": 42,
    "fit, cross-fit with curvature sampling": 46,
    "la(x)": 24,
    "sweep": 30,
    "compare": 66,
    "bias report": 8,
}


def _namesake(module: Path) -> Path:
    """Where the test of a module belongs."""
    return module.parent / f"test_{module.name}"


def test_there_are_modules():
    assert len(MODULES) > 60


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_module_has_a_namesake_test(module):
    test = ROOT / "tests" / TESTED_TOGETHER.get(module.as_posix(), _namesake(module))
    assert test.exists(), f"Expected {test.relative_to(ROOT)}, which tests {module}."


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_module_is_short(module):
    n_lines = len((ROOT / "laplace_debias" / module).read_text().splitlines())
    most = LONGER.get(module.as_posix(), MOST_LINES)
    assert n_lines <= most, f"Expected at most {most} lines, got {n_lines}: divide {module}."
    if module.as_posix() in LONGER:
        assert n_lines > MOST_LINES, f"Take {module} off the list: {n_lines} lines are few enough."


def test_the_list_names_modules_that_exist():
    assert set(LONGER) <= {module.as_posix() for module in MODULES}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_error_says_expected_got_and_remedy(module):
    source = (ROOT / "laplace_debias" / module).read_text()
    wanting = [ast.unparse(error) for error in _errors(source) if _wanting(error)]
    assert not wanting, f"Expected errors 'Expected ..., got .... Remedy: ...': {wanting}"


@pytest.mark.parametrize(
    ("source", "wanting"),
    [
        ('raise ValueError(f"Expected one, got {n}.")', True),
        ('raise ValueError("Expected one. Remedy: pass one.")', True),
        ('raise ValueError(f"There are {n}. Remedy: pass one.")', True),
        ('raise ValueError(f"Expected one, got {n}. Remedy: pass one.")', False),
        ('raise KeyError(f"Expected one, got {n}. " "Remedy: pass one.") from error', False),
        ('raise ValueError(f"Expected one, got {n}. {remedy}")', False),
        ("raise self.too_few(1, 2)", False),
        ("raise EvaluationError(text, partial)", False),
        ("raise NotImplementedError", False),
        ("raise", False),
    ],
)
def test_an_error_that_lacks_a_part_is_found(source, wanting):
    assert any(map(_wanting, _errors(source))) is wanting


def test_what_the_examples_import_is_public():
    """Names that a room exports (wherever they are imported from), or its modules."""
    private = []
    for path in (ROOT / "examples").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "laplace_debias."
            ):
                continue
            room = ".".join(node.module.split(".")[:2])
            public = _all(room) | {f"{p.stem}" for p in _folder(room).glob("*.py")}
            private += [f"{path.name}: {room}.{a.name}" for a in node.names if a.name not in public]
    assert not private


def test_a_posterior_is_laplace_torchs_class_and_one_more():
    for cls, base in ((DebiasedKronLaplace, KronLaplace), (DebiasedKronLLLaplace, KronLLLaplace)):
        ours = [c.__name__ for c in cls.__mro__ if c.__module__.startswith("laplace_debias")]
        assert ours == [cls.__name__, "DebiasedPosterior"] and cls.__bases__[1:] == (base,)


def test_chains_of_imports_are_short():
    """From the file at the top to one that imports none; what a room hands on counts as its own."""
    sources = {_name(path): path for path in (ROOT / "laplace_debias").rglob("*.py")}
    imports = {name: _imported(path.read_text()) for name, path in sources.items()}
    handed_on = {
        (room, alias): (module, name)
        for room, path in sources.items()
        if path.name == "__init__.py"
        for module, name, alias in imports[room]
    }

    def defining(module, name):
        while (module, name) in handed_on:
            module, name = handed_on[module, name]
        return f"{module}.{name}" if f"{module}.{name}" in sources else module

    @functools.cache
    def chain(name):
        below = {defining(module, attribute) for module, attribute, _ in imports[name]}
        files = [b for b in below if sources[b].name != "__init__.py" and b != name]
        return [name, *max(map(chain, files), key=len, default=[])]

    files = [name for name, path in sources.items() if path.name != "__init__.py"]
    longest = max(map(chain, files), key=len)
    assert len(longest) <= LONGEST_CHAIN, " > ".join(longest)
    assert longest[0].startswith("laplace_debias.reporting") and len(longest) > 5  # it sees them


def test_everyday_calls_pass_few_files():
    found = {name: _files_passed(call) for name, call in _everyday_calls().items()}
    assert found.keys() == MOST_FILES.keys() and all(found.values())
    more = {name: files for name, files in found.items() if len(files) > MOST_FILES[name]}
    assert not more, {name: (len(files), files) for name, files in more.items()}


def _everyday_calls():
    """Calls as users make them, by name."""
    torch.manual_seed(0)
    X, y = torch.randn(200, 1, 8, 8), torch.arange(200) % 3
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(TensorDataset(X, y), 16, shuffle=True, generator=generator)
    val = [(X[:20], y[:20])]

    def fitted(**options):
        la = Laplace(net, "classification", "all", "kron", **options)
        la.fit(loader)
        return la

    la = fitted(debias=True)
    return {
        "fit, two-batch": lambda: fitted(debias=True),
        "fit, cross-fit with curvature sampling": lambda: fitted(
            debias="crossfit", sampling="curvature"
        ),
        "la(x)": lambda: la(X[:5]),
        "sweep": lambda: sweep_prior_precision(la, val),
        "compare": lambda: compare(
            net, loader, val, budgets=(16,), n_draws=1, prior_precisions=[1.0, 10.0]
        ),
        "bias report": lambda: curvature_bias_report(
            net, nn.CrossEntropyLoss(), loader, batch_sizes=(16,), k=2, draws=1
        ),
    }


def _files_passed(call):
    """Files of the library whose functions a call enters, in the order of entry."""
    folder, found = str(ROOT / "laplace_debias"), {}

    def seen(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            found[frame.f_code.co_filename[len(folder) + 1 :]] = None

    before = sys.getprofile()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.setprofile(seen)
        try:
            call()
        finally:
            sys.setprofile(before)
    return list(found)


def _name(path: Path) -> str:
    """The module that a file is."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def _imported(source: str) -> list[tuple[str, str, str]]:
    """Modules, names and aliases that a file imports from the library."""
    return [
        (node.module, alias.name, alias.asname or alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("laplace_debias")
        for alias in node.names
    ]


def _errors(source: str) -> list[ast.Call]:
    """Every error that is raised with arguments."""
    raised = (node.exc for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise))
    return [error for error in raised if isinstance(error, ast.Call) and error.args]


def _wanting(error: ast.Call) -> bool:
    """Whether a message lacks a part; several errors may share what they call ``remedy``."""
    if ast.unparse(error.func) in WITHOUT_REMEDY:
        return False
    message = ast.unparse(error).replace("{remedy}", "Remedy:")
    return any(part not in message for part in ("Expected ", " got", "Remedy:"))


def _folder(room: str) -> Path:
    return ROOT / room.replace(".", "/")


def _all(room: str) -> set[str]:
    """``__all__`` of a room, read without importing it."""
    for node in ast.parse((_folder(room) / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    return set()
