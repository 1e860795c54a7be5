"""Random networks: the posterior equals a dense float64 oracle, or an error says why not."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from laplace_debias import Laplace
from laplace_debias.kfac.thin import bases_of
from tests.oracles_kfac import oracle
from tests.oracles_predictive import dense_covariance, marginal

N, C, M = 50, 3, 4
MORE = int(os.environ.get("N_EXAMPLES", 0))  # many networks, others in every run
QUICK = settings(max_examples=MORE or 20, derandomize=not MORE, deadline=None, database=None)
SHAPES = {"flat": (4,), "tokens": (3, 4), "image": (2, 4, 4), "inputs": (6,)}


class Twice(nn.Module):
    """One layer, called twice: shared."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Call it on its own output."""
        return self.layer(torch.tanh(self.layer(x)))


class Residual(nn.Module):
    """A nested block beside the identity."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Add."""
        return x + self.body(x)


class Flat(nn.Module):
    """From whatever is left to one row per datum."""

    def forward(self, x: Tensor) -> Tensor:
        """Average over positions."""
        return x.flatten(2).mean(2) if x.ndim == 4 else x.mean(1) if x.ndim == 3 else x


class Inputs(nn.Module):
    """Several inputs in a mapping, each with a layer of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, width), nn.Linear(2, width, bias=False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Add what the two layers make of their inputs."""
        return torch.tanh(self.a(batch["a"])) * self.b(batch["b"])


class AsMapping(nn.Module):
    """A network of a mapping as one of a tensor, for the oracle."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Cut the tensor."""
        return self.net({"a": x[:, :4], "b": x[:, 4:]})


# %% What must be refused
class Scaled(nn.Linear):
    """A layer that changes its weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale it."""
        return F.linear(x, 0.5 * self.weight, self.bias)


class Transposed(nn.Linear):
    """A layer whose weight is used once more."""

    def forward(self, x: Tensor) -> Tensor:
        """Go there and back."""
        return F.linear(torch.tanh(super().forward(x)), self.weight.T)


class Odd(nn.Module):
    """What mixes or reorders the data."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Mix, reorder or draw."""
        if self.kind == "mixing":
            return x - x.mean(0, keepdim=True)
        return x.flip(0) if self.kind == "reordering" else x + torch.randn_like(x)


def masked(layer: nn.Module) -> None:
    """A parametrisation of one's own, which forbids every other weight."""
    mask = (torch.arange(layer.weight.numel()) % 2).reshape(layer.weight.shape)
    parametrize.register_parametrization(layer, "weight", Masked(mask))


