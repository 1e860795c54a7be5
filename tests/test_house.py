"""The house itself: every module has a namesake test, and stays small enough to read."""

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
    # THE engine: half of it is documentation of its attributes and arguments.
    "kfac/engine.py": 340,
    # Every flavour of curvature side by side.
    "network/loss.py": 310,
    # A figure each, with its styles.
    "plots/quadratics.py": 360,
    # The class that laplace-torch's users see, all of its methods in one body.
    "posterior/debiased.py": 800,
    # One predictor and the one that several posteriors share.
    "predictive/predictor.py": 350,
    # Plain and debiased CG, which share their recursion.
    "quadratics/cg.py": 350,
    # One class with its maths, each method a few lines.
    "quadratics/quadratic.py": 310,
    # Three studies with the same steps.
    "quadratics/studies.py": 370,
}


def test_there_are_modules():
    assert len(MODULES) > 60


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_module_has_a_namesake_test(module):
    test = ROOT / "tests" / module.parent / f"test_{module.name}"
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


def _folder(room: str) -> Path:
    return ROOT / room.replace(".", "/")


def _all(room: str) -> set[str]:
    """``__all__`` of a room, read without importing it."""
    for node in ast.parse((_folder(room) / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    return set()
