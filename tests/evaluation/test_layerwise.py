"""A prior per layer: interpolated variances, gradients, and a held-out half that decides."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.interpolate import BarycentricInterpolator
from torch import nn

from laplace_debias import Laplace, linearized_predictive
from laplace_debias.evaluation import layerwise
from laplace_debias.evaluation.layerwise import chebyshev, lagrange
from laplace_debias.predictive.predictor import StructuredPredictor
from tests.fitted_predictive import double_precision  # noqa: F401

layerwise_trial = partial(layerwise.layerwise_trial, predictor_of=StructuredPredictor)

pytestmark = pytest.mark.usefixtures("double_precision")


def test_coefficients_agree_with_scipys_interpolator():
    nodes = chebyshev(9, torch.zeros(0))
    t = torch.linspace(-0.95, 0.9, 7)
    ours = lagrange(t, nodes) @ nodes.sin()
    theirs = BarycentricInterpolator(nodes.numpy(), np.sin(nodes.numpy()))(t.numpy())
    assert torch.allclose(ours, torch.as_tensor(theirs), rtol=1e-12)


def test_the_interpolation_is_as_exact_as_it_says():
    nodes, t = chebyshev(16, torch.zeros(0)), torch.linspace(-1, 1, 201)
    lam = torch.logspace(-6, 6, 400)[:, None]

    def bounded(t):
        return 10 ** (2 * t) / (lam + 10 ** (2 * t))

    error = (bounded(nodes) @ lagrange(t, nodes).T - bounded(t)).abs().max()
    assert 1e-5 < error < 8e-5


def _fitted(last=False, regression=False, n=60):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))
    X = torch.randn(n, 3)
    y = torch.randn(n, 3) if regression else (2 * X + torch.randn(n, 3)).argmax(-1)
    kind, subset = ("regression", "classification")[not regression], ("all", "last_layer")[last]
    la = Laplace(net, kind, subset, "kron", debias="single")
    la.fit((X, y), n_data=n)
    return la, (X, y)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("diagonal", [False, True])
def test_blocks_apart_add_up(last, diagonal):
    la, (X, _) = _fitted(last)
    grid = [0.3, 5.0]
    f, moments = StructuredPredictor(la, grid, memory_budget=20_000).apart(X, diagonal)
    whole = linearized_predictive(la, X, grid, diagonal_output=diagonal)
    assert len(moments) == (2 if last else 4)
    assert torch.allclose(moments.sum(0).movedim(-1, 0), whole.covariance)
    assert torch.allclose(f, whole.mean)
    # one block alone: the others' prior is so strong that they do not move
    for b in range(len(moments)):
        alone = torch.full((1, len(moments)), 1e14)
        alone[0, b] = 5.0
        only = linearized_predictive(la, X, alone, diagonal_output=diagonal).covariance[0]
        assert torch.allclose(moments[b, ..., 1], only, atol=1e-10)


@pytest.mark.parametrize("regression", [False, True])
def test_both_halves_are_measured_at_the_found_priors(regression):
    la, (X, y) = _fitted(regression=regression)
    trial = layerwise_trial(la, [(X[:31], y[:31]), (X[31:], y[31:])], 2.0, 1.0 + (not regression))
    T = 1.0 if regression else 2.0

    def exact(rows, delta):
        moments = linearized_predictive(la, X[rows], torch.tensor(delta).expand(1, 4))
        mean, S = moments.mean, moments.covariance[0]
        if regression:
            normal = torch.distributions.MultivariateNormal(mean, S + torch.eye(3))
            return float(-normal.log_prob(y[rows]).mean())
        scores = mean / T / (1 + math.pi / 8 * S.diagonal(dim1=1, dim2=2) / T**2).sqrt()
        return float(nn.functional.cross_entropy(scores, y[rows]))

    even, odd = torch.arange(0, 60, 2), torch.arange(1, 60, 2)
    for rows, found in ((even, trial.seen), (odd, trial.held_out)):
        assert found[0] == pytest.approx(exact(rows, 2.0), rel=1e-4)
        assert found[1] == pytest.approx(exact(rows, trial.prior_precisions), rel=1e-4)
    assert trial.seen[1] < trial.seen[0]
    assert trial.n_data == 60
    assert all(0.02 <= delta <= 200 for delta in trial.prior_precisions)


def test_the_gradient_leads_to_a_stationary_point():
    def loss(t):
        return (t - torch.tensor([0.3, 2.0])).square().sum()

    for end in (1.0, 0.6):
        t = layerwise._descend(loss, torch.zeros(2), (-1.0, end), 150, 0.05)
        assert torch.allclose(t, torch.tensor([0.3, end]), atol=1e-3)


def test_noise_is_not_kept():
    """Labels that have nothing to do with the inputs: what one half likes, the other does not."""
    kept = 0
    for seed in range(6):
        la, (X, _) = _fitted()
        y = torch.randint(3, (60,), generator=torch.Generator().manual_seed(seed))
        trial = layerwise_trial(la, (X, y), 2.0)
        assert trial.seen[1] <= trial.seen[0]
        kept += trial.kept
    assert kept <= 3


def test_a_layer_that_needs_its_own_prior_is_found():
    """One weight's prior is a thousandth of the others'; data from the model itself show it."""
    la, _ = _fitted(regression=True, n=10)
    X = torch.randn(2000, 3, generator=torch.Generator().manual_seed(1))
    S = linearized_predictive(la, X, torch.tensor([[0.03, 30.0, 30.0, 30.0]])).covariance[0]
    noise = torch.distributions.MultivariateNormal(torch.zeros(3), S + torch.eye(3)).sample()
    trial = layerwise_trial(la, (X, la.model(X).detach() + noise), 3.0)
    assert trial.kept
    assert trial.prior_precisions[0] == pytest.approx(0.03, rel=0.5)
    assert trial.prior_precisions[2] > 100 * trial.prior_precisions[0]


def test_only_as_many_data_as_fit_are_read():
    la, (X, y) = _fitted()
    per_datum = 8 * 4 * 16 * 3
    trial = layerwise_trial(
        la, [(X[:30], y[:30]), (X[30:], y[30:])], 2.0, memory_budget=40 * per_datum
    )
    assert trial.n_data == 40
