"""Blocks of the posterior precision in their eigenbasis, against explicit matrices."""

import pytest
import torch

from laplace_debias.predictive.eigenblocks import EigenBlock, eigen_blocks, prior_grid
from laplace_debias.predictive.linearized import linearized_predictive
from tests.cases_predictive import STRUCTURED
from tests.fitted_predictive import EXACT, build, double_precision, fitted_cnn  # noqa: F401
from tests.oracles_predictive import dense_precision

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (-1.0, "positive"),
        (0.0, "positive"),
        (float("nan"), "positive"),
        ([1.0, float("inf")], "positive"),
        (torch.ones(2, 5), "length 1 or 6"),
        ([1.0, torch.ones(2)], "length 1 or 6"),
        (torch.ones(1, 1, 6), "at most 2 dimensions"),
        ([], "at least one"),
        (["a"], "number"),
    ],
)
def test_bad_prior_precisions(prior, message):
    la, x = fitted_cnn()
    before = la.prior_precision.clone()
    with pytest.raises(ValueError, match=message):
        linearized_predictive(la, x, prior)
    assert torch.equal(la.prior_precision, before)


def dense_block(block, k):
    """``Q diag(lam + delta_k) Q^T`` of a block, explicit."""
    Q = block.Q[0] if len(block.Q) == 1 else torch.kron(*block.Q)
    return Q @ torch.diag(block.lam.flatten() + block.delta[k]) @ Q.T


@pytest.mark.parametrize("name", ["conv", "mlp"])
def test_blocks_are_the_posterior_precision(name):
    """Hessian factor, curvature and layer-wise prior precisions, against Kronecker products."""
    la, _ = build(STRUCTURED[name](), likelihood="regression", sigma_noise=0.5, temperature=3.0)
    deltas = torch.rand(2, len(la.params)) + 0.1
    blocks = eigen_blocks(la, deltas, 2**29)
    for k in range(2):
        got = torch.block_diag(*(dense_block(block, k) for block in blocks))
        torch.testing.assert_close(got, dense_precision(la, la.params, deltas[k]), **EXACT)
    known = {id(p): name for name, p in la.model.named_parameters()}
    assert [block.name for block in blocks] == [known[id(p)] for p in la.params]


@pytest.mark.parametrize("k", [1, 8, 9, 20])
@pytest.mark.parametrize(("max_numel", "keep"), [(2**26, True), (2**26, False), (30, True)])
def test_posterior_variances_in_parts(k, max_numel, keep):
    torch.manual_seed(0)
    lam, delta = torch.rand(3, 4), torch.rand(k) + 0.1
    Q = (torch.eye(3), torch.eye(4))
    block = EigenBlock("w", torch.empty(3, 4), Q, lam, delta, max_numel, keep)
    expected = 1 / (lam[..., None] + delta)  # [3, 4, k]
    for _ in range(2):  # kept the second time
        flat = torch.cat(list(block.inverses()), -1)[:, :k]
        torch.testing.assert_close(flat, expected.flatten(0, 1), **EXACT)
        first = torch.cat(list(block.inverses(input_first=True)), -1)[..., :k]
        torch.testing.assert_close(first, expected.transpose(0, 1), **EXACT)
        some = torch.cat(list(block.inverses(rows=slice(1, 3))), -1)[:, :k]
        torch.testing.assert_close(some, expected[1:].flatten(0, 1), **EXACT)
    assert len(block.padded) % 16 == 0 if k > 8 else len(block.padded) == k
    assert bool(block._kept) == (keep and len(block.padded) * 12 <= max_numel)


def test_prior_precisions_in_every_form():
    like = torch.zeros(1, dtype=torch.float32)
    for given, expected, many in [
        (2.0, [[2.0, 2.0]], False),
        (torch.tensor(2.0), [[2.0, 2.0]], False),
        ([2.0, 3.0, 4.0], [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]], True),
        (torch.tensor([[2.0, 5.0]]), [[2.0, 5.0]], True),
        ([1.0, torch.tensor([2.0, 5.0])], [[1.0, 1.0], [2.0, 5.0]], True),
        (torch.tensor([2.0, 3.0]).numpy(), [[2.0, 2.0], [3.0, 3.0]], True),
    ]:
        grid, found = prior_grid(given, 2, like)
        assert grid.tolist() == expected and found is many and grid.dtype == torch.float32


def test_blocks_must_fit_the_parameters():
    la, _ = fitted_cnn()
    la.model[3].weight.requires_grad_(False)
    la.params = [p for p in la.model.parameters() if p.requires_grad]
    with pytest.raises(ValueError, match=r"per parameter tensor \(5\), got 6"):
        eigen_blocks(la, torch.ones(1, 5), 2**20)


@pytest.mark.parametrize("layerwise", [False, True])
def test_curvature_that_has_an_offset_already_keeps_it(layerwise):
    """laplace-torch's decompositions carry deltas of their own once a prior was added to them."""
    la, _ = build(STRUCTURED["mlp"]())
    params, deltas = list(la.params), torch.tensor([[0.3] * 4, [2.0, 1.0, 4.0, 3.0]])
    offset = torch.tensor([0.5, 1.5, 2.5, 3.5]) if layerwise else torch.tensor(0.7)
    sizes = torch.tensor([p.numel() for p in params])
    expected = [
        dense_precision(la, params, delta) + torch.diag(offset.expand(4).repeat_interleave(sizes))
        for delta in deltas
    ]
    la.H = la.H + offset
    blocks = eigen_blocks(la, deltas, memory_budget=2**20)
    for k in range(2):
        torch.testing.assert_close(
            torch.block_diag(*(dense_block(block, k) for block in blocks)), expected[k], **EXACT
        )
