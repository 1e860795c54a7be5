"""Rows that belong to other data, or explain too little, are found out."""

import pytest
import torch
from torch import nn

from laplace_debias.predictive.probing import run
from laplace_debias.predictive.row_check import misplaced_rows, row_responses


@pytest.mark.parametrize("groups", [1, 2])
def test_responses_of_a_convolution_are_directional_derivatives(groups):
    torch.manual_seed(0)
    net = nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=groups).double()
    model = nn.Sequential(net, nn.Flatten())
    x, step = torch.randn(3, 2, 5, 5).double(), torch.randn_like(net.weight)
    capture = run(model, x, [net])
    v = torch.randn_like(capture.f)
    moved = nn.functional.conv2d(x, step, None, 2, 1, groups=groups).flatten(1)
    G = v.reshape(3, 4, -1)
    said, _ = row_responses((capture.calls[net][0], 0), G, step)
    torch.testing.assert_close(said, (v * moved).sum(1))
    said, _ = row_responses((capture.calls[net][0], 0), G, torch.ones(4).double(), bias=True)
    torch.testing.assert_close(said, v.sum(1))


class Sorting(nn.Module):
    """Sorts its data, and puts its outputs back in order, or does not sort at all."""

    def __init__(self, sort):
        """Make the layer."""
        super().__init__()
        self.sort, self.layer = sort, nn.Linear(2, 2)

    def forward(self, x):
        """Compute."""
        order = x[:, 0].argsort() if self.sort else torch.arange(len(x))
        return self.layer(x[order])[order.argsort()]


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("first", [-1.0, 1.0])
def test_rows_of_other_data_are_found_whatever_order_the_data_come_in(sort, first):
    net = Sorting(sort)
    x = torch.tensor([[first, 1.0], [-first, 2.0]])
    params = list(net.layer.parameters())

    def sources(i, capture, n):
        return [(capture.calls[net.layer][0], 0)]

    wrong = misplaced_rows(net, x, "x", [net.layer], params, sources)
    assert wrong == ({0, 1} if sort else set())


def test_rows_that_cancel_are_judged_by_their_own_size():
    """A shift of all keys changes no attention: its derivative is a sum of rounding errors."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(6, 6) for _ in range(3))
            self.head = nn.Linear(6, 2)

        def forward(self, x):
            q, k, v = self.query(x), self.key(x), self.value(x)
            return self.head(((q @ k.mT).softmax(-1) @ v).mean(1))

    torch.manual_seed(0)
    net = Attention()
    layers = [net.query, net.key]

    def sources(i, capture, n):
        return [(capture.calls[layers[i]][0], 0)]

    biases = [layer.bias for layer in layers]
    x = torch.randn(2, 7, 6)
    assert misplaced_rows(net, x, "x", layers, biases, sources) == set()
    turned = [net.key.bias, net.query.bias]  # the other layer's rows do not explain a bias
    assert misplaced_rows(net, x, "x", layers, turned, sources) == {0, 1}
