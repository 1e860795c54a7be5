"""Patches of convolutions: a convolution is a linear layer of its patches."""

import pytest
import torch
from torch import nn

from laplace_debias.network.unfold import (
    conv_image,
    conv_padding,
    conv_windows,
    last_first,
    n_positions,
    patch_order,
    patches,
)

GEOMETRIES = {
    "plain": {},
    "stride": {"stride": 2},
    "padding": {"padding": 1},
    "dilation": {"dilation": 2, "padding": 2},
    "same": {"padding": "same"},
    "valid": {"padding": "valid"},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "reflect": {"padding": 1, "padding_mode": "reflect", "stride": 2},
}


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_windows_times_the_kernel_are_the_convolution(dim, name):
    torch.manual_seed(0)
    cls = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dim]
    conv = cls(2, 3, 3, bias=False, **GEOMETRIES[name]).double()
    x = torch.randn(2, 2, *[7, 6, 8][:dim]).double()
    image, pads = conv_image(conv, x)
    windows = conv_windows(conv, nn.functional.pad(image, last_first(pads)))
    expected = conv(x)
    shape = conv.kernel_size, conv.dilation, conv_padding(conv), conv.stride
    assert tuple(map(n_positions, x.shape[2:], *shape)) == expected.shape[2:]
    assert windows.shape == (2, *expected.shape[2:], 2, *conv.kernel_size)
    rows = windows.flatten(-dim - 1)  # [n, *positions, d_in]
    torch.testing.assert_close((rows @ conv.weight.flatten(1).T).movedim(-1, 1), expected)


def test_groups_are_averaged():
    conv = nn.Conv1d(4, 2, 3, groups=2)
    x = torch.randn(3, 4, 5)
    image, pads = conv_image(conv, x)
    torch.testing.assert_close(image, (x[:, :2] + x[:, 2:]) / 2)
    assert pads == [(0, 0)]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_patches_in_their_order_give_the_convolution(name, groups):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, (3, 2), groups=groups, bias=False, **GEOMETRIES[name]).double()
    x = torch.randn(2, 4, 7, 6).double()
    rows = patches(x, conv)  # [n, R, groups, d_in]
    kernel = patch_order(conv.weight.flatten(1).T.contiguous(), conv)  # [d_in, d_out]
    kernel = kernel.unflatten(1, (groups, -1))
    got = torch.einsum("nrgi,igo->ngor", rows, kernel).flatten(1, 2)
    torch.testing.assert_close(got, conv(x).flatten(2))


def test_padding_that_is_the_same_puts_more_behind():
    assert conv_padding(nn.Conv1d(1, 1, 4, padding="same")) == [(1, 2)]
    assert conv_padding(nn.Conv2d(1, 1, 2, padding=(3, 1))) == [(3, 3), (1, 1)]
    assert last_first([(1, 2), (3, 4)]) == [3, 4, 1, 2]
