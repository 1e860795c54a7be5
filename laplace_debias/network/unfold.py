"""Geometry of convolutions: padding, positions, and the patches that a kernel sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "Conv",
    "Segment",
    "conv_image",
    "conv_padding",
    "conv_windows",
    "last_first",
    "n_positions",
    "patch_order",
    "patches",
    "unfolded",
]

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
"""The convolutions that K-FAC represents."""
Segment = tuple[int, int]
"""Two ends of a range, or numbers before and after an image."""


def n_positions(size: int, k: int, dilation: int, pad: Segment, stride: int) -> int:
    """Number of positions of a kernel along one dimension.

    Args:
        size: Length of the image.
        k: Length of the kernel.
        dilation: Its dilation.
        pad: Zeros before and after the image.
        stride: The kernel's stride.

    Returns:
        Length of the convolution's output.

    Example:
        >>> n_positions(8, 3, 1, (1, 1), 2)
        4
    """
    return (size + sum(pad) - dilation * (k - 1) - 1) // stride + 1


def conv_padding(layer: Conv) -> list[tuple[int, int]]:
    """Padding of a convolution before and after each spatial dimension.

    Args:
        layer: ``Conv1d``, ``Conv2d`` or ``Conv3d`` with numeric, ``"same"`` or ``"valid"`` padding.

    Returns:
        ``(before, after)`` per dimension.

    Example:
        >>> conv_padding(nn.Conv2d(1, 1, (4, 3), padding="same"))
        [(1, 2), (1, 1)]
    """
    if isinstance(layer.padding, tuple):
        return [(p, p) for p in layer.padding]
    if layer.padding == "same":
        total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [(t // 2, t - t // 2) for t in total]
    return [(0, 0) for _ in layer.kernel_size]  # "valid"


def conv_image(layer: Conv, x: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """The image that a convolution runs over: groups averaged, padded unless with zeros.

    Args:
        layer: ``Conv1d``, ``Conv2d`` or ``Conv3d`` with any padding and groups.
        x: Its input ``[n, C_in, *spatial]``.

    Returns:
        Image ``[n, C_in / groups, *sizes]``, and the zeros still to be put before and after each
        dimension.

    Example:
        >>> import torch
        >>> layer = nn.Conv1d(4, 2, 3, padding=1, padding_mode="circular", groups=2)
        >>> image, pads = conv_image(layer, torch.ones(1, 4, 5))
        >>> image.shape, pads
        (torch.Size([1, 2, 7]), [(0, 0)])
    """
    if layer.groups > 1:
        x = x.unflatten(1, (layer.groups, -1)).mean(1)
    pads = conv_padding(layer)
    if layer.padding_mode != "zeros":
        x, pads = F.pad(x, last_first(pads), mode=layer.padding_mode), [(0, 0) for _ in pads]
    return x, pads


def conv_windows(layer: Conv, x: Tensor) -> Tensor:
    """All patches that a convolution sees in an image, as a view.

    Args:
        layer: ``Conv1d``, ``Conv2d`` or ``Conv3d`` with any stride and dilation.
        x: Image ``[n, c, *sizes]``, padding included.

    Returns:
        View ``[n, *positions, c, *kernel_size]``.

    Example:
        >>> import torch
        >>> x = torch.arange(5.0).reshape(1, 1, 5)
        >>> conv_windows(nn.Conv1d(1, 1, 2, stride=3), x).reshape(-1, 2)
        tensor([[0., 1.], [3., 4.]])
    """
    n, c, *sizes = x.shape
    s_n, s_c, *steps = x.stride()
    k, d, s = layer.kernel_size, layer.dilation, layer.stride
    positions = [(sizes[i] - d[i] * (k[i] - 1) - 1) // s[i] + 1 for i in range(len(k))]
    return x.as_strided(
        (n, *positions, c, *k),
        (
            s_n,
            *(step * si for step, si in zip(steps, s, strict=True)),
            s_c,
            *(step * di for step, di in zip(steps, d, strict=True)),
        ),
    )


def unfolded(layer: Conv, x: Tensor, pads: Sequence[Segment], slice_bytes: int) -> Iterator[Tensor]:
    """All patches of a convolution as rows, some data at a time.

    Args:
        layer: ``Conv1d``, ``Conv2d`` or ``Conv3d``.
        x: Image ``[n, c, *sizes]`` from ``conv_image``.
        pads: Zeros to put before and after each dimension.
        slice_bytes: Size of the rows that are held at once, at least one datum's.

    Yields:
        Rows ``[r, c * k]``, k the kernel's number of pixels, about ``slice_bytes`` at a time.

    Example:
        >>> import torch
        >>> layer, x = nn.Conv1d(1, 1, 2), torch.arange(3.0).reshape(1, 1, 3)
        >>> [rows.tolist() for rows in unfolded(layer, x, [(0, 0)], 2**20)]
        [[[0.0, 1.0], [1.0, 2.0]]]
    """
    windows = conv_windows(layer, F.pad(x, last_first(pads)) if any(map(any, pads)) else x)
    n, d = windows.shape[0], len(layer.kernel_size)
    per_datum, d_in = prod(windows.shape[1 : 1 + d]), prod(windows.shape[1 + d :])
    # Columns first: then the innermost copy runs along the input's memory.
    columns = windows.permute(*range(1 + d, 2 + 2 * d), *range(1 + d))  # [C, *k, n, *positions]
    step = max(1, slice_bytes // (per_datum * d_in * windows.element_size()))
    for start in range(0, n, step):
        part = columns.narrow(1 + d, start, min(step, n - start))
        yield part.reshape(d_in, -1).T  # the only unfolded copy


def last_first(pads: Sequence[tuple[int, int]]) -> list[int]:
    """Padding in the order of ``torch.nn.functional.pad``.

    Example:
        >>> last_first([(1, 2), (3, 4)])
        [3, 4, 1, 2]
    """
    return [p for pair in reversed(pads) for p in pair]


def patches(x: Tensor, conv: nn.Conv2d) -> Tensor:
    r"""Extract the input patches of a convolution, channels last inside a patch.

    Copying from a channels-last image moves runs of ``kernel_width * C_in`` numbers, several
    times faster than ``F.unfold``, whose order is ``(C_in, kh, kw)``; :func:`patch_order` brings an
    eigenvector matrix to this order.

    Args:
        x: Images ``[n, C_in, height, width]``.
        conv: The convolution: its kernel size, stride, padding (and mode), dilation, groups.

    Returns:
        Patches ``[n, R, groups, d_in]``, with ``d_in = kh * kw * C_in / groups``.

    Example:
        >>> import torch
        >>> conv = nn.Conv2d(2, 3, 3, stride=2, padding=1)
        >>> patches(torch.zeros(5, 2, 8, 8), conv).shape
        torch.Size([5, 16, 1, 18])
    """
    (kh, kw), (sh, sw), (dh, dw) = conv.kernel_size, conv.stride, conv.dilation
    pad = conv._reversed_padding_repeated_twice  # (left, right, top, bottom), "same" resolved
    if conv.padding_mode == "zeros":
        x = F.pad(x.permute(0, 2, 3, 1), (0, 0, *pad))  # [n, height, width, C_in]
    else:
        x = F.pad(x, tuple(pad), mode=conv.padding_mode).permute(0, 2, 3, 1)
    x = x.unfold(1, (kh - 1) * dh + 1, sh)[..., ::dh].unfold(2, (kw - 1) * dw + 1, sw)[..., ::dw]
    n, H, W = x.shape[:3]  # [n, H, W, C_in, kh, kw]
    x = x.unflatten(3, (conv.groups, -1)).permute(0, 1, 2, 3, 5, 6, 4)
    return x.reshape(n, H * W, conv.groups, -1)


def patch_order(Q_A: Tensor, conv: nn.Conv2d) -> Tensor:
    """Permute the rows of ``Q_A`` from ``(C_in, kh, kw)`` to the order of :func:`patches`."""
    kernel = Q_A.reshape(-1, *conv.kernel_size, Q_A.shape[1])  # [C_in, kh, kw, d]
    return kernel.permute(1, 2, 0, 3).reshape(Q_A.shape)
