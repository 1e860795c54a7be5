"""Leverages at many ridges, against whitened blocks one by one."""

import pytest
import torch

from laplace_debias.debias.inverse import inverse_inflation
from laplace_debias.debias.leverages import BlockGrams, Leverages


def dense(rows, D):
    """Traces, squared norms and products of neighbours, from the definition."""
    found = []
    for d in D:
        H = [torch.diag(d.sqrt()) @ x.T @ x @ torch.diag(d.sqrt()) for x in rows]
        products = [(a * b).sum() for a, b in zip(H[1:], H[:-1], strict=True)]
        found.append(([h.trace() for h in H], [h.square().sum() for h in H], products))
    return [torch.tensor([f[i] for f in found], dtype=torch.float64) for i in range(3)]


@pytest.mark.parametrize(("r", "d"), [(1, 5), (3, 5), (7, 5), (2, 40)])
def test_all_ways_are_the_definition(r, d):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, r, d, generator=generator, dtype=torch.float64)
    D = torch.rand(3, d, generator=generator, dtype=torch.float64)
    for draws in (rows, BlockGrams(rows.mT @ rows)):
        leverages = Leverages(draws)
        assert len(leverages) == 6
        for ours, theirs in zip(leverages(D), dense(rows, D), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_ridges_solved_together_are_those_solved_alone():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 2, 5, generator=generator, dtype=torch.float64)
    lam = torch.linalg.eigvalsh(rows.flatten(0, 1).T @ rows.flatten(0, 1))
    pi, ridges = torch.full((12,), 0.1, dtype=torch.float64), lam.new_tensor([1e-3, 1.0, 30.0])
    together = inverse_inflation(rows, pi, lam, ridges)
    alone = torch.cat([inverse_inflation(rows, pi, lam, ridge[None]) for ridge in ridges])
    torch.testing.assert_close(together, alone)
    assert float(together[0]) > 1.05 and float(together[2]) < float(together[0])


def test_only_linked_draws_are_neighbours():
    """Equal neighbours leave no noise to correct, unless they are not neighbours in the draw."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 1, 3, generator=generator, dtype=torch.float64).repeat_interleave(2, 0)
    lam = torch.linalg.eigvalsh(rows[:, 0].T @ rows[:, 0])
    pi, ridges = torch.full((16,), 0.1, dtype=torch.float64), lam.new_tensor([1e-3])
    copies = torch.arange(15) % 2 == 0
    near, far = (inverse_inflation(rows, pi, lam, ridges, linked=m) for m in (copies, ~copies))
    assert float(near) == pytest.approx(1.0, abs=1e-9)
    assert float(far) > 1.1
