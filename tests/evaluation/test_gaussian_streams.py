"""Streams of Gaussian predictions: what is added, refused, and that nothing is lost by refusing."""

from __future__ import annotations

import math

import pytest
import torch

from laplace_debias.evaluation.gaussian_streams import RegressionMetrics


def test_regression_report_by_hand():
    metrics = RegressionMetrics(sigma_noise=0.6)
    variance = torch.tensor([[1.0], [4.0], [1.0]], dtype=torch.float64) - 0.36
    targets = torch.tensor([[0.5], [3.0], [3.0]], dtype=torch.float64)
    metrics.update(torch.zeros(3, 1, dtype=torch.float64), variance, targets)
    report = metrics.compute()
    c = 0.5 * math.log(2 * math.pi)
    nll = (0.125 + c) + (9 / 8 + 0.5 * math.log(4) + c) + (4.5 + c)
    assert report.n_data == 3
    assert report.nll == pytest.approx(nll / 3, rel=1e-12)
    assert report.rmse == pytest.approx(math.sqrt((0.25 + 9 + 9) / 3), rel=1e-12)
    # standard scores 0.5, 1.5, 3 against 0.674, 1.645, 1.960
    assert report.coverage == pytest.approx({0.5: 1 / 3, 0.9: 2 / 3, 0.95: 2 / 3})


def test_levels_of_ones_own():
    metrics = RegressionMetrics(levels=(0.8, 0.999))
    metrics.update(torch.zeros(1, 1), torch.ones(1, 1), torch.full((1, 1), 2.0))
    assert metrics.compute().coverage == {0.8: 0.0, 0.999: 1.0}


@pytest.mark.parametrize(
    ("mean", "variance", "targets", "match"),
    [
        (torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), "positive definite.*1 of 1"),
        (torch.zeros(2, 1), torch.ones(2, 1), torch.zeros(2), r"\[2, 1\] and \[2\]"),
        (torch.zeros(2, 1), torch.ones(2), torch.zeros(2, 1), r"got \[2\]"),
        (torch.full((1, 1), math.nan), torch.ones(1, 1), torch.zeros(1, 1), "finite"),
        (torch.zeros(1, 1), torch.ones(1, 1), torch.full((1, 1), math.inf), "finite"),
        (torch.zeros(1, 1), torch.full((1, 1), math.nan), torch.zeros(1, 1), "finite"),
    ],
)
def test_bad_regressions_are_refused_and_nothing_is_added(mean, variance, targets, match):
    metrics = RegressionMetrics()
    good = (torch.zeros(2, 1), torch.ones(2, 1), torch.ones(2, 1))
    metrics.update(*good)
    before = metrics.compute()
    with pytest.raises(ValueError, match=rf"Expected.*{match}.*Remedy"):
        metrics.update(mean, variance, targets)
    assert metrics.compute() == before


def test_nothing_has_no_report():
    with pytest.raises(ValueError, match="at least one prediction"):
        RegressionMetrics().compute()
