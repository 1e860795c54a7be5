"""Rows of one backward vector per datum, against the engine's own factors."""

import pytest
import torch
from torch import nn

from laplace_debias.debias.pairs import pair_vectors
from laplace_debias.kfac.engine import Engine
from laplace_debias.kfac.gradient_rows import gradient_rows


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(8, 3)
    ).double()


@pytest.mark.parametrize("approx", ["expand", "reduce", "backpack"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_all_pairs_make_the_exact_factors(approx, likelihood):
    net = convolutional()
    engine = Engine(net, likelihood, kfac_approx=approx)
    X = torch.randn(5, 1, 4, 4, dtype=torch.float64)
    exact = engine.factors(X)
    total, all_classes = {}, torch.arange(3)[:, None].expand(3, 5)

    def vectors(f):
        return torch.stack([pair_vectors(f, classes, likelihood) for classes in all_classes])

    for rows in gradient_rows(engine, X, vectors):
        for layers, g in rows.items():
            flat = g.flatten(0, 1)
            total[layers] = total.get(layers, 0) + flat.T @ flat
    for p, B in zip(engine.owned, exact.B, strict=True):
        torch.testing.assert_close(total[p.layers], B)


def test_passes_are_counted_and_the_network_is_left_as_it_was():
    net = convolutional().train()
    engine = Engine(net, "classification")
    X = torch.randn(4, 1, 4, 4, dtype=torch.float64)
    found = gradient_rows(engine, X, lambda f: torch.ones(2, *f.shape))
    assert (engine.cost.forward, engine.cost.backward) == (4, 0)
    assert len(list(found)) == 2
    assert (engine.cost.forward, engine.cost.backward) == (4, 8)  # vectors share their forward pass
    assert net.training
    assert not any(module._forward_hooks for module in net.modules())
    assert all(p.grad is None for p in net.parameters())


class Merged(nn.Module):
    """Merges data with positions, as no row can be told to be a datum's."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        """Sum over positions at the end."""
        n = len(x)
        return self.outer(self.inner(x.reshape(-1, 2)).reshape(n, -1, 2).sum(1))


def test_data_merged_with_positions_are_refused():
    with pytest.raises(ValueError, match="first dimension"):
        list(gradient_rows(Engine(Merged(), "regression"), torch.randn(3, 5, 2), lambda f: f[None]))
