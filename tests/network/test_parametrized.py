"""Parametrised weights: exact as they are, as effective weights and frozen; large ones refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from laplace_debias import Laplace, bake_parametrizations, check_model, freeze_unsupported
from laplace_debias.predictive.predictor import StructuredPredictor
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


class Masked(nn.Module):
    """Forbids every other entry, and scales the rest by a parameter of its own."""

    def __init__(self, scale: float = 1.5) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([scale]).double())

    def forward(self, V: Tensor) -> Tensor:
        """Multiply."""
        return self.scale * (torch.arange(V.numel()) % 2).reshape(V.shape) * V


KINDS = {
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral norm": parametrizations.spectral_norm,
    "masked": lambda layer: (
        parametrize.register_parametrization(layer, "weight", Masked()) or layer
    ),
    "bias": lambda layer: parametrize.register_parametrization(layer, "bias", Doubled()) or layer,
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


def ggn_blocks(model: nn.Module, X: Tensor) -> dict[str, Tensor]:
    """Blocks of the generalised Gauss-Newton matrix, one datum and output at a time."""
    model.eval()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    blocks = {name: torch.zeros(p.numel(), p.numel()).double() for name, p in params.items()}
    for x in X:
        f = model(x[None])[0]
        p = f.softmax(0).detach()
        rows = [torch.autograd.grad(f_c, list(params.values()), retain_graph=True) for f_c in f]
        for i, name in enumerate(params):
            J = torch.stack([row[i].flatten() for row in rows])
            blocks[name] += J.T @ (torch.diag(p) - torch.outer(p, p)) @ J
    return blocks


def conv_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, padding_mode="circular", groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 3),
    ).double()


def token_network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 3), nn.LeakyReLU(0.1, inplace=True), nn.Linear(3, 3), nn.Flatten(),
        nn.Linear(6, 3),
    ).double()  # fmt: skip


NETWORKS = {
    "flat": (lambda: network("none"), (3,)),
    "images": (conv_network, (2, 4, 4)),
    "tokens": (token_network, (2, 4)),
}
KINDS["none"] = lambda layer: layer


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
@pytest.mark.parametrize("form", NETWORKS)
@pytest.mark.parametrize("training", [True, False])
def test_originals_have_the_block_of_the_gauss_newton_matrix(kind, form, training):
    make, shape = NETWORKS[form]
    model = seeded(make)
    KINDS[kind](model[0])
    model.train(training)
    gen = torch.Generator().manual_seed(1)
    X, y = torch.randn(10, *shape, generator=gen).double(), torch.arange(10) % 3
    la = Laplace(model, "classification", "all", "kron", debias="single")
    la.fit((X, y), n_data=N)
    assert model.training == training
    matrix, blocks, start = la.H.to_matrix(), ggn_blocks(model, X), 0
    n_originals = 0
    for name, expected in blocks.items():
        end = start + len(expected)
        if "parametrizations" in name:
            n_originals += 1
            torch.testing.assert_close(matrix[start:end, start:end], N / 10 * expected, **EXACT)
        start = end
    assert n_originals >= 1 and start == len(matrix) == la.n_params
    covariance = marginal(dense_covariance(la, X[:4], la.prior_precision))
    with pytest.warns(UserWarning, match="exact but slow"):
        torch.testing.assert_close(la.output_moments(X[:4])[1], covariance, **EXACT)


@pytest.mark.parametrize("debias", ["two-batch", "crossfit"])
def test_curvatures_of_originals_come_from_the_other_mini_batch(debias):
    model = seeded(lambda: network("weight norm"))
    gen = torch.Generator().manual_seed(3)
    X = torch.randn(40, 3, generator=gen).double()
    pairs = [(X[:20], torch.arange(20) % 3), (X[20:], torch.arange(20) % 3)]
    la = Laplace(model, "classification", "all", "kron", debias=debias)
    la.fit(pairs, n_data=N)
    one, two = (ggn_blocks(model, X_i) for X_i, _ in pairs)
    name = "0.parametrizations.weight.original0"
    at = la.parameter_names.index(name)
    (Q,), (lam,) = la.H.eigenvectors[at], la.H.eigenvalues[at]
    first = one[name] if debias == "two-batch" else one[name] + two[name]
    inside = Q.T @ first @ Q
    torch.testing.assert_close(inside, torch.diag(inside.diagonal()), **EXACT)
    if debias == "two-batch":
        torch.testing.assert_close(lam, N / 20 * (Q.T @ two[name] @ Q).diagonal(), **EXACT)


@pytest.mark.parametrize("kind", ["weight norm", "masked", "bias"])
def test_a_parametrised_last_layer(kind):
    model, (X, y) = seeded(lambda: network("none")), data()
    KINDS[kind](model[2])
    la = Laplace(model, "classification", "last_layer", "kron", debias="single")
    la.fit((X, y), n_data=N)
    whole = Laplace(model, "classification", "all", "kron", debias="single", parameters=["2"])
    whole.fit((X, y), n_data=N)
    torch.testing.assert_close(la.H.to_matrix(), whole.H.to_matrix(), **EXACT)
    covariance = marginal(dense_covariance(whole, X[:4], la.prior_precision))
    with pytest.warns(UserWarning, match="exact but slow"):
        mean, found = la.output_moments(X[:4])
    torch.testing.assert_close(found, covariance, **EXACT)
    torch.testing.assert_close(mean, model(X[:4]).detach(), **EXACT)
    draws = la.predictive_samples(X[:4], n_samples=4000, generator=torch.Generator().manual_seed(0))
    assert draws.shape == (4000, 4, 3)


def test_samples_of_the_weights_go_through_the_parametrisation():
    model, (X, y) = seeded(lambda: network("masked")), data()
    la = Laplace(model, "classification", "all", "kron", debias="single", prior_precision=1e4)
    la.fit((X, y), n_data=N)
    generator = torch.Generator().manual_seed(0)
    f, samples = StructuredPredictor(la).samples(X[:2], 4000, generator)
    covariance = marginal(dense_covariance(la, X[:2], la.prior_precision))
    centred = samples[0] - f
    found = torch.einsum("snc,snd->ncd", centred, centred) / len(centred)
    torch.testing.assert_close(found, covariance, rtol=0, atol=0.1 * covariance.max().item())


def test_large_originals_are_refused_and_work_as_effective_weights():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(100, 50)), nn.Linear(50, 3))
    X, y = torch.randn(4, 100), torch.arange(4) % 3
    with pytest.raises(ValueError, match=r"parametrizations.weight.*4,096.*bake_parametrizations"):
        Laplace(model, "classification", "all", "kron", debias="single")
    assert not check_model(model, X, "classification").supported
    baked = bake_parametrizations(model)
    assert check_model(baked, X, "classification").supported
    Laplace(baked, "classification", "all", "kron", debias="single").fit((X, y), n_data=N)


def test_two_layers_that_share_an_original_are_refused():
    first, second = (parametrizations.weight_norm(nn.Linear(3, 3)) for _ in range(2))
    second.parametrizations.weight.original1 = first.parametrizations.weight.original1
    model = nn.Sequential(first, nn.Tanh(), second)
    with pytest.raises(ValueError, match="parametrizations.weight"):
        Laplace(model, "classification", "all", "kron", debias="single")


def test_an_original_that_is_used_elsewhere_is_refused():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = parametrizations.weight_norm(nn.Linear(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) @ self.layer.parametrizations.weight.original1.T

    la = Laplace(Tied(), "classification", "all", "kron", debias="single")
    with pytest.raises(ValueError, match=r"parametrizations.weight.original1.*Remedy"):
        la.fit((torch.randn(6, 3), torch.arange(6) % 3), n_data=N)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
def test_effective_weights_have_the_posterior_of_an_ordinary_network(kind):
    model, (X, y) = seeded(lambda: network(kind)), data()
    weight = model[0].weight.detach().clone()
    baked = bake_parametrizations(model)
    assert parametrize.is_parametrized(model[0]) and not parametrize.is_parametrized(baked[0])
    assert torch.equal(baked[0].weight, weight) and baked[0].weight.requires_grad
    assert torch.equal(baked[0].bias, model[0].bias)
    plain, la = ordinary(weight, model), fitted(baked)
    blocks = oracles.kfac(plain, X, y, "classification")
    names = [name for name, _ in baked.named_parameters()]  # the bias comes first
    expected = oracles.dense({name: blocks[name] for name in names}, N / len(y))
    torch.testing.assert_close(la.H.to_matrix(), expected, **EXACT)
    covariance = marginal(dense_covariance(la, X[:4], la.prior_precision))
    torch.testing.assert_close(la.output_moments(X[:4])[1], covariance, **EXACT)
    torch.testing.assert_close(la.output_moments(X[:4])[0], model(X[:4]).detach(), **EXACT)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("none", "bias")])
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


class Watched(nn.Module):
    """Notes in which mode it is asked: what a spectral norm does in train mode changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bool] = []

    def forward(self, V: Tensor) -> Tensor:
        """Pass on."""
        self.asked.append(self.training)
        return 1.0 * V


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("debias", ["single", "two-batch", "crossfit"])
def test_no_weight_is_looked_at_in_train_mode(subset, debias):
    model, (X, y) = seeded(lambda: network("none")), data()
    watched = [Watched(), Watched()]
    for layer, part in zip((model[0], model[2]), watched, strict=True):
        parametrize.register_parametrization(layer, "weight", part)
    model.train()
    for part in watched:
        part.asked.clear()
    check_model(model, X, "classification")
    la = Laplace(model, "classification", subset, "kron", debias=debias)
    la.fit([(X[:5], y[:5]), (X[5:], y[5:])], n_data=N)
    la(X[:3]), la(X[:3], pred_type="nn", link_approx="mc", n_samples=2)
    la(X[:3], link_approx="mc", n_samples=2, predictive_method="samples")
    la.log_marginal_likelihood()
    restored = Laplace(model, "classification", subset, "kron", debias=debias)
    restored.load_state_dict(la.state_dict())
    bake_parametrizations(model), freeze_unsupported(model)
    assert model.training and all(part.asked and not any(part.asked) for part in watched)
