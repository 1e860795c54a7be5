"""Rows of one backward vector per datum, against the engine's own factors."""

import pytest
import torch
from torch import nn

from laplace_debias.debias.pairs import pair_vectors
from laplace_debias.kfac.engine import Engine
from laplace_debias.kfac.gradient_rows import gradient_rows, tells_data_apart
from laplace_debias.network.ownership import rows_key
from tests import oracles


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


class Several(nn.Module):
    """A layer that is called twice, a normalisation, and a layer that no output depends on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.norm, self.cut = nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)
        self.double()

    def forward(self, x):
        """The cut layer's output counts as a number."""
        return self.twice(self.norm(torch.tanh(self.twice(x)))) + self.cut(x).detach()


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_calls_of_a_layer_are_positions_and_what_is_cut_off_has_rows_of_zeros(approx):
    net, X = Several(), torch.randn(5, 2, dtype=torch.float64)
    engine = Engine(net, "regression", kfac_approx=approx)
    exact, total = engine.factors(X), {}
    for rows in gradient_rows(engine, X, lambda f: torch.eye(2).to(f)[:, None].expand(2, 5, 2)):
        for key, g in rows.items():
            flat = g.flatten(0, 1)
            total[key] = total.get(key, 0) + flat.T @ flat
    for p, B in zip(engine.owned, exact.B, strict=True):
        torch.testing.assert_close(total[rows_key(p)], B)
        assert bool(B.any()) == (not p.name.startswith("cut"))


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


class Uneven(nn.Module):
    """Layers whose first dimension is not the data's, in several ways."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.inner, self.outer = kind, nn.Linear(2, 4), nn.Linear(4, 2)
        self.double()

    def forward(self, x):
        """Sum over positions at the end."""
        h = x.new_zeros(*x.shape[:2], 4)  # [n, T, 4]
        if self.kind == "merged":
            h = self.inner(x.reshape(-1, 2)).reshape(h.shape)
        elif self.kind == "positions first":
            h = self.inner(x.transpose(0, 1)).transpose(0, 1)
        elif self.kind == "sorted inside":
            order = x[:, 0, 0].argsort()
            h = self.inner(x[order])[order.argsort()]
        elif (here := x[:, :, 0] > 0).any():  # "routed"
            h = h.index_put((here,), self.inner(x[here]))
        return self.outer(torch.tanh(h).sum(1))


@pytest.mark.parametrize("kind", ["merged", "positions first", "sorted inside", "routed"])
def test_rows_are_those_of_their_data_wherever_a_layer_has_them(kind):
    net, n = Uneven(kind), 3  # three positions as well: no shape tells them from data
    X = torch.randn(n, 3, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    X[0, :, 0] = -1.0  # reaches the inner layer nowhere if it is routed
    v = torch.randn(2, n, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    engine = Engine(net, "regression")
    alone = not tells_data_apart(engine, X)
    found = list(gradient_rows(engine, X, lambda f: v, alone=alone))
    assert alone and (engine.cost.forward, engine.cost.backward) == (n, 2 * n)
    for rows, v_k in zip(found, v, strict=True):
        for i in range(n):
            if kind == "routed" and i == 0:
                assert not rows[net.inner,][0].any()
                continue
            _, g, _ = oracles.layer_io(net, net.inner, X[i])
            expected = sum(torch.outer(g_t.T @ v_k[i], g_t.T @ v_k[i]) for g_t in g)
            torch.testing.assert_close(rows[net.inner,][i].T @ rows[net.inner,][i], expected)


def test_rows_of_an_ordinary_network_are_told_apart_and_shapes_that_differ_are_seen():
    engine = Engine(convolutional(), "regression")
    assert tells_data_apart(engine, torch.randn(4, 1, 4, 4, dtype=torch.float64))
    net = Uneven("merged")
    X = torch.randn(2, 3, 2, dtype=torch.float64)
    for approx, n_rows in (("expand", 3), ("reduce", 1)):
        engine = Engine(net, "regression", kfac_approx=approx)
        (rows,) = gradient_rows(engine, X, lambda f: torch.ones(1, *f.shape))
        assert rows[net.inner,].shape == (2, n_rows, 4)
