"""Parametrised weights: exact when frozen, exact as effective weights, refused otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from laplace_debias import Laplace, bake_parametrizations
from tests import oracles
from tests.cases import seeded
from tests.oracles_predictive import dense_covariance, marginal

EXACT = {"rtol": 1e-8, "atol": 1e-10}
N = 40


class Doubled(nn.Module):
    """A parametrisation of one's own."""

    def forward(self, V: Tensor) -> Tensor:
        """Scale."""
        return 2 * V


KINDS = {
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral norm": parametrizations.spectral_norm,
    "own": lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()) or layer,
}


def network(kind: str) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    KINDS[kind](net[0])
    return net.eval()


def data() -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(1)
    return torch.randn(10, 3, generator=gen).double(), torch.arange(10) % 3


def fitted(model: nn.Module):
    la = Laplace(model, "classification", "all", "kron", debias="single")
    la.fit(data(), n_data=N)
    return la


def ordinary(weight: Tensor, model: nn.Module) -> nn.Module:
    """The same network of ordinary layers, written by hand."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        net[0].weight.copy_(weight), net[0].bias.copy_(model[0].bias)
    net[2].load_state_dict(model[2].state_dict())
    return net


@pytest.mark.parametrize("kind", KINDS)
def test_effective_weights_have_the_posterior_of_an_ordinary_network(kind):
    model, (X, y) = seeded(lambda: network(kind)), data()
    weight = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"parametrizations.weight.*bake_parametrizations"):
        fitted(model)
    baked = bake_parametrizations(model)
    assert parametrize.is_parametrized(model[0]) and not parametrize.is_parametrized(baked[0])
    assert torch.equal(baked[0].weight, weight) and baked[0].weight.requires_grad
    plain, la = ordinary(weight, model), fitted(baked)
    blocks = oracles.kfac(plain, X, y, "classification")
    names = [name for name, _ in baked.named_parameters()]  # the bias comes first
    expected = oracles.dense({name: blocks[name] for name in names}, N / len(y))
    torch.testing.assert_close(la.H.to_matrix(), expected, **EXACT)
    covariance = marginal(dense_covariance(la, X[:4], la.prior_precision))
    torch.testing.assert_close(la.output_moments(X[:4])[1], covariance, **EXACT)
    torch.testing.assert_close(la.output_moments(X[:4])[0], model(X[:4]).detach(), **EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_frozen_originals_are_exact_for_all_other_parameters(kind, training):
    model, (X, y) = seeded(lambda: network(kind)), data()
    model[0].parametrizations.requires_grad_(False)
    model.train(training)
    weight = model.eval()[0].weight.detach().clone()
    model.train(training)
    plain = ordinary(weight, model)
    plain[0].weight.requires_grad_(False)
    la = fitted(model)
    expected = oracles.dense(oracles.kfac(plain, X, y, "classification"), N / len(y))
    torch.testing.assert_close(la.H.to_matrix(), expected, **EXACT)
    covariance = marginal(dense_covariance(la, X[:4], la.prior_precision))
    torch.testing.assert_close(la.output_moments(X[:4])[1], covariance, **EXACT)
    assert model.training == training
    assert not bake_parametrizations(model)[0].weight.requires_grad
    assert bake_parametrizations(model).training == training
