"""The house itself: namesake tests, modules small enough to read, errors that help."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    path.relative_to(ROOT / "laplace_debias")
    for path in (ROOT / "laplace_debias").glob("*/*.py")
    if path.name != "__init__.py"
)
MOST_LINES = 300
LONGER = {
    # What is saved, how it is restored, and all earlier formats.
    "posterior/state.py": 320,
    # Class predictions and Gaussian ones, each with its checks.
    "evaluation/streams.py": 310,
    # THE engine: one pass, and all that is done with it.
    "kfac/engine.py": 380,
    # The class that laplace-torch's users see, all of its methods in one body.
    "posterior/debiased.py": 1000,
    # Every kind of layer, from its calls to its contraction.
    "predictive/layer_jacobians.py": 340,
    # One predictor and the one that several posteriors share.
    "predictive/predictor.py": 450,
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
    "debias/pool_news.py": "posterior/test_several.py",
    "debias/shared_eigen.py": "posterior/test_several.py",
    "debias/shared_folds.py": "posterior/test_several.py",
    "kfac/sums.py": "posterior/test_several.py",
    # Thin bases and laplace-torch's products with them are one behaviour.
    "kfac/thin_kron.py": "kfac/test_thin.py",
    "network/model_check.py": "network/test_check.py",
    "network/products.py": "network/test_check.py",
    "network/verify.py": "network/test_check.py",
    "predictive/row_check.py": "network/test_check.py",
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
