"""How outputs of layers answer to steps of their parameters, against autograd."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from laplace_debias.network.responses import (
    at_every_position,
    layer_response,
    norm_gradients,
    norm_positions,
    normalised,
)
from tests.cases_layers import Conv1D


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.LayerNorm(4), (3, 5, 4)),
        (nn.LayerNorm((5, 4)), (3, 5, 4)),
        (nn.RMSNorm(4), (3, 4)),
        (nn.GroupNorm(2, 4), (3, 4, 6)),
        (nn.BatchNorm1d(4), (3, 4)),
        (nn.BatchNorm2d(4), (3, 4, 2, 2)),
    ],
)
def test_a_norm_scales_what_it_normalised_at_every_position(layer, shape):
    torch.manual_seed(0)
    layer = layer.double()
    layer(torch.randn(shape).double())
    layer.eval()
    x, g = torch.randn(2, *shape).double()
    gamma, beta = (torch.randn(layer.weight.shape).double() for _ in range(2))
    x_hat = normalised(layer, x)
    with torch.no_grad():
        layer.weight.copy_(gamma)
        if "bias" in layer._parameters:
            layer.bias.copy_(beta)
    expected = layer(x)
    shift = at_every_position(layer, beta, x) if "bias" in layer._parameters else 0.0
    torch.testing.assert_close(layer_response(layer, x, gamma) + shift, expected)
    rows = norm_gradients(layer, "weight", g, x_hat)
    assert norm_positions(layer, x).shape[:2] == rows.shape == (3, gamma.numel())
    for n in range(3):  # of each datum by itself
        (truth,) = torch.autograd.grad((layer(x)[n] * g[n]).sum(), layer.weight)
        torch.testing.assert_close(rows[n], truth.flatten())


def test_a_response_of_something_else_is_refused():
    with pytest.raises(TypeError, match="linear layer, a convolution or a normalisation, got Tanh"):
        layer_response(nn.Tanh(), torch.ones(1, 1), torch.ones(1, 1))
    x, step = torch.randn(2, 3), torch.randn(3, 2)
    torch.testing.assert_close(layer_response(Conv1D(2, 3), x, step), F.linear(x, step.T))