class Masked(nn.Module):
    """Forbids some entries."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, V: Tensor) -> Tensor:
        """Multiply."""
        return self.mask * V


PARAMETRISED = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "masked": masked,
}
ODD = ("scaled", "functional", "mixing", "reordering", "noise", "unused")


@st.composite
def networks(draw: Any, odd: str | None = None) -> tuple[nn.Module, str]:
    """A network in float64 and the kind of its inputs."""
    kind = draw(st.sampled_from(sorted(SHAPES)))
    torch.manual_seed(draw(st.integers(0, 99)))
    width = 4 if kind != "image" else 2
    parts: list[nn.Module] = []
    size = 4  # of an image
    if kind == "inputs":
        width = draw(st.sampled_from([3, 4]))
        parts.append(Inputs(width))
    for _ in range(draw(st.integers(0 if kind == "inputs" else 1, 3))):
        new = draw(st.sampled_from([2, 3, 4]))
        bias = draw(st.booleans())
        if kind == "image":
            groups = 2 if width % 2 == 0 and new % 2 == 0 and draw(st.booleans()) else 1
            mode = draw(
                st.sampled_from(["zeros", "reflect", "circular"] if size > 1 else ["zeros"])
            )
            stride = draw(st.sampled_from([1, 2]))
            make = lambda w, v, g=1, s=1, m=mode, b=bias: nn.Conv2d(  # noqa: E731
                w, v, 3, padding=1, groups=g, stride=s, padding_mode=m, bias=b
            )
            layer: nn.Module = make(width, new, groups, stride)
        else:
            make = lambda w, v, b=bias: nn.Linear(w, v, bias=b)  # noqa: E731
            layer = make(width, new)
        form = draw(st.sampled_from(["plain", "nested", "shared", "residual", "parametrised"]))
        if form == "nested":
            layer = nn.Sequential(nn.Sequential(layer), nn.Identity())
        elif form == "shared":
            new, layer = width, Twice(make(width, width))
        elif form == "residual":
            new, layer = width, Residual(nn.Sequential(make(width, width), nn.Tanh()))
        elif form == "parametrised":
            PARAMETRISED[draw(st.sampled_from(sorted(PARAMETRISED)))](layer)
        width = new
        if kind == "image" and form not in ("shared", "residual"):
            size = -(-size // stride)
        parts.append(layer)
        if (kind == "image" or width > 2) and draw(st.booleans()):
            norm = nn.BatchNorm2d(width) if kind == "image" else nn.LayerNorm(width)
            for p in norm.parameters():
                p.data.uniform_(0.5, 1.5)
            parts.append(norm.requires_grad_(draw(st.booleans())))
        activation = draw(st.sampled_from(["tanh", "relu", "in place", "none"]))
        inplace = nn.LeakyReLU(0.2, inplace=True)
        choices = {"tanh": nn.Tanh(), "relu": nn.LeakyReLU(0.2), "in place": inplace}
        parts += [choices[activation]] if activation in choices else []
    if odd == "scaled":
        parts += [Flat(), Scaled(width, width)]
    elif odd == "functional":
        parts += [Flat(), Transposed(width, width)]
    elif odd is not None and odd != "unused":
        parts += [Flat(), Odd(odd)]
    parts += [nn.Dropout(0.5), Flat(), nn.Linear(width, C)]
    net = nn.Sequential(*parts).double()
    if odd == "unused":
        net[-2].spare = nn.Linear(2, 2).double()
    trainable = [p for p in net.parameters() if p.requires_grad]
    frozen = draw(st.sets(st.integers(0, len(trainable) - 1), max_size=2)) if odd is None else set()
    for i in frozen:
        trainable[i].requires_grad_(False)
    net.train(draw(st.booleans()))
    return net, kind


def data(kind: str, seed: int, likelihood: str) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    X = torch.randn(M, *SHAPES[kind], generator=gen, dtype=torch.float64)
    if likelihood == "regression":
        return X, torch.randn(M, C, generator=gen, dtype=torch.float64)
    return X, torch.randint(C, (M,), generator=gen)


def fitted(net: nn.Module, kind: str, pairs: list, likelihood: str, **options: Any) -> Any:
    if kind == "inputs":
        pairs = [{"a": X[:, :4], "b": X[:, 4:], "labels": y} for X, y in pairs]
        options["dict_key_x"] = "a"
    la = Laplace(net, likelihood, "all", "kron", **options)
    la.fit(pairs, n_data=N)
    return la


def oracle_blocks(
    net: nn.Module, kind: str, X: Tensor, y: Tensor, *rest: Any
) -> list[list[Tensor]]:
    """Factors of a mini-batch that stands for N data, by explicit loops in float64.

    Of linear layers and convolutions two for a weight and one for a bias; of a scale, a shift or
    the original of a parametrised weight the block of the Gauss-Newton matrix itself.
    """
    model = AsMapping(net) if kind == "inputs" else net
    factors = oracle(model, X, y, rest[0], torch.ones(len(y)).double(), rest[1])
    kinds = (nn.Linear, nn.Conv2d)
    of_layers = [p for m in net.modules() if isinstance(m, kinds)
                 for p in m.parameters(recurse=False) if p.requires_grad]  # fmt: skip
    found = dict(zip(map(id, of_layers), factors, strict=True))
    params = [p for p in net.parameters() if p.requires_grad]
    for p in params:
        if id(p) not in found:
            found[id(p)] = (ggn_block(model, p, X, y, *rest),)
    blocks = [found[id(p)] for p in params]
    return [[N / len(y) * block[0], *block[1:]] for block in blocks]


def ggn_block(model: nn.Module, p: Tensor, X: Tensor, y: Tensor, *rest: Any) -> Tensor:
    """The sum over data of ``J^T H J``, with Jacobians of one datum and output at a time."""
    training, total = model.training, torch.zeros(p.numel(), p.numel()).double()
    model.eval()
    for x_n, y_n in zip(X, y, strict=True):
        f = model(x_n[None])[0]
        J = torch.stack([torch.autograd.grad(f_c, p, retain_graph=True)[0].flatten() for f_c in f])
        f = f.detach()
        if rest == ("classification", "exact"):
            H = torch.diag(f.softmax(0)) - torch.outer(f.softmax(0), f.softmax(0))
        elif rest[1] == "exact":
            H = torch.eye(len(f)).double()
        else:
            r = f.softmax(0) - F.one_hot(y_n, C) if rest[0] == "classification" else f - y_n
            H = torch.outer(r, r) * (1 if rest[0] == "classification" else 2)
        total += J.T @ H @ J
    model.train(training)
    return total


def heldout(one: Tensor, two: Tensor, share: float = 0.5) -> Tensor:
    """Mean curvature of two folds along each other's eigenvectors, with rising values."""
    lam = torch.zeros(len(one), dtype=torch.float64)
    for held, other, weight in ((one, two, share), (two, one, 1 - share)):
        mu, Q = torch.linalg.eigh(other)
        values = (Q.T @ held @ Q).diagonal().clamp(min=0)
        null = mu <= 1e-9 * mu[-1]
        lam += weight * torch.where(null, values[null].sum() / max(1, int(null.sum())), values)
    return torch.from_numpy(isotonic_regression(lam.numpy()).x)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = 1e-8 if dtype == torch.float64 else 2e-3
    assert found.shape == expected.shape
    scale = expected.abs().max() + 1e-12
    assert (found.double() - expected).abs().max() <= tolerance * scale


