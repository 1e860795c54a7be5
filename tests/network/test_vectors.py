"""Backward vectors whose second moment is the Hessian."""

import pytest
import torch
from torch.nn import functional as F

from laplace_debias.network.loss import (
    loss_sum,
    mean_loss_hessian,
)
from laplace_debias.network.vectors import (
    backward_vectors,
    n_exact_vectors,
    position_vectors,
    sampled_hessian_root,
    softmax_hessian_root,
)
from tests.oracles_positions import output_hessian

LIKELIHOODS = ["classification", "regression"]


def hessian_of(f, weights):
    """Dense Hessian ``[F, F]`` of one datum's weighted loss, with classes last."""
    H = torch.zeros(f.numel(), f.numel(), dtype=f.dtype)
    for t in range(len(f)):
        at = slice(t * f.shape[1], (t + 1) * f.shape[1])
        H[at, at] = weights[t] * output_hessian(f[t : t + 1], torch.zeros(1).long())
    return H


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return 2 * torch.randn(1, 4, 3).double(), torch.tensor([[1.0, 0.0, 2.0, 0.5]]).double()


def test_exact_vectors_make_up_the_block_diagonal_hessian(logits):
    f, w = logits
    V = torch.stack(list(position_vectors(f, "exact", weights=w))).flatten(1)
    assert len(V) == n_exact_vectors(f, w) == 6  # the position without weight has none
    torch.testing.assert_close(V.T @ V, hessian_of(f[0], w[0]), rtol=1e-12, atol=1e-12)
    assert n_exact_vectors(f) == len(list(position_vectors(f, "exact"))) == 8


@pytest.mark.parametrize("sampler", ["trace", "label"])
def test_sampled_vectors_are_unbiased(logits, sampler):
    f, w = logits
    H, S = hessian_of(f[0], w[0]), 200_000
    many = (f.expand(S, -1, -1), "mc", torch.Generator().manual_seed(0), w.expand(S, -1), sampler)
    (V,) = position_vectors(*many)
    V = V.flatten(1)
    error = (V.T @ V / S - H).norm() / H.norm()
    assert float(error) < 0.02


def test_without_signs_positions_would_be_counted_together(logits):
    """The sampler by the trace has no mean of zero: independent draws are not enough."""
    f, _ = logits
    H, S = hessian_of(f[0], torch.ones(4)), 200_000
    rows = f.expand(S, -1, -1).reshape(-1, 3)
    generator = torch.Generator().manual_seed(0)
    V = sampled_hessian_root(rows, "classification", generator).reshape(S, -1)
    biased = V.T @ V / S
    assert float((biased - H).norm() / H.norm()) > 0.2
    for t in range(4):  # it is the cross terms that are wrong
        at = slice(3 * t, 3 * t + 3)
        torch.testing.assert_close(biased[at, at], H[at, at], rtol=0.05, atol=0.005)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_sampled_roots_have_the_hessian_as_second_moment(likelihood):
    logits = torch.tensor([[3.0, 0.0, -1.0, 0.5]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    n = 40_000
    v = sampled_hessian_root(logits.expand(n, -1), likelihood, generator).squeeze(2)
    H = mean_loss_hessian(logits, likelihood)
    torch.testing.assert_close(v.square().sum(1), H.trace().expand(n))
    products = v[:, :, None] * v[:, None]
    error = (products.mean(0) - H).abs() / (products.std(0) / n**0.5).clamp(min=1e-12)
    assert error.max() < 4
    again = sampled_hessian_root(logits.expand(n, -1), likelihood, torch.Generator().manual_seed(0))
    assert torch.equal(again.squeeze(2), v)


def test_softmax_root_at_saturated_outputs():
    logits = torch.tensor([[50.0, 0.0, -50.0], [0.0, 0.0, 90.0], [-200.0, 0.0, 0.0]]).double()
    p = logits.softmax(-1)
    S = softmax_hessian_root(logits)
    torch.testing.assert_close(S @ S.mT, torch.diag_embed(p) - p[:, :, None] * p[:, None])


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_both_samplers_have_the_hessian_as_their_second_moment(likelihood):
    """Many draws of one datum; on a confident network the label sampler varies far more."""
    f = torch.tensor([[4.0, 0.0, -1.0]], dtype=torch.float64).expand(200_000, 3)
    p = f[0].softmax(0)
    H = torch.diag(p) - torch.outer(p, p) if likelihood == "classification" else torch.eye(3)
    spread = {}
    for sampler in ("trace", "label"):
        generator = torch.Generator().manual_seed(0)
        v = backward_vectors(f, None, likelihood, "mc", generator, sampler=sampler)[0]
        squares = v.square().sum(1)
        standard_error = squares.std() / len(v) ** 0.5
        assert abs(squares.mean() - H.trace()) <= 4 * standard_error + 1e-12
        torch.testing.assert_close(v.T @ v / len(v), H.to(v), atol=0.02, rtol=0)
        spread[sampler] = squares.std()
    assert spread["trace"] < 1e-6 < spread["label"]
    with pytest.raises(ValueError, match="`sampler`.*Remedy"):
        backward_vectors(f, None, likelihood, "mc", sampler="softmax")


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_backward_vectors_have_the_weighted_curvature_as_second_moment(likelihood, fisher):
    """Datum by datum against autograd's Hessian, or the outer product of autograd's gradient."""
    generator = torch.Generator().manual_seed(0)
    f = 2 * torch.randn(5, 4, generator=generator, dtype=torch.float64)
    if likelihood == "classification":
        y = torch.randint(4, (5,), generator=generator)
    else:
        y = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    weights = torch.rand(5, generator=generator, dtype=torch.float64)
    V = backward_vectors(f, y, likelihood, fisher, weights=weights)
    assert V.shape[1:] == f.shape
    for n in range(5):

        def loss(z, n=n):
            if likelihood == "classification":
                return F.cross_entropy(z[None], y[n : n + 1])
            return 0.5 * (z - y[n]).square().sum()

        if fisher == "exact":
            H = torch.autograd.functional.hessian(loss, f[n])
        else:  # laplace-torch's loss of a regression is twice ours, its factor one half
            g = torch.autograd.functional.jacobian(loss, f[n])
            H = torch.outer(g, g) * (1 if likelihood == "classification" else 2)
        torch.testing.assert_close(V[:, n].T @ V[:, n], weights[n] * H)
    torch.testing.assert_close(
        loss_sum(f, y, likelihood, weights),
        sum(weights[n] * loss_sum(f[n : n + 1], y[n : n + 1], likelihood) for n in range(5)),
    )
