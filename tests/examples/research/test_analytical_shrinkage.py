"""Analytical shrinkage against the best that a rotation-invariant estimator can do."""

import pytest
import torch

from examples.research.analytical_shrinkage import analytical_shrinkage


@pytest.mark.parametrize(("n", "p"), [(400, 100), (100, 200)])
def test_analytical_shrinkage_comes_closer_to_the_true_spectrum(n, p):
    generator = torch.Generator().manual_seed(0)
    truth = torch.linspace(1, 3, p, dtype=torch.float64)
    x = torch.randn(n, p, dtype=torch.float64, generator=generator) * truth.sqrt()
    lam, Q = torch.linalg.eigh(x.T @ x / n)
    ideal = (Q * (truth[:, None] * Q)).sum(0)  # what no rotation-invariant estimator can beat
    found = analytical_shrinkage(lam, n)
    assert (found - ideal).norm() < 0.2 * (lam - ideal).norm()
    with_zeros = torch.cat([torch.zeros(3, dtype=torch.float64), lam]) if n > p else lam
    torch.testing.assert_close(analytical_shrinkage(with_zeros, n)[-p:], found)
