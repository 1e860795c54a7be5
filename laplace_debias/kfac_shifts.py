r"""Input factor of a convolution with stride 1 from products of shifted images, without unfolding.

A convolution's patch at position `t` holds the pixels `x[t + d u]` for the offsets `u` of its
kernel (dilation d), so the block of A for two offsets is a correlation of channels over a window::

    A[u, v] = sum_{t in window} x[t + d u] x[t + d v]^T = C(v - u, d u + window)
    C(s, box) = sum_{r in box} x[r] x[r + d s]^T             [C_in, C_in]

Blocks with the same shift `s = v - u` sum the same products over boxes that differ at their borders
only. Along each dimension these boxes are unions of neighbours in one list of segments: a long one
that all boxes share, and short ones at either end. So each product is formed once: for a kernel
of 3x3 there are 25 shifts instead of 81 pairs, or 13 instead of 45 as A is symmetric, and the input
is copied about 2 k times instead of k^2 times. Nothing is subtracted: A is as accurate as by
unfolding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

from torch import Tensor

__all__ = ["saves_work", "segments", "shifted_gram"]

Segment = tuple[int, int]

# Measured on a CPU: below this work of an average product, calls cost more than they save ...
_MIN_WORK = 2**20
# ... and below this number of rows for each pixel of the kernel, putting blocks together does. On a
# GPU the many calls would weigh more.
_MIN_ROWS = 16


def segments(size: int, k: int, d: int, pad: Segment, s: int) -> list[Segment | None]:
    """Cut the boxes of one shift, along one dimension, into pieces that they share.

    The box of offset u is the union of m + 1 neighbours, with m + 1 the number of offsets u for
    which u and u + s both lie in the kernel; the first such u begins with the first piece.

    Args:
        size: Length of the image.
        k: Length of the kernel.
        d: Dilation.
        pad: Zeros before and after the image.
        s: The shift, between `1 - k` and `k - 1`.

    Returns:
        `2 m + 1` pieces `(start, stop)` in pixels of the image, None where all products are zero.

    Example:
        >>> segments(8, 3, 1, (1, 1), 0)  # rows -1 to 8, of which the first and last are zero
        [None, (0, 1), (1, 7), (7, 8), None]
        >>> segments(8, 3, 1, (1, 1), 2)
        [(0, 6)]
    """
    n_positions = size + sum(pad) - d * (k - 1)
    a, b = max(0, -s), k - 1 - max(0, s)
    cuts = [d * u for u in range(a, b + 1)] + [d * u + n_positions for u in range(a, b + 1)]
    pieces: list[Segment | None] = []
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        start = max(start - pad[0], 0, -d * s)
        stop = min(stop - pad[0], size, size - d * s)
        pieces.append((start, stop) if start < stop else None)
    return pieces


def saves_work(
    x: Tensor,
    kernel: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[Segment],
    *,
    stride: Sequence[int],
) -> bool:
    """Whether shifted products apply, and are faster than unfolding.

    Args:
        x: Image `[n, c, *sizes]`.
        kernel: Sizes of the kernel.
        dilation: Its dilation.
        pads: Zeros before and after the image, per dimension.
        stride: The kernel's stride.

    Returns:
        False with strides, in three dimensions, with a kernel of one pixel or one that reaches
        over all positions, with little work for each product, or away from the CPU.

    Example:
        >>> import torch
        >>> x, pads = torch.zeros(16, 64, 8, 8), [(1, 1), (1, 1)]
        >>> saves_work(x, (3, 3), (1, 1), pads, stride=(1, 1))
        True
        >>> saves_work(x, (3, 3), (1, 1), pads, stride=(2, 2))
        False
    """
    n, c, *sizes = x.shape
    if len(sizes) > 2 or max(stride) > 1 or max(kernel) == 1 or x.device.type != "cpu":
        return False
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    positions = [size + sum(p) - r for size, p, r in zip(sizes, pads, reach, strict=True)]
    rows = n * prod(positions)
    return (
        all(size > r for size, r in zip(positions, reach, strict=True))
        and rows * c**2 >= _MIN_WORK
        and rows >= _MIN_ROWS * prod(kernel)
    )


def shifted_gram(
    x: Tensor,
    kernel: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[Segment],
    *,
    slice_bytes: int,
) -> Tensor:
    """Sum of `a a^T` over all patches of a convolution with stride 1.

    Args:
        x: Image `[n, c, *sizes]` in one or two dimensions.
        kernel: Sizes of the kernel.
        dilation: Its dilation.
        pads: Zeros before and after the image, per dimension.
        slice_bytes: Size up to which copies of the image are held at once.

    Returns:
        Matrix `[c * k, c * k]`, k the kernel's number of pixels.

    Example:
        >>> import torch
        >>> x = torch.tensor([[[1.0, 2.0, 3.0]]])
        >>> shifted_gram(x, (2,), (1,), [(0, 0)], slice_bytes=100)  # patches (1, 2) and (2, 3)
        tensor([[ 5.,  8.], [ 8., 13.]])
    """
    if x.ndim == 3:
        x, kernel, dilation, pads = x.unsqueeze(2), (1, *kernel), (1, *dilation), [(0, 0), *pads]
    n, c, H, W = x.shape
    cut = [
        {s: segments(size, k, d, pad, s) for s in range(1 - k, k)}
        for size, k, d, pad in zip((H, W), kernel, dilation, pads, strict=True)
    ]
    shifts = [s for s in product(cut[0], cut[1]) if s >= (0, 0)]  # the others by symmetry
    grams = {
        (s, i, j): x.new_zeros(c, c)
        for s in shifts
        for i, rows in enumerate(cut[0][s[0]])
        for j, columns in enumerate(cut[1][s[1]])
        if rows and columns
    }
    step = max(1, slice_bytes // (4 * kernel[1] * c * H * W * x.element_size()))
    for part in x.split(step):
        _add_products(grams, part.permute(1, 2, 0, 3), cut, dilation)

    blocks = x.new_empty(*kernel, *kernel, c, c)
    for s in shifts:
        for u, v, pieces in _pairs(s, kernel):
            block = blocks[(*u, *v)].zero_()
            for i, j in pieces:
                if (s, i, j) in grams:
                    block += grams[s, i, j]
            if u != v:
                blocks[(*v, *u)] = block.T
    return blocks.permute(4, 0, 1, 5, 2, 3).reshape(c * prod(kernel), -1)


def _add_products(
    grams: dict[tuple[tuple[int, int], int, int], Tensor],
    x: Tensor,
    cut: Sequence[dict[int, list[Segment | None]]],
    dilation: Sequence[int],
) -> None:
    """Add to each piece's product what the images `[c, H, n, W]` give."""
    copies: dict[Segment, Tensor] = {}

    def columns(start: int, stop: int) -> Tensor:
        if (start, stop) not in copies:
            copies[start, stop] = x[..., start:stop].flatten(2).contiguous()  # [c, H, n * columns]
        return copies[start, stop]

    for (s, i, j), gram in grams.items():
        (top, bottom), (left, right) = cut[0][s[0]][i], cut[1][s[1]][j]
        dy, dx = dilation[0] * s[0], dilation[1] * s[1]
        here = columns(left, right)[:, top:bottom].flatten(1)
        there = columns(left + dx, right + dx)[:, top + dy : bottom + dy].flatten(1)
        gram.addmm_(here, there.T)


def _pairs(
    s: tuple[int, int], kernel: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Iterator[tuple[int, ...]]]]:
    """Pairs of offsets u and v = u + s, and the numbers of the pieces that make up the box of u."""
    first = [max(0, -si) for si in s]
    m = [k - 1 - abs(si) for k, si in zip(kernel, s, strict=True)]
    for w in product(range(m[0] + 1), range(m[1] + 1)):
        u = tuple(a + wi for a, wi in zip(first, w, strict=True))
        v = tuple(ui + si for ui, si in zip(u, s, strict=True))
        yield u, v, product(*(range(wi, wi + mi + 1) for wi, mi in zip(w, m, strict=True)))
