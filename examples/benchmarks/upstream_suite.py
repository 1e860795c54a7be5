"""Run laplace-torch's own tests of its Kron classes on ours.

With ``debias="single"`` on a whole loader nothing is debiased, and our classes have to behave as
laplace-torch's do. Its tests are in its repository, not in its package::

    git clone https://github.com/aleximmer/Laplace upstream
    python -m examples.benchmarks.upstream_suite upstream

What follows the path goes to pytest, e.g. ``-k serialization``. Tests that need a network of
torchvision are skipped where it is not installed. The exit code is 1 if a test fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import laplace
import laplace.baselaplace
import laplace.lllaplace
import pytest

from laplace_debias.posterior import DebiasedKronLaplace, DebiasedKronLLLaplace

FILES = (
    "test_baselaplace.py",
    "test_lllaplace.py",
    "test_serialization.py",
    "test_subset_params.py",
)
"""Their tests of posteriors; the others test backends, matrices and other approximations."""


class KronLaplace(DebiasedKronLaplace):
    """Ours over all weights, with laplace-torch's signature and name."""

    _key = ("all", "kron_upstream_suite")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, debias="single", **kwargs)


class KronLLLaplace(DebiasedKronLLLaplace):
    """Ours over the last layer, with laplace-torch's signature and name."""

    _key = ("last_layer", "kron_upstream_suite")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, debias="single", **kwargs)


class OnOurClasses:
    """A pytest plugin: their tests import our classes, tests of others are left out."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self._theirs: list[tuple[types.ModuleType, str, type]] = []

    def pytest_collection(self) -> None:
        """Let ``from laplace import KronLaplace`` give ours while test files are imported."""
        for module in (laplace, laplace.baselaplace, laplace.lllaplace):
            for cls in (KronLaplace, KronLLLaplace):
                if hasattr(module, cls.__name__):
                    self._theirs.append((module, cls.__name__, getattr(module, cls.__name__)))
                    setattr(module, cls.__name__, cls)

    def pytest_collection_finish(self) -> None:
        """Give laplace-torch its own names back, which it looks up when it runs."""
        for module, name, cls in self._theirs:
            setattr(module, name, cls)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests whose parameters are one of our classes, or that name one themselves."""
        items[:] = [item for item in items if "kron" in item.name.lower()]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test's outcome."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome


def stand_in_for_torchvision() -> None:
    """Skip the tests that need a network of torchvision, where it is not installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return

    def wide_resnet50_2() -> NoReturn:
        pytest.skip("torchvision is not installed")

    models = types.ModuleType("torchvision.models")
    models.wide_resnet50_2 = wide_resnet50_2  # type: ignore[attr-defined]
    sys.modules.update({"torchvision": types.ModuleType("torchvision"), models.__name__: models})


def run_suite(checkout: Path, arguments: list[str]) -> dict[str, str]:
    """Run the tests of a checkout.

    Args:
        checkout: A checkout of laplace-torch's repository.
        arguments: More arguments for pytest.

    Returns:
        The outcome of every test, by its name.

    Raises:
        ValueError: If the tests are not there.
    """
    files = [checkout / "tests" / name for name in FILES]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise ValueError(
            f"Expected a checkout of laplace-torch's repository, got a path without {missing}. "
            "Remedy: git clone https://github.com/aleximmer/Laplace."
        )
    stand_in_for_torchvision()
    # their tests import each other as `tests.utils`; `laplace` itself is imported already
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path.insert(0, str(checkout))
    os.chdir(checkout)
    plugin = OnOurClasses()
    pytest.main(
        ["-q", "-p", "no:cacheprovider", f"--rootdir={checkout}", *arguments, *map(str, files)],
        plugins=[plugin],
    )
    return plugin.outcomes


def main(arguments: list[str] | None = None) -> None:
    """Run the suite of the checkout that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="path of a checkout of aleximmer/Laplace")
    options, rest = parser.parse_known_args(arguments)
    outcomes = run_suite(options.checkout.resolve(), rest)
    counts = Counter(outcomes.values())
    print(f"{counts['passed']} of {len(outcomes)} tests passed, {counts['skipped']} skipped")
    sys.exit(int(counts["failed"] > 0 or not outcomes))


if __name__ == "__main__":
    main()
