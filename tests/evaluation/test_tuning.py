"""Tuning against loops over upstream's own predictions, and what it says about edges."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from laplace.baselaplace import KronLaplace
from laplace.lllaplace import KronLLLaplace
from torch import nn

from laplace_debias import Laplace, evaluate, sweep_prior_precision
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
    result = tune(la, loader, prior_precisions=GRID, noise=False)
    assert [v for (v,) in result.values] == pytest.approx(slow_nll(la, loader, GRID), rel=1e-10)
    assert result.logit_temperatures == (1.0,) and result.layerwise is not None
    assert result.noise_scale == 1.0 and result.prior_precisions == pytest.approx(GRID)
    with pytest.raises(ValueError, match="which has no logits"):
        tune(la, loader, logit_temperatures=[0.5])


@pytest.mark.parametrize("cls", [KronLaplace, KronLLLaplace])
def test_the_noise_of_a_regression_is_the_best_for_every_prior(cls):
    la, loader = fitted_mlp(cls, "regression", sigma_noise=0.4)
    result = tune(la, loader, prior_precisions=GRID, layerwise=False)
    assert result.noise_scales is not None and max(result.noise_scales) > 1.2
    for delta, scale, (value,) in zip(
        result.prior_precisions, result.noise_scales, result.values, strict=True
    ):
        near = {}
        for factor in (0.98, 1.0, 1.02):  # the ridge is what stays
            la.sigma_noise = 0.4 * scale * factor
            (near[factor],) = slow_nll(la, loader, [delta / factor**2])
        assert near[1.0] == pytest.approx(value, rel=1e-9)
        assert near[1.0] < min(near[0.98], near[1.02])


def regression(sigma_noise, outputs=2, n=60):
    torch.manual_seed(0)
    net, X = nn.Linear(3, outputs), torch.randn(n, 3)
    y = net(X).detach() + torch.randn(n, outputs) * torch.tensor([0.1, 0.5])
    la = Laplace(net, "regression", "all", "kron", debias="single", sigma_noise=sigma_noise)
    la.fit((X, y), n_data=n)
    return la, (X, y)


def test_tuning_takes_the_noise_and_one_noise_per_output_stays_in_proportion():
    ratios = torch.tensor([0.2, 1.0])
    la, batch = regression(ratios)
    result = la.tune(batch, prior_precisions=GRID, layerwise=False)
    assert 0.4 < result.noise_scale < 0.6  # drawn with half of what was said
    assert torch.allclose(la.observation_noise, ratios * result.noise_scale)
    assert evaluate(la, batch).nll == pytest.approx(result.best, rel=1e-9)
    again = la.tune(batch, prior_precisions=[float(la.prior_precision)], layerwise=False)
    assert again.noise_scale == pytest.approx(1.0, rel=1e-3)


def test_the_grid_of_a_regression_is_that_of_the_tuned_noise():
    la, batch = regression(5.0)  # far too large
    result = la.tune(batch, prior_precisions=GRID, layerwise=False)
    assert result.noise_scale < 0.15
    assert result.prior_precisions == pytest.approx(GRID, rel=0.2)
    once = tune(la, iter([batch]), prior_precisions=GRID, layerwise=False)
    assert once.prior_precisions == pytest.approx(GRID, rel=0.2)  # the noise is right already


def test_targets_without_any_noise_have_no_best_noise():
    la, (X, _) = regression(1.0)
    with pytest.raises(ValueError, match="got NaN for 'nll' at all of them. Remedy"):
        la.tune((X, la.model(X).detach()))
    assert la.sigma_noise == 1.0


def test_a_prior_per_layer_knows_the_noise_and_stays_within_the_grid():
    la, batch = regression(1.0)
    result = la.tune(batch, prior_precisions=GRID)
    trial = result.layerwise
    assert trial is not None
    assert all(GRID[0] * 0.8 <= d <= GRID[-1] * 1.2 for d in trial.prior_precisions)
    X, y = batch
    held = evaluate_at(la, (X[1::2], y[1::2]), float(result.prior_precisions[result.best_index[0]]))
    assert trial.held_out[0] == pytest.approx(held, rel=1e-4)


def evaluate_at(la, batch, delta):
    la.prior_precision = delta
    return evaluate(la, batch).nll


def test_what_was_chosen_is_said():
    la, batch = regression(1.0)
    text = str(la.tune(batch, prior_precisions=GRID))
    assert (
        text.startswith("Chosen: ")
        and "sigma_noise multiplied by 0." in text
        and "logit" not in text
    )
    la, batch = debiased()
    result = la.tune(batch, prior_precisions=GRID)
    assert f"logit_temperature={la.logit_temperature:.3g}" in str(result)
    assert "the half that judged" in str(result)
    assert max(map(len, str(result).splitlines())) < 160 < len(result.table().splitlines()[1])


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
