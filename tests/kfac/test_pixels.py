"""The pixels' covariance, against the middle block of the input factor by unfolding."""

from math import prod

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from laplace_debias.debias.transport import pixel_block
from laplace_debias.kfac.engine import Engine
from laplace_debias.kfac.grams import input_mean
from laplace_debias.kfac.pixels import PixelGram, pixel_rows
from laplace_debias.network.layers import n_pixels

LAYERS = {
    "same": (nn.Conv2d(3, 2, 3, padding=1), (3, 6, 5)),
    "valid": (nn.Conv2d(3, 2, 3), (3, 6, 5)),
    "strided": (nn.Conv2d(3, 2, 3, padding=1, stride=2), (3, 7, 8)),
    "more stride than kernel": (nn.Conv2d(2, 2, (2, 1), stride=(3, 2)), (2, 7, 8)),
    "even": (nn.Conv2d(2, 2, (2, 4), padding=(1, 3)), (2, 5, 6)),
    "dilated": (nn.Conv2d(2, 2, 3, padding=2, dilation=2), (2, 6, 6)),
    "mostly padding": (nn.Conv2d(2, 2, 3, padding=5, stride=2), (2, 3, 3)),
    "grouped": (nn.Conv2d(4, 2, 3, padding=1, groups=2), (4, 5, 5)),
    "circular": (nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), (2, 5, 5)),
    "padding='same'": (nn.Conv2d(2, 2, (4, 3), padding="same"), (2, 5, 5)),
    "line": (nn.Conv1d(2, 2, 5, padding=1, stride=2), (2, 9)),
    "volume": (nn.Conv3d(2, 2, (3, 1, 2), padding=1), (2, 4, 3, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_pixels_are_the_middle_block_of_all_patches(name):
    layer, shape = LAYERS[name]
    torch.manual_seed(0)
    x = torch.randn(4, *shape, dtype=torch.float64)
    A, n_rows = input_mean(layer, x)
    k = prod(layer.kernel_size)
    c = len(A) // k
    expected = torch.stack(
        [torch.stack([A[i * k + k // 2, j * k + k // 2] for j in range(c)]) for i in range(c)]
    )
    torch.testing.assert_close(pixel_block(A, c), expected)
    G, n_pixel_rows = PixelGram().mean(layer, x)
    torch.testing.assert_close(G, expected)
    assert n_pixel_rows == n_rows and n_pixels(layer) == k


def test_rows_are_those_of_a_convolution_that_picks_the_middle():
    layer, x = nn.Conv2d(2, 1, (3, 4), padding=(1, 2), stride=(2, 1)), torch.randn(3, 2, 5, 6)
    kernel = torch.zeros(1, 1, 3, 4)
    kernel.view(-1)[6] = 1.0
    picked = F.conv2d(x.flatten(0, 1)[:, None], kernel, padding=(1, 2), stride=(2, 1))
    expected = picked.view(3, 2, -1).transpose(0, 1).reshape(2, -1)
    torch.testing.assert_close(pixel_rows(layer, x), expected)


def test_the_engine_gives_pixels_where_they_are_asked_for():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 3), nn.Flatten()).double()
    engine, x = Engine(net, "classification"), torch.randn(5, 2, 5, 5, dtype=torch.float64)
    whole = engine.factors(x, outputs=False)
    pixels = engine.factors(x, inputs={"0.weight", "2.weight"}, outputs=False, pixels={"2.weight"})
    torch.testing.assert_close(pixels.A[0], whole.A[0])
    torch.testing.assert_close(pixels.A[2], pixel_block(whole.A[2], 3))
    assert pixels.n_rows == whole.n_rows
    engine.chunk = 2
    pieces = engine.factors(x, outputs=False, pixels={"2.weight"})
    torch.testing.assert_close(pieces.A[2], pixels.A[2])


def test_without_data_there_are_zeros():
    gram, layer = PixelGram(), nn.Conv1d(9, 2, 3)
    gram.add(layer, torch.ones(0, 9, 3))
    assert gram.n_rows == 0 and torch.equal(gram.zeros(layer), torch.zeros(9, 9))
