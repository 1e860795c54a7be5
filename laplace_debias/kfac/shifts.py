r"""Input factor of a convolution from products of shifted images, without unfolding.

A convolution's patch at position ``t`` holds the pixels ``x[stride t + o_u]``, with
``o_u = dilation u - padding``, for the offsets ``u`` of its kernel. Write
``o_u = stride q_u + r_u`` and let ``x_r`` be every stride-th pixel from the r-th on. The block of A
for two offsets is then a correlation::

    A[u, v] = sum_t x[stride t + o_u] x[stride t + o_v]^T
            = sum_{p in box_u} x_r[p] x_r'[p + q_v - q_u]^T     box_u = q_u + all positions t

Pairs with the same ``v - u`` and the same phase ``r_u`` sum the same products over boxes that
differ at their borders only. So the boxes are cut into pieces which they share (a long one in the
middle, short ones at either end, along each dimension), and each product is formed once: for a
kernel of 3x3 with stride 1 there are 25 different shifts instead of 81 pairs, and 13 instead of 45
as A is symmetric. Nothing is subtracted, so A is as accurate as by unfolding; products with zeros
of the padding are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from torch import Tensor

from laplace_debias.network.unfold import Segment, n_positions

__all__ = ["Shift", "saves_work", "shifted_gram", "shifts"]

# Measured on a CPU: with fewer rows times squared channels, calls cost more than they save ...
_MIN_WORK = 2**20
# ... with fewer rows for each pixel of the kernel, putting the blocks together does, ...
_MIN_ROWS = 16
# ... and unfolding makes larger products, which pays if more than this share differ.
_MAX_SHARE = 0.8


@dataclass(frozen=True)
class Shift:
    """Pairs of kernel offsets ``(u, u + delta)`` along one dimension that share their products.

    Attributes:
        delta: Difference of the two offsets.
        phases: First pixel of the two subsampled images.
        shift: How many of their pixels lie between the two factors of a product.
        pieces: Ranges ``(start, stop)`` of pixels of the first image, None where all products
            vanish.
        boxes: For each u the numbers of the pieces to sum.
    """

    delta: int
    phases: tuple[int, int]
    shift: int
    pieces: tuple[Segment | None, ...]
    boxes: dict[int, range]


def shifts(size: int, k: int, dilation: int, pad: Segment, stride: int) -> list[Shift]:
    """Group the pairs of offsets of a kernel along one dimension, described as in ``n_positions``.

    Returns:
        The groups, in which every pair of offsets occurs once.

    Example:
        >>> groups = shifts(8, 3, 1, (1, 1), 1)
        >>> [(group.delta, group.pieces) for group in groups if group.delta >= 0]
        [(0, (None, (0, 1), (1, 7), (7, 8), None)), (1, (None, (0, 7), None)), (2, ((0, 6),))]
        >>> groups[0].boxes
        {0: range(0, 3), 1: range(1, 4), 2: range(2, 5)}
    """
    length = n_positions(size, k, dilation, pad, stride)
    start, phase = zip(*(divmod(dilation * u - pad[0], stride) for u in range(k)), strict=True)
    lengths = [len(range(r, size, stride)) for r in range(stride)]
    members: dict[tuple[int, int], list[int]] = {}
    for u, v in product(range(k), repeat=2):
        members.setdefault((v - u, phase[u]), []).append(u)
    groups = []
    for (delta, r), us in members.items():
        shift, r_other = start[us[0] + delta] - start[us[0]], phase[us[0] + delta]
        low, high = max(0, -shift), min(lengths[r], lengths[r_other] - shift)
        cuts = sorted({edge for u in us for edge in (start[u], start[u] + length)})
        inside = [(max(a, low), min(b, high)) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        pieces = tuple((a, b) if a < b else None for a, b in inside)
        boxes = {u: range(cuts.index(start[u]), cuts.index(start[u] + length)) for u in us}
        groups.append(Shift(delta, (r, r_other), shift, pieces, boxes))
    return groups


def saves_work(
    x: Tensor,
    kernel: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[Segment],
    stride: Sequence[int],
) -> bool:
    """Whether shifted products apply, and are faster than unfolding.

    Args:
        x: Image ``[n, c, *sizes]``.
        kernel: Sizes of the kernel.
        dilation: Its dilation.
        pads: Zeros before and after the image, per dimension.
        stride: The kernel's stride.

    Returns:
        False in three dimensions, if few products are shared or there is little work in each, and
        away from the CPU, where the many calls would weigh more.

    Example:
        >>> import torch
        >>> x, pads = torch.zeros(16, 64, 8, 8), [(1, 1), (1, 1)]
        >>> saves_work(x, (3, 3), (1, 1), pads, (1, 1)), saves_work(x, (3, 3), (1, 1), pads, (3, 3))
        (True, False)
    """
    n, c, *sizes = x.shape
    if len(sizes) > 2 or x.device.type != "cpu":
        return False
    groups = [shifts(*each) for each in zip(sizes, kernel, dilation, pads, stride, strict=True)]
    share = prod(map(len, groups)) / prod(kernel) ** 2
    rows = n * prod(map(n_positions, sizes, kernel, dilation, pads, stride))
    enough = rows * c**2 >= _MIN_WORK and rows >= _MIN_ROWS * prod(kernel)
    return share <= _MAX_SHARE and enough


def shifted_gram(
    x: Tensor,
    kernel: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[Segment],
    stride: Sequence[int],
    *,
    slice_bytes: int,
) -> Tensor:
    """Sum of ``a a^T`` over all patches of a convolution.

    Args:
        x: Image ``[n, c, *sizes]`` in one or two dimensions.
        kernel: Sizes of the kernel.
        dilation: Its dilation.
        pads: Zeros before and after the image, per dimension.
        stride: The kernel's stride.
        slice_bytes: Size up to which copies of the image are held at once.

    Returns:
        Matrix ``[c * k, c * k]``, k the kernel's number of pixels.

    Example:
        >>> import torch
        >>> x = torch.tensor([[[1.0, 2.0, 3.0]]])  # patches (1, 2) and (2, 3)
        >>> shifted_gram(x, (2,), (1,), [(0, 0)], (1,), slice_bytes=100)
        tensor([[ 5.,  8.], [ 8., 13.]])
    """
    if x.ndim == 3:
        x, kernel, dilation = x.unsqueeze(2), (1, *kernel), (1, *dilation)
        pads, stride = [(0, 0), *pads], (1, *stride)
    c, H, W = x.shape[1:]
    rows, columns = (
        shifts(*each) for each in zip((H, W), kernel, dilation, pads, stride, strict=True)
    )
    # Half of the pairs; the others follow by symmetry.
    pairs = [
        (row, column, _empty_products(x, row, column))
        for row, column in product(rows, columns)
        if (row.delta, column.delta) >= (0, 0)
    ]
    step = max(1, slice_bytes // (4 * kernel[1] * c * H * W * x.element_size()))
    for part in x.split(step):
        images = _Images(part, stride)
        for row, column, products in pairs:
            for (i, j), gram in products.items():
                images.add_product_(gram, row, i, column, j)

    blocks = x.new_empty(*kernel, *kernel, c, c)
    for row, column, products in pairs:
        for (u, row_box), (w, column_box) in product(row.boxes.items(), column.boxes.items()):
            terms = [products[ij] for ij in product(row_box, column_box) if ij in products]
            v, z = u + row.delta, w + column.delta
            block = blocks[u, w, v, z]
            block.copy_(terms[0]) if terms else block.zero_()
            for term in terms[1:]:
                block += term
            if (u, w) != (v, z):
                blocks[v, z, u, w] = block.T
    return blocks.permute(4, 0, 1, 5, 2, 3).reshape(c * prod(kernel), -1)


def _empty_products(x: Tensor, row: Shift, column: Shift) -> dict[tuple[int, int], Tensor]:
    """A matrix of zeros for each pair of pieces with products that do not vanish."""
    size = 2 * x.shape[1:2]
    return {
        (i, j): x.new_zeros(size)
        for i, j in product(range(len(row.pieces)), range(len(column.pieces)))
        if row.pieces[i] and column.pieces[j]
    }


class _Images:
    """Images ``[n, c, H, W]``, of which ranges of columns are copied once."""

    def __init__(self, x: Tensor, stride: Sequence[int]) -> None:
        self.x, self.stride = x.permute(1, 2, 0, 3), stride
        self.copies: dict[tuple[int, int, int, int], Tensor] = {}

    def part(self, phases: tuple[int, int], rows: Segment, columns: Segment) -> Tensor:
        """Channels ``[c, pixels]`` of a box of every stride-th pixel."""
        key = (*phases, *columns)
        if key not in self.copies:
            subsampled = self.x[:, phases[0] :: self.stride[0], :, phases[1] :: self.stride[1]]
            self.copies[key] = subsampled[..., slice(*columns)].flatten(2).contiguous()
        return self.copies[key][:, slice(*rows)].flatten(1)

    def add_product_(self, gram: Tensor, row: Shift, i: int, column: Shift, j: int) -> None:
        """Add the products of the i-th piece of the rows and the j-th of the columns."""
        rows, columns = row.pieces[i], column.pieces[j]
        if rows is None or columns is None:
            return
        here = self.part((row.phases[0], column.phases[0]), rows, columns)
        there = self.part(
            (row.phases[1], column.phases[1]),
            (rows[0] + row.shift, rows[1] + row.shift),
            (columns[0] + column.shift, columns[1] + column.shift),
        )
        gram.addmm_(here, there.T)
