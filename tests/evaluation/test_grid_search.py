"""laplace-torch's grid search on the sweep, against a slow loop."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from laplace.baselaplace import KronLaplace
from laplace.lllaplace import KronLLLaplace
from laplace.utils.metrics import RunningNLLMetric
from torch import nn

from laplace_debias.evaluation import grid_search
from laplace_debias.evaluation.sweep import sweep_prior_precision
from laplace_debias.predictive import predictions
from laplace_debias.predictive.predictor import StructuredPredictor
from tests.fitted_predictive import (
    double_precision,  # noqa: F401
    fitted_mlp,
    slow_nll,
)

gridsearch_prior_precision = partial(
    grid_search.gridsearch_prior_precision, predictor_of=StructuredPredictor
)

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("cls", [KronLaplace, KronLLLaplace])
def test_gridsearch_agrees_with_a_slow_loop(cls, likelihood):
    la, loader = fitted_mlp(cls, likelihood)
    la.prior_precision = 5.0
    result = gridsearch_prior_precision(
        la, loader, log_prior_prec_min=-2, log_prior_prec_max=3, grid_size=6
    )
    assert la.prior_precision.tolist() == [5.0]
    expected = slow_nll(la, loader, torch.logspace(-2, 3, 6))
    assert result.values["loss"] == pytest.approx(expected, rel=1e-6)  # the grid is float32's
    best = min(range(6), key=expected.__getitem__)
    assert result.prior_precisions[best].item() == pytest.approx(10 ** (best - 2))


def test_gridsearch_takes_metrics_and_functions():
    la, loader = fitted_mlp()
    options = {"grid_size": 4, "log_prior_prec_base": 2.0}
    by_metric = gridsearch_prior_precision(la, loader, loss=RunningNLLMetric(), **options)
    by_function = gridsearch_prior_precision(
        la, loader, loss=lambda p, y: nn.functional.nll_loss(p.log(), y), **options
    )
    assert by_metric.values["loss"] == pytest.approx(by_function.values["loss"])
    assert by_metric.prior_precisions[0].item() == pytest.approx(2.0**-4)
    la, loader = fitted_mlp(likelihood="regression")
    shapes = []

    def loss(mean, cov, y):
        shapes.append((mean.shape, cov.shape, y.shape))
        return cov.diagonal(dim1=1, dim2=2).mean()

    result = gridsearch_prior_precision(la, loader, loss=loss, **options)
    assert shapes == [((20, 3), (20, 3, 3), (20, 3))] * 4
    assert sorted(result.values["loss"], reverse=True) == list(result.values["loss"])


def test_gridsearch_with_sampled_networks_restores_the_prior():
    la, loader = fitted_mlp()
    la.prior_precision = 5.0
    result = gridsearch_prior_precision(
        la, loader, pred_type="nn", link_approx="mc", n_samples=5, grid_size=3
    )
    assert la.prior_precision.tolist() == [5.0]
    assert all(math.isfinite(v) for v in result.values["loss"])

    def fail(p, y):
        raise RuntimeError("broken loss")

    for pred_type, link in [("nn", "mc"), ("glm", "probit")]:
        with pytest.raises(RuntimeError, match="broken"):
            gridsearch_prior_precision(
                la, loader, pred_type=pred_type, link_approx=link, loss=fail, grid_size=2
            )
        assert la.prior_precision.tolist() == [5.0]


def test_sampled_networks_against_a_slow_loop():
    la, loader = fitted_mlp()
    torch.manual_seed(1)
    result = gridsearch_prior_precision(
        la, loader, pred_type="nn", n_samples=5, grid_size=2, log_prior_prec_min=0
    )
    torch.manual_seed(1)
    expected = []
    for delta in torch.logspace(0, 4, 2):
        la.prior_precision = delta
        losses = []
        for x, y in loader:
            probs = la(x, pred_type="nn", link_approx="mc", n_samples=5)
            losses += (-probs[range(len(y)), y].log()).tolist()
        expected.append(sum(losses) / len(losses))
    assert result.values["loss"] == pytest.approx(expected, rel=1e-10)
    assert expected[0] != pytest.approx(expected[1], rel=1e-3)


def test_empty_loaders():
    la, _ = fitted_mlp()
    for search in (sweep_prior_precision, gridsearch_prior_precision):
        with pytest.raises(ValueError, match="empty"):
            search(la, [])
    with pytest.raises(ValueError, match="empty"):
        gridsearch_prior_precision(la, [], pred_type="nn", link_approx="mc", grid_size=1)
    with pytest.raises(ValueError, match="None"):
        gridsearch_prior_precision(la, None)


def test_nan_losses_are_never_chosen(monkeypatch):
    la, loader = fitted_mlp()
    options = {"grid_size": 3, "log_prior_prec_min": -1, "log_prior_prec_max": 1}
    original = predictions.glm_predictions

    def broken(*args, **kwargs):
        for i, (log_probs,) in enumerate(original(*args, **kwargs)):
            yield (log_probs * math.nan if i == 1 else log_probs,)

    monkeypatch.setattr("laplace_debias.evaluation.predictors.glm_predictions", broken)
    losses = {
        "default": None,
        "metric": RunningNLLMetric(),
        "function": lambda p, y: (p.argmax(-1) != y).double().mean(),
    }
    for name, loss in losses.items():
        result = gridsearch_prior_precision(la, loader, loss=loss, **options)
        assert result.nan_points("loss") == (1,), name


def test_one_mini_batch_is_enough():
    la, loader = fitted_mlp()
    pair = loader.dataset.tensors
    for options in ({}, {"pred_type": "nn", "n_samples": 3, "generator": None}):
        torch.manual_seed(0)
        expected = gridsearch_prior_precision(la, [pair], grid_size=2, **options)
        torch.manual_seed(0)
        found = gridsearch_prior_precision(la, pair, grid_size=2, **options)
        assert found.values == expected.values
    assert found.link_approx == "mc"
    with pytest.raises(ValueError, match="with targets, got a tensor"):
        gridsearch_prior_precision(la, [pair[0]], grid_size=2)
    with pytest.raises(ValueError, match="class indices in"):
        gridsearch_prior_precision(la, (pair[0], pair[1] + 3), pred_type="nn", grid_size=2)
