"""Tuning against loops over upstream's own predictions, and what it says about edges."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from laplace.baselaplace import KronLaplace
from laplace.lllaplace import KronLLLaplace
from torch import nn

from laplace_debias import Laplace, sweep_prior_precision
from laplace_debias.evaluation import tuning
from laplace_debias.predictive.predictor import StructuredPredictor
from tests.fitted_predictive import double_precision, fitted_mlp, slow_nll  # noqa: F401

tune = partial(tuning.tune, predictor_of=StructuredPredictor)

GRID, TS = [0.05, 1.0, 30.0], [0.5, 1.0, 2.0]

pytestmark = [
    pytest.mark.usefixtures("double_precision"),
    pytest.mark.filterwarnings("ignore:The best 'nll' lies"),
    pytest.mark.filterwarnings("ignore:The best 'brier' lies"),
]


def slow(la, loader, delta, T):
    """NLL with the probit link from laplace-torch's own moments, datum by datum."""
    la.prior_precision = delta
    total, n = 0.0, 0
    for x, y in loader:
        mean, covariance = la._glm_predictive_distribution(x)
        for m, S, label in zip(mean, covariance, y, strict=True):
            logits = (m / T) / (1 + torch.pi / 8 * S.diagonal() / T**2).sqrt()
            total -= float(logits[label] - logits.logsumexp(0))
            n += 1
    return total / n


@pytest.mark.parametrize("cls", [KronLaplace, KronLLLaplace])
def test_every_pair_agrees_with_a_slow_loop(cls):
    la, loader = fitted_mlp(cls)
    result = tune(la, loader, prior_precisions=GRID, logit_temperatures=TS, layerwise=False)
    expected = [[slow(la, loader, delta, T) for T in TS] for delta in GRID]
    assert torch.tensor(result.values).allclose(torch.tensor(expected), rtol=1e-10)
    x, y = loader.dataset.tensors
    plain = [nn.functional.cross_entropy(la.model(x) / T, y).item() for T in TS]
    assert result.plain == pytest.approx(plain, rel=1e-10)


def test_regression_has_no_temperature():
    la, loader = fitted_mlp(KronLaplace, "regression", sigma_noise=0.4)
    result = tune(la, loader, prior_precisions=GRID)
    assert [v for (v,) in result.values] == pytest.approx(slow_nll(la, loader, GRID), rel=1e-10)
    assert result.logit_temperatures == (1.0,) and result.layerwise is not None
    with pytest.raises(ValueError, match="which has no logits"):
        tune(la, loader, logit_temperatures=[0.5])


@pytest.mark.parametrize("link", ["mc", "bridge", "bridge_norm"])
def test_other_links_agree_with_the_sweep(link):
    la, loader = fitted_mlp()
    result = tune(la, loader, prior_precisions=GRID, logit_temperatures=[1.0], link_approx=link)
    seeded = torch.Generator().manual_seed(0)
    swept = sweep_prior_precision(la, loader, GRID, link_approx=link, generator=seeded)
    assert [v for (v,) in result.values] == pytest.approx(swept.values["nll"], rel=1e-10)
    assert result.layerwise is None


def debiased(n=40, **kwargs):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    X = torch.randn(n, 3)
    y = (2 * X + torch.randn(n, 3)).argmax(-1)
    la = Laplace(net, "classification", "all", "kron", debias="single", **kwargs)
    la.fit((X, y), n_data=n)
    return la, (X, y)


def test_an_under_confident_network_is_told_so():
    la, (X, _) = debiased()
    labels = la.model(X).argmax(-1)  # always right, never sure: any uncertainty makes it worse
    with pytest.warns(UserWarning, match="the plain network is better than any of these posteri"):
        la.tune((X, labels), logit_temperatures=[1.0], layerwise=False)
    with pytest.warns(UserWarning, match="dividing the logits by a temperature below 1"):
        result = la.tune((X, labels), prior_precisions=[1.0, 1e9], layerwise=False)
    assert result.logit_temperature == 0.25  # the edge
    assert any("logit temperature 0.25" in text for text in result.warnings())


def test_no_warning_inside_the_grid():
    torch.manual_seed(0)
    net, X = nn.Linear(3, 3), torch.randn(200, 3)
    batch = (X, (2 * X + torch.randn(200, 3)).argmax(-1))
    with torch.no_grad():  # the right decisions, too sure of them
        net.weight.copy_(4 * torch.eye(3))
    la = Laplace(net, "classification", "all", "kron", debias="single")
    la.fit(batch, n_data=200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        priors = la.tune(
            batch, prior_precisions=[1e-2, 1.0, 100.0], logit_temperatures=[1.0], layerwise=False
        )
        temperatures = la.tune(batch, prior_precisions=[1.0], layerwise=False)
    assert priors.best < min(priors.plain) and priors.prior_precision == 1.0
    assert 1 < temperatures.logit_temperature < 2


def test_what_cannot_be_tuned_is_refused():
    la, batch = debiased()
    with pytest.raises(ValueError, match="large or small values are better"):
        la.tune(batch, "mean_entropy")
    with pytest.raises(ValueError, match="scalar prior precisions"):
        la.tune(batch, prior_precisions=torch.rand(2, 4) + 1)
    with pytest.raises(ValueError, match="at least one logit temperature"):
        la.tune(batch, logit_temperatures=[])
    assert la.prior_precision.tolist() == [1.0]


def test_another_objective_and_the_same_numbers_for_mc():
    la, batch = debiased()
    first, second = (tune(la, batch, "brier", link_approx="mc", n_samples=9) for _ in range(2))
    assert first == second and first.layerwise is None
    assert first.best == min(value for row in first.values for value in row)