def assert_posterior(la: Any, one: list, two: list, debias: str, dtype: torch.dtype) -> None:
    """Directions diagonalise the one role's factors, curvatures are the other's along them.

    A thin basis leaves directions along which the one role has no curvature: there the other's has
    one value, its mean.
    """
    for Qs, thin, lams, K_1, K_2 in zip(
        la.H.eigenvectors, bases_of(la.H), la.H.eigenvalues, one, two, strict=True
    ):
        for Q, span, lam, A, B in zip(Qs, thin, lams, K_1, K_2, strict=True):
            Q, n_null = Q.double(), len(Q) - span.shape[1]
            assert_close(Q.T @ Q, torch.eye(len(Q)).double(), dtype)
            pooled = (A + B) / 2 if debias == "crossfit" else A
            inside = Q.T @ pooled @ Q
            assert_close(inside - torch.diag(inside.diagonal()) + pooled, pooled, dtype)
            if debias == "crossfit":
                assert_close(lam, heldout(A, B), dtype)
            else:
                expected = (Q.T @ (A if debias == "single" else B) @ Q).diagonal().clone()
                if n_null:
                    missed = Q[:, :n_null].T @ pooled @ Q[:, :n_null]
                    assert (
                        missed.abs().max() <= (1e-8 if dtype == torch.float64 else 2e-3) * A.norm()
                    )
                    expected[:n_null] = expected[:n_null].mean()
                assert_close(lam, expected, dtype)


@QUICK
@given(
    st.data(),
    st.sampled_from(["classification", "regression"]),
    st.sampled_from(["single", "two-batch", "crossfit"]),
    st.sampled_from(["exact", "empirical"]),
    st.sampled_from([torch.float64, torch.float32]),
)
def test_posterior_and_prediction_equal_the_oracle(source, likelihood, debias, fisher, dtype):
    net, kind = source.draw(networks())
    dtype = torch.float64 if debias == "crossfit" else dtype  # null spaces depend on rounding
    pairs = [data(kind, seed, likelihood) for seed in (1, 2)]
    if debias == "single":
        pairs = pairs[:1]
    blocks = [oracle_blocks(net, kind, *pair, likelihood, fisher) for pair in pairs]
    if (
        debias == "crossfit"
    ):  # what counts as a null space is a threshold: leave out what is near it
        for mu in (torch.linalg.eigvalsh(M) for parts in blocks for block in parts for M in block):
            assume(not bool(((mu > 1e-13 * mu[-1]) & (mu < 1e-6 * mu[-1])).any()))
    own = copy.deepcopy(net).to(dtype)
    cast = [(X.to(dtype), y.to(dtype) if y.is_floating_point() else y) for X, y in pairs]
    la = fitted(own, kind, cast, likelihood, debias=debias, fisher=fisher)
    assert_posterior(la, blocks[0], blocks[-1], debias, dtype)
    X = cast[0][0][:4]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the slow, exact way says so
        x = {"a": X[:, :4], "b": X[:, 4:]} if kind == "inputs" else X
        mean, covariance = la.output_moments(x)
    model = la.model.eval()
    la.model = AsMapping(own).eval() if kind == "inputs" else model
    assert_close(mean, la.model(X).detach().double(), dtype)
    assert_close(covariance, marginal(dense_covariance(la, X, la.prior_precision)), dtype)


@pytest.mark.parametrize("odd", ODD)
@settings(QUICK, max_examples=MORE // 6 or 8)
@given(st.data(), st.sampled_from(["single", "two-batch", "crossfit"]))
def test_what_factors_cannot_represent_is_refused(odd, source, debias):
    net, kind = source.draw(networks(odd))
    pairs = [data(kind, seed, "classification") for seed in (1, 2)]
    with pytest.raises(ValueError, match="Remedy"):
        fitted(net, kind, pairs, "classification", debias=debias)
