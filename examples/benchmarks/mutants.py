"""Break one line at a time and see whether a test notices: which lines does no test guard?

A seeded sample of all mutants of ``kfac/``, ``debias/`` and ``predictive/``. Each is written into a
copy of the repository and tried in two stages, each ended by its first failure: the module's
doctests and its namesake test, then all tests of its room. A small mutator of our own, because each
mutant needs other tests (with the whole suite 300 mutants take a day), in a process that has
imported PyTorch already, and because the tree that is worked in must not be written to.

Finished mutants are kept in ``--results``, and the same call goes on from there::

    python -m examples.benchmarks.mutants --n 300 --seed 0 --results outputs/mutants.jsonl
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("kfac", "debias", "predictive")
STAGES = ("namesake", "room")
SECONDS = 240
"""Time-out of a stage: a mutant that loops for ever is noticed."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.MatMult: ast.Add,
}  # fmt: skip
NAMES = {"sum": "mean", "mean": "sum", "min": "max", "max": "min", "all": "any", "any": "all"}


@dataclass(frozen=True)
class Mutant:
    """One change of one line.

    Attributes:
        path: The file, from the repository's root.
        line: Where.
        number: Which of the file's mutants.
        what: The expression before and after.
        digest: Of the file's content: another content has other mutants.
    """

    path: str
    line: int
    number: int
    what: str
    digest: str


def changes(node: ast.AST) -> Iterator[Callable[[ast.AST], None]]:
    """What can be done to a node: functions that change a copy of it in place.

    Args:
        node: A node of a syntax tree.

    Yields:
        One function per mutant.

    Example:
        >>> tree = ast.parse("a + b").body[0].value
        >>> for change in changes(tree):
        ...     change(tree)
        >>> ast.unparse(tree)
        'a - b'
    """
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield lambda n: n.ops.__setitem__(0, COMPARISONS[type(n.ops[0])]())  # type: ignore
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        yield lambda n: setattr(n, "op", OPERATORS[type(n.op)]())  # type: ignore
    if isinstance(node, ast.BoolOp):
        swap = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield lambda n: setattr(n, "op", swap())
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))  # type: ignore
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield lambda n: setattr(n, "op", ast.UAdd())
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield lambda n: setattr(n, "value", not n.value)  # type: ignore
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield lambda n: setattr(n, "value", n.value + max(1, abs(n.value)))  # type: ignore
    if isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield lambda n: setattr(n, "attr", NAMES[n.attr])  # type: ignore
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield lambda n: setattr(n, "value", ast.Constant(None))


def sites(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that may change: no annotation, decorator, error message or import.

    Args:
        tree: A module.

    Yields:
        Nodes, in the order of the source.
    """

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.AnnAssign | ast.arg):
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                yield from walk(node.value)
            return
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("returns", "decorator_list", "annotation", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child)

    yield from walk(tree)


def digest_of(source: str) -> str:
    """A name for a file's content."""
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def mutants_of(path: str, source: str) -> Iterator[tuple[Mutant, str]]:
    """All mutants of a file, with the source of each.

    Args:
        path: Its name.
        source: Its content.

    Yields:
        The mutant and the changed content.

    Example:
        >>> [mutant.what for mutant, _ in mutants_of("a.py", "b = -c > 0")]
        ['-c > 0  ->  -c >= 0', '-c  ->  +c', '0  ->  1']
    """
    tree, number = ast.parse(source), 0
    nodes = list(sites(tree))
    for i, node in enumerate(nodes):
        for j, _ in enumerate(changes(node)):
            other = copy.deepcopy(tree)
            target = list(sites(other))[i]
            before = ast.unparse(target).splitlines()[0][:70]
            list(changes(target))[j](target)
            after = ast.unparse(ast.fix_missing_locations(target)).splitlines()[0][:70]
            line, what = getattr(node, "lineno", 0), f"{before}  ->  {after}"
            yield Mutant(path, line, number, what, digest_of(source)), ast.unparse(other)
            number += 1


def count_mutants(path: Path) -> int:
    """How many mutants a file has."""
    return sum(1 for node in sites(ast.parse(path.read_text())) for _ in changes(node))


def sample(folder: Path, n: int, seed: int) -> list[tuple[str, int]]:
    """Draw mutants of all rooms without replacement.

    Args:
        folder: The repository, or a copy.
        n: How many; all if there are fewer.
        seed: Decides which.

    Returns:
        File and number of each, in the order drawn, so that the first k are a sample as well.
    """
    files = [p for room in ROOMS for p in sorted((folder / "laplace_debias" / room).glob("*.py"))]
    pairs = [(str(p.relative_to(folder)), i) for p in files for i in range(count_mutants(p))]
    return random.Random(seed).sample(pairs, min(n, len(pairs)))


def stage_tests(path: str) -> list[list[str]]:
    """What is run for a mutant of a file, stage by stage.

    Args:
        path: The file, from the repository's root.

    Returns:
        Arguments of pytest for each of the ``STAGES``.

    Example:
        >>> stage_tests("laplace_debias/kfac/grams.py")[0]
        ['laplace_debias/kfac/grams.py', 'tests/kfac/test_grams.py']
    """
    _, room, name = Path(path).parts
    namesake = f"tests/{room}/test_{name}"
    first = [path] + ([namesake] if (ROOT / namesake).exists() else [])
    return [first, [f"tests/{room}"]]


def run_tests(folder: Path, tests: list[str]) -> str:
    """Run tests of the library in a folder, in a process of their own.

    Args:
        folder: A copy of the repository.
        tests: Arguments of pytest.

    Returns:
        ``"passed"``, ``"failed"`` or ``"timed out"``.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1), os.dup2(quiet, 2)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore"]
        os._exit(int(pytest.main([*options, *tests])))
    stop = time.monotonic() + SECONDS
    while time.monotonic() < stop:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "passed" if os.waitstatus_to_exitcode(status) == 0 else "failed"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timed out"


def preload() -> None:
    """Import what all tests need but for the library itself, once."""
    import hypothesis  # noqa: F401
    import laplace  # noqa: F401
    import matplotlib  # noqa: F401
    import torch
    import torchmetrics  # noqa: F401

    torch.set_num_threads(1)


def main() -> None:
    """Try a sample and print who survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("outputs/mutants.jsonl"))
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    args.results.parent.mkdir(parents=True, exist_ok=True)
    finished = {}
    if args.results.exists():
        rows = [json.loads(line) for line in args.results.read_text().splitlines()]
        finished = {(row["path"], row["number"], row["digest"]): row for row in rows}
    preload()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("laplace_debias", "tests", "examples"):
            ignored = shutil.ignore_patterns("__pycache__", "reported*")
            shutil.copytree(ROOT / part, folder / part, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)
        sys.dont_write_bytecode = True
        for path, number in sample(folder, args.n, args.seed):
            original = (folder / path).read_text()
            if (path, number, digest_of(original)) in finished:
                continue
            found = mutants_of(path, original)
            mutant, source = next(pair for pair in found if pair[0].number == number)
            (folder / path).write_text(source)
            killed, start = "survived", time.monotonic()
            for stage, tests in zip(STAGES, stage_tests(path), strict=True):
                if run_tests(folder, tests) != "passed":
                    killed = stage
                    break
            (folder / path).write_text(original)
            row = {**asdict(mutant), "killed": killed, "seconds": time.monotonic() - start}
            finished[path, number, mutant.digest] = row
            with args.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(Counter(row["killed"] for row in finished.values()))
    for row in finished.values():
        if row["killed"] == "survived":
            print(f"{row['path']}:{row['line']}  {row['what']}")


if __name__ == "__main__":
    main()
