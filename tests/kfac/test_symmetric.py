"""Symmetric products in halves, against the plain product."""

import pytest
import torch

from laplace_debias.kfac import symmetric
from laplace_debias.kfac.symmetric import add_gram_, mirror_


@pytest.mark.parametrize("d", [3, 5, 6, 11])
def test_halves_give_the_whole_product(d, monkeypatch):
    monkeypatch.setattr(symmetric, "_HALVE_ABOVE", 2)
    rows = torch.randn(7, d, generator=torch.Generator().manual_seed(0)).double()
    before = torch.randn(d, d, generator=torch.Generator().manual_seed(1)).double()
    before = before + before.T
    out = before.clone()
    add_gram_(out, rows, alpha=0.5, beta=2.0)
    torch.testing.assert_close(mirror_(out), 2 * before + 0.5 * rows.T @ rows)
    fresh = torch.full((d, d), float("nan"), dtype=torch.float64)
    add_gram_(fresh, rows, beta=0.0)
    torch.testing.assert_close(mirror_(fresh), rows.T @ rows)
