r"""Covariance of the pixels that a convolution sees: the middle block of its input factor.

A convolution's patch holds ``k`` pixels of ``c`` channels, ``a = (a_1, ..., a_k)``. Its input
factor ``A = mean a a^T`` has the blocks ``A[u, v] = mean a_u a_v^T``. The block ``A[m, m]`` of the
pixel in the middle of the kernel takes no patches and a k^2-th of the multiplications.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from laplace_debias.kfac.grams import InputGram
from laplace_debias.network.layers import KFACLayer, has_rows_last, n_pixels
from laplace_debias.network.unfold import Conv, conv_image, last_first, n_positions

__all__ = ["PixelGram", "pixel_rows"]


def pixel_rows(layer: Conv, x: Tensor) -> Tensor:
    """Pixels in the middle of all patches, with zeros where these are outside of the image.

    Args:
        layer: ``Conv1d``, ``Conv2d`` or ``Conv3d``.
        x: Its input ``[n, C_in, *spatial]``.

    Returns:
        Columns ``[C_in / groups, n * positions]``.

    Example:
        >>> layer = torch.nn.Conv1d(1, 1, 3, padding=1, stride=2)
        >>> pixel_rows(layer, torch.arange(5.0).reshape(1, 1, 5))
        tensor([[0., 2., 4.]])
    """
    x, pads = conv_image(layer, x)
    middle, inside = n_pixels(layer) // 2, [slice(None), slice(None)]
    geometry = zip(x.shape[2:], layer.kernel_size, layer.dilation, pads, layer.stride, strict=True)
    for i, (size, k, d, pad, s) in enumerate(geometry):
        first = d * (middle // prod(layer.kernel_size[i + 1 :]) % k)
        inside.append(slice(first, first + s * (n_positions(size, k, d, pad, s) - 1) + 1, s))
    part = F.pad(x, last_first(pads))[tuple(inside)]
    return part.transpose(0, 1).reshape(x.shape[1], -1)


class PixelGram(InputGram):
    """Accumulates the covariance of pixels instead of A.

    Example:
        >>> gram, layer = PixelGram(), torch.nn.Conv1d(1, 1, 3, padding=1)
        >>> gram.add(layer, torch.tensor([[[1.0, 2.0, 3.0]]]))
        >>> gram.result(n=1)
        tensor([[4.6667]])
    """

    def mean(self, layer: KFACLayer, a: Tensor) -> tuple[Tensor, int]:
        """Mean over data and positions, and their number."""
        assert not has_rows_last(layer)  # a convolution
        a = a.to(torch.promote_types(a.dtype, torch.float32))
        columns = pixel_rows(layer, a)
        return self.summed(columns.T, 1 / columns.shape[1]), columns.shape[1]

    def zeros(self, layer: KFACLayer) -> Tensor:
        """What no datum comes to."""
        zeros = super().zeros(layer)
        c = len(zeros) // n_pixels(layer)
        return zeros[:c, :c]
