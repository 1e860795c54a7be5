"""Outputs with positions: layouts, and backward vectors whose second moment is the Hessian."""

import pytest
import torch

from laplace_debias.network.loss import sampled_hessian_root
from laplace_debias.network.positions import (
    as_outputs,
    check_positions,
    classes_last,
    flat_outputs,
    n_exact_vectors,
    position_vectors,
    weights_of_positions,
)
from tests.oracles_positions import output_hessian


def test_layouts_and_back():
    tokens, pixels, voxels = (
        torch.randn(2, 5, 3),
        torch.randn(2, 3, 4, 5),
        torch.randn(2, 3, 4, 5, 6),
    )
    assert classes_last(tokens) is tokens
    assert torch.equal(classes_last(pixels)[1, 2, 3], pixels[1, :, 2, 3])
    assert torch.equal(classes_last(voxels)[1, 2, 3, 4], voxels[1, :, 2, 3, 4])
    for f in (tokens, pixels, voxels, torch.randn(2, 3)):
        assert torch.equal(as_outputs(classes_last(f)), f)
        many = torch.stack([classes_last(f)] * 7)
        assert torch.equal(as_outputs(many, leading=1)[3], f)
        assert flat_outputs(f).shape == (2, f[0].numel())
    assert torch.equal(flat_outputs(pixels)[0, :3], pixels[0, :, 0, 0])


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


def test_weights_of_data_and_positions(logits):
    f, w = logits
    assert weights_of_positions(f, None) is None and weights_of_positions(f, w) is w
    assert torch.equal(weights_of_positions(f, torch.tensor([3.0])), torch.full((1, 4), 3.0))
    with pytest.raises(ValueError, match="one per datum, or one per position"):
        weights_of_positions(f, torch.ones(1, 3))


def test_other_likelihoods_have_no_positions():
    check_positions(torch.zeros(2, 3), "regression")
    with pytest.raises(ValueError, match="have classes only"):
        check_positions(torch.zeros(2, 3, 4), "bernoulli")
