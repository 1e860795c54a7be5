"""Gradients of whole data in weights, biases and what is behind them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from laplace_debias.kfac.originals import OriginalGram, bias_gradients, weight_gradients
from laplace_debias.network.ownership import owned_parameters
from tests.cases import seeded

LAYERS = {
    "linear": (lambda: nn.Linear(3, 2), (3,)),
    "tokens": (lambda: nn.Linear(3, 2), (5, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1), (2, 6)),
    "groups": (lambda: nn.Conv2d(4, 2, 3, groups=2, dilation=2, padding=2), (4, 5, 5)),
    "reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), (1, 3, 3, 3)),
    "layer norm": (lambda: nn.LayerNorm(3), (5, 3)),
    "batch norm": (lambda: nn.BatchNorm2d(3).eval(), (3, 2, 2)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_each_datum(name):
    make, shape = LAYERS[name]
    layer, n = seeded(make).double(), 4
    gen = torch.Generator().manual_seed(0)
    a = torch.randn(n, *shape, generator=gen).double()
    g = torch.randn(layer(a).shape, generator=gen).double()
    W, b = (
        weight_gradients(layer, a, g, layer.weight.detach()),
        bias_gradients(layer, g),
    )
    for i in range(n):
        expected = torch.autograd.grad(
            (layer(a[i : i + 1]) * g[i]).sum(), [layer.weight, layer.bias]
        )
        torch.testing.assert_close(W[i], expected[0])
        torch.testing.assert_close(b[i], expected[1])


def test_calls_of_a_datum_add_up_before_the_outer_product():
    layer = seeded(lambda: parametrizations.weight_norm(nn.Linear(3, 2))).double().eval()
    p = next(p for p in owned_parameters(layer) if p.name.endswith("original1"))
    a = [torch.randn(4, 3).double() for _ in range(2)]
    g = [torch.randn(4, 2).double() for _ in range(2)]
    gram = OriginalGram(p, g[0])
    added = gram.add({layer: [*g, None]}, {layer: [(layer, a_i) for a_i in a]}, 4)
    rows = torch.stack([
        torch.autograd.grad(
            sum((layer(a_i[n : n + 1]) * g_i[n]).sum() for a_i, g_i in zip(a, g, strict=True)),
            p.tensor,
        )[0].flatten()
        for n in range(4)
    ])  # fmt: skip
    torch.testing.assert_close(added, rows)
    torch.testing.assert_close(gram.result(), rows.T @ rows)


def test_a_layer_that_no_output_depends_on_adds_nothing():
    layer = parametrizations.weight_norm(nn.Linear(3, 2)).eval()
    p = next(p for p in owned_parameters(layer) if p.original is not None)
    gram = OriginalGram(p, torch.empty(0))
    assert gram.add({layer: [None]}, {layer: [(layer, torch.ones(4, 3))]}, 4) is None
    assert not gram.result().any()


def test_data_that_are_merged_with_positions_are_an_error():
    layer = parametrizations.weight_norm(nn.Linear(3, 2)).eval()
    p = next(p for p in owned_parameters(layer) if p.original is not None)
    with pytest.raises(ValueError, match="Remedy"):
        OriginalGram(p, torch.empty(0)).add(
            {layer: [torch.ones(8, 2)]}, {layer: [(layer, torch.ones(8, 3))]}, 4
        )
