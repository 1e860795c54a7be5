"""laplace-torch's own tests run on our classes, where there is a checkout of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.benchmarks.upstream_suite import FILES, run_suite

ROOT = Path(__file__).parents[3]
CHECKOUT = os.environ.get("LAPLACE_TORCH_CHECKOUT")
"""A checkout of laplace-torch's repository."""

TEST_FILE = """
import pytest, torch
from laplace import DiagLaplace, KronLaplace
from laplace.lllaplace import KronLLLaplace
from tests.utils import data

@pytest.mark.parametrize("laplace", [KronLaplace, KronLLLaplace, DiagLaplace])
def test_ours(laplace):
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    la = laplace(net, "classification", prior_precision=2.0)
    assert la.debias == "single"
    la.fit(data())
    assert la(torch.ones(1, 2)).shape == (1, 2)

def test_that_fails_and_is_called_kron():
    assert False

def test_of_another_class():
    assert False
"""
UTILS = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def data():
    return DataLoader(TensorDataset(torch.randn(6, 2), torch.arange(6) % 2), batch_size=3)
"""


def suite(checkout: Path | str) -> subprocess.CompletedProcess[str]:
    """Run the suite in a process of its own: it exchanges modules."""
    return subprocess.run(
        [sys.executable, "-m", "examples.benchmarks.upstream_suite", str(checkout)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_their_tests_see_our_classes_and_failures_count(tmp_path):
    (tmp_path / "tests").mkdir()
    for name, text in {"__init__.py": "", "utils.py": UTILS, FILES[0]: TEST_FILE}.items():
        (tmp_path / "tests" / name).write_text(text, encoding="utf-8")
    for name in FILES[1:]:
        (tmp_path / "tests" / name).write_text("", encoding="utf-8")
    result = suite(tmp_path)
    assert result.stdout.endswith("2 of 3 tests passed, 0 skipped\n"), result.stdout
    assert result.returncode == 1


def test_a_path_without_the_tests_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Expected a checkout of laplace-torch's repository"):
        run_suite(tmp_path, [])


@pytest.mark.skipif(CHECKOUT is None, reason="LAPLACE_TORCH_CHECKOUT names no checkout")
def test_their_suite_passes():
    result = suite(str(CHECKOUT))
    assert result.returncode == 0, result.stdout
