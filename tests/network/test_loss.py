"""The loss, its Hessian in the outputs, and the vectors whose second moment that is."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from laplace_debias.network.loss import (
    backward_vectors,
    curvature_scores,
    likelihood_name,
    loss_sum,
    mean_loss_hessian,
    sampled_hessian_root,
    softmax_hessian_root,
)

LIKELIHOODS = ["classification", "regression"]


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


def test_scores_are_the_traces_of_the_loss_hessians():
    torch.manual_seed(0)
    logits = 3 * torch.randn(5, 4, dtype=torch.float64)
    for f, score in zip(logits, curvature_scores(logits), strict=True):
        H = torch.autograd.functional.hessian(
            lambda z: nn.functional.cross_entropy(z[None], torch.tensor([1])), f
        )
        torch.testing.assert_close(score, H.trace())
    sure = curvature_scores(torch.tensor([[12.0, 0.0]]))  # single precision would cancel
    p = torch.sigmoid(torch.tensor([-12.0], dtype=torch.float64))
    torch.testing.assert_close(sure, 2 * p * (1 - p), rtol=1e-8, atol=0)


def test_the_mean_hessian_of_a_sure_network_has_no_curvature_along_equal_logits():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(4000, 10, generator=generator)
    outputs[torch.arange(4000), torch.arange(4000) % 10] += 12.0
    H = mean_loss_hessian(outputs, "classification")
    ones = torch.ones(10, dtype=torch.float64)
    # Rounding of numbers up to 1 in double precision, however small H is.
    assert (H @ ones).norm() < 10 * torch.finfo(torch.float64).eps
    assert torch.linalg.matrix_norm(H, 2) < 1e-4


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


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_mean_hessian_is_the_mean_over_data(likelihood):
    f = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    V = backward_vectors(f, None, likelihood)
    torch.testing.assert_close(
        mean_loss_hessian(f, likelihood), torch.einsum("kni,knj->ij", V, V) / 6
    )


def test_the_loss_by_hand():
    logits = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    expected = torch.log(torch.tensor(2.0)) + torch.log1p(torch.exp(torch.tensor(2.0)))
    torch.testing.assert_close(loss_sum(logits, torch.tensor([0, 1]), "classification"), expected)
    assert loss_sum(torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2), "regression") == 2.5
    assert loss_sum(torch.ones(1, 1).bfloat16(), torch.zeros(1, 1), "regression").dtype == (
        torch.float32
    )


def test_errors_say_what_to_do():
    f = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="`fisher` in .*got 'ggn'"):
        backward_vectors(f, None, "classification", "ggn")
    with pytest.raises(ValueError, match="targets for the empirical Fisher"):
        backward_vectors(f, None, "classification", "empirical")
    with pytest.raises(ValueError, match=r"weights of shape \[2\], got \[3\]"):
        backward_vectors(f, None, "regression", weights=torch.ones(3))
    with pytest.raises(ValueError, match="finite, non-negative"):
        backward_vectors(f, None, "regression", weights=torch.tensor([1.0, -1.0]))
    for bad in ("poisson", None):
        with pytest.raises(ValueError, match="'bernoulli' or 'reward_modeling', got.*Remedy"):
            likelihood_name(bad)
