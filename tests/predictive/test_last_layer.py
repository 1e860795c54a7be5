"""The closed form of a last layer against explicit matrices."""

import pytest
import torch

from laplace_debias.predictive.eigenblocks import EigenBlock
from laplace_debias.predictive.last_layer import last_layer_moments
from tests.fitted_predictive import EXACT


def block(name, shape, deltas, generator):
    like = {"dtype": torch.float64, "generator": generator}
    sizes = shape if torch.Size(shape).numel() > 1 else (1,)
    Q = tuple(torch.linalg.qr(torch.randn(d, d, **like))[0] for d in sizes)
    return EigenBlock(name, torch.empty(shape), Q, torch.rand(sizes, **like), deltas)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("C", "d"), [(3, 4), (1, 4), (2, 1), (1, 1)])
@pytest.mark.parametrize("k", [1, 3, 10])
def test_equals_jacobian_times_covariance_times_jacobian(C, d, bias, k):
    """J of output c is phi in row c of the weight, and the unit vector c for the bias."""
    generator = torch.Generator().manual_seed(0)
    n, deltas = 5, torch.linspace(0.1, 2, k, dtype=torch.float64)
    phi = torch.randn(n, d, generator=generator, dtype=torch.float64)
    blocks = [block("w", (C, d), deltas, generator)]
    blocks += [block("b", (C,), deltas, generator)] if bias else []
    eye = torch.eye(C, dtype=torch.float64)
    J = torch.einsum("cb,nj->ncbj", eye, phi).flatten(2)
    J = torch.cat([J, eye.expand(n, C, C)], 2) if bias else J
    f = torch.zeros(n, C, dtype=torch.float64)
    got = {mode: last_layer_moments(blocks, f, phi, mode) for mode in
           ("variance", "covariance", "joint")}  # fmt: skip
    for i in range(k):
        parts = []
        for b in blocks:
            Q = torch.kron(*b.Q) if len(b.Q) == 2 else b.Q[0]
            parts.append(Q @ torch.diag(1 / (b.lam.flatten() + deltas[i])) @ Q.T)
        joint = torch.einsum("ncp,pq,mdq->ncmd", J, torch.block_diag(*parts), J)
        own = torch.stack([joint[j, :, j] for j in range(n)])
        torch.testing.assert_close(got["joint"][..., i], joint.reshape(n * C, n * C), **EXACT)
        torch.testing.assert_close(got["covariance"][..., i], own, **EXACT)
        torch.testing.assert_close(got["variance"][..., i], own.diagonal(dim1=1, dim2=2), **EXACT)


def test_one_datum_whose_features_lost_their_first_dimension():
    """laplace-torch squeezes them when it reduces positions."""
    generator = torch.Generator().manual_seed(0)
    blocks = [block("w", (3, 4), torch.ones(1, dtype=torch.float64), generator)]
    f, phi = torch.zeros(1, 3), torch.ones(4, dtype=torch.float64)
    expected = last_layer_moments(blocks, f, phi[None], "covariance")
    assert torch.equal(last_layer_moments(blocks, f, phi, "covariance"), expected)
    with pytest.raises(ValueError, match=r"features \[n, d\], got .*Remedy"):
        last_layer_moments(blocks, f, torch.ones(1, 2, 4), "covariance")
