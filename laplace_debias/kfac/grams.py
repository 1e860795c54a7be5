r"""Accumulators: from the rows of a layer to Gram matrices.

A layer with weight ``W`` (``[d_out, d_in]``; for a convolution ``d_in = C_in / groups * k_1 * ... *
k_d``) maps rows to rows, ``s = W a``, once for each datum n and position t (token, pixel). With
``g_nt`` the gradient with respect to row t of the output, for one backward vector, and sums over
vectors understood, the three approximations of the block by ``kron(B, A)`` are::

    expand      B = sum_n sum_t g_nt g_nt^T                A = mean_n mean_t a_nt a_nt^T
    reduce      B = sum_n (sum_t g_nt) (sum_t g_nt)^T      A = mean_n (mean_t a_nt) (mean_t a_nt)^T
    backpack    B = sum_n (sum_t g_nt) (sum_t g_nt)^T      A = mean_n sum_t a_nt a_nt^T

Expand is exact for a single position and for deep linear networks whose loss has a term per
position, reduce for a single position and where everything after the layer is linear and treats
positions alike (Eschenhagen et al. 2023). BackPACK's is exact for a single position only; otherwise
it over-estimates by up to the number of positions: its ``A`` is on the scale of a sum over
positions. The calls of a layer that is called several times count as further positions.

A grouped convolution has one input row per group. Like curvlinops, we average those rows over the
groups before the outer product, and keep one B for all output channels together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from laplace_debias.kfac.few_rows import (
    KFACApprox,
    RowSum,
    add_gram_,
    added,
    are_few,
    check_datum,
    mirror_,
    scaled,
)
from laplace_debias.kfac.shifts import saves_work, shifted_gram
from laplace_debias.network.layers import KFACLayer, has_rows_last, n_in, n_out
from laplace_debias.network.unfold import (
    conv_image,
    conv_windows,
    last_first,
    n_positions,
    unfolded,
)

__all__ = ["InputGram", "OutputGram", "gradient_rows", "input_mean"]


# An unfolded convolution input is copied in slices of about this size, so that memory stays
# bounded.
_SLICE_BYTES = 2**26


def input_mean(layer: KFACLayer, x: Tensor, few: bool = False) -> tuple[Tensor, int]:
    """Mean over data and positions of ``a a^T`` of a layer's input rows, and the number of rows.

    Args:
        layer: ``Linear``, ``Conv1d``, ``Conv2d`` or ``Conv3d``.
        x: The layer's input: ``[n, ..., d_in]``, or ``[n, C_in, *spatial]``.
        few: Whether to keep rows as such where they are few.

    Returns:
        A, ``[d_in, d_in]``, in at least single precision, or its rows ``[r, d_in]`` (see
        :mod:`laplace_debias.kfac.few_rows`), and the number of rows.

    Example:
        >>> input_mean(torch.nn.Linear(2, 1), 2 * torch.ones(2, 4, 2))
        (tensor([[4., 4.], [4., 4.]]), 8)
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if has_rows_last(layer):
        rows = x.reshape(-1, x.shape[-1])
        return _gram(rows, 1 / len(rows), few), len(rows)

    x, pads = conv_image(layer, x)
    shape = layer.kernel_size, layer.dilation, pads, layer.stride
    n_rows = len(x) * prod(map(n_positions, x.shape[2:], *shape))
    if few and are_few(n_rows, x.shape[1] * prod(layer.kernel_size)):
        return scaled(torch.cat(list(unfolded(layer, x, pads, _SLICE_BYTES))), 1 / n_rows), n_rows
    if saves_work(x, *shape):
        return shifted_gram(x, *shape, slice_bytes=_SLICE_BYTES).div_(n_rows), n_rows

    out = x.new_zeros(2 * [x.shape[1] * prod(layer.kernel_size)])
    for rows in unfolded(layer, x, pads, _SLICE_BYTES):
        add_gram_(out, rows, alpha=1 / n_rows)
    return mirror_(out), n_rows


def _gram(rows: Tensor, scale: float, few: bool) -> Tensor:
    """``scale * rows^T rows``, or the rows themselves where they are few."""
    if few and are_few(*rows.shape):
        return scaled(rows, scale)
    out = rows.new_empty(rows.shape[1], rows.shape[1])
    add_gram_(out, rows, alpha=scale, beta=0.0)
    return mirror_(out)


def gradient_rows(layer: KFACLayer, g: Tensor) -> Tensor:
    """Gradients of a layer's output as rows, one for each datum and position.

    Args:
        layer: ``Linear``, ``Conv1d``, ``Conv2d`` or ``Conv3d``.
        g: Gradients of the layer's output, ``[n, ..., d_out]`` or ``[n, d_out, *positions]``.

    Returns:
        Rows ``[n * positions, d_out]``.

    Example:
        >>> gradient_rows(torch.nn.Conv1d(1, 2, 1), torch.ones(3, 2, 5)).shape
        torch.Size([15, 2])
    """
    if has_rows_last(layer):
        return g.reshape(-1, g.shape[-1])
    return g.transpose(0, 1).reshape(g.shape[1], -1).T


class InputGram:
    """Accumulates the input factor A of one weight over the calls of its layers in one pass.

    Args:
        approx: How positions are summed.
        name: What the weight is called in errors.
        few: Whether to keep rows as such where they are few.

    Example:
        >>> gram, layer = InputGram("backpack"), torch.nn.Linear(1, 1)
        >>> gram.add(layer, torch.ones(2, 4, 1))
        >>> gram.result(n=2)
        tensor([[4.]])
    """

    def __init__(
        self, approx: KFACApprox = "expand", name: str = "weight", few: bool = False
    ) -> None:
        self.approx, self.name, self.few = approx, name, few
        self._means: list[tuple[Tensor, int]] = []
        self._sums: list[tuple[Tensor, int]] = []

    def add(self, layer: KFACLayer, a: Tensor) -> None:
        """Add a call: ``a [n, ..., d_in]`` of a linear layer or ``[n, C_in, *spatial]``."""
        if self.approx == "reduce" and a.numel():
            self._sums.append(_input_sum(layer, a))
        elif a.numel():  # some data were routed here
            self._means.append(self.mean(layer, a))

    def mean(self, layer: KFACLayer, a: Tensor) -> tuple[Tensor, int]:
        """What the rows of a call come to, as a mean, and their number."""
        return input_mean(layer, a, self.few)

    def summed(self, rows: Tensor, scale: float) -> Tensor:
        """What some rows ``[r, d_in]`` come to, as a sum times ``scale``."""
        return _gram(rows, scale, self.few)

    def zeros(self, layer: KFACLayer) -> Tensor:
        """What no datum comes to: a matrix, or curvatures along a basis."""
        weight, d_in = layer.weight, n_in(layer)
        return weight.new_zeros(d_in, d_in, dtype=torch.promote_types(weight.dtype, torch.float32))

    @property
    def n_rows(self) -> int:
        """Number of rows that were averaged."""
        return sum(count for _, count in self._means) + sum(count for _, count in self._sums)

    def result(self, n: int) -> Tensor:
        """A, ``[d_in, d_in]`` or few rows, of the n data that passed, if there were any."""
        if self.approx == "reduce":
            for total, _ in self._sums:
                check_datum(len(total), n, self.name)
            n_positions = sum(count for _, count in self._sums)
            rows = sum(total for total, _ in self._sums[1:]) + self._sums[0][0]
            return self.summed(rows, 1 / (n * n_positions**2))
        n_rows = sum(count for _, count in self._means)
        scale = n_rows / n if self.approx == "backpack" else 1.0
        if len(self._means) == 1:
            return scaled(self._means[0][0], scale) if scale != 1 else self._means[0][0]
        return reduce(added, (scaled(A, scale * count / n_rows) for A, count in self._means))


class OutputGram:
    """Accumulates the output factor B of one layer over backward vectors.

    Args:
        layer: The layer.
        like: A tensor whose device the sums live on, and whose type decides theirs.
        approx: How positions are summed.
        name: What the layer is called in errors.
        few: Whether to keep rows as such while they are few.

    Example:
        >>> gram = OutputGram(torch.nn.Linear(1, 1), torch.empty(0), "reduce")
        >>> gram.add([torch.ones(2, 5, 1)], n=2)
        >>> gram.result()
        tensor([[50.]])
    """

    def __init__(
        self,
        layer: KFACLayer,
        like: Tensor,
        approx: KFACApprox = "expand",
        name: str = "layer",
        few: bool = False,
    ) -> None:
        self.layer, self.approx, self.name = layer, approx, name
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        self._sum = self.empty(like.new_empty(0, dtype=self.dtype), n_out(layer), few)

    def empty(self, like: Tensor, d_out: int, few: bool) -> RowSum:
        """The sum of no rows."""
        return RowSum(d_out, like, few)

    def add_rows(self, rows: Tensor) -> None:
        """Add rows ``[r, d_out]`` to the sum."""
        self._sum.add(rows)

    def add(self, gradients: Sequence[Tensor], n: int) -> None:
        """Add the gradients of one vector, one tensor for each call of the layer, of n data."""
        if self.approx == "expand":
            for g in gradients:
                self.add_rows(gradient_rows(self.layer, g.to(self.dtype)))
            return
        rows = []
        for g in gradients:
            check_datum(len(g), n, self.name)
            g = g.to(self.dtype)
            linear = has_rows_last(self.layer)
            g = g if linear else g.movedim(1, -1)  # [n, ..., d_out]
            rows.append(g.flatten(1, -2).sum(1) if g.ndim > 2 else g)
        if rows:
            self.add_rows(sum(rows[1:], rows[0]))

    def result(self) -> Tensor:
        """B, ``[d_out, d_out]`` or few rows."""
        return self._sum.result()


def _input_sum(layer: KFACLayer, x: Tensor) -> tuple[Tensor, int]:
    """Sum over positions of a layer's input rows, ``[n, d_in]``, and the number of positions."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if has_rows_last(layer):
        rows = x.reshape(len(x), -1, x.shape[-1])
        return rows.sum(1), rows.shape[1]
    x, pads = conv_image(layer, x)
    windows = conv_windows(layer, F.pad(x, last_first(pads)) if any(map(any, pads)) else x)
    d = len(layer.kernel_size)
    total = windows.sum(dim=tuple(range(1, 1 + d))).flatten(1)
    return total, prod(windows.shape[1 : 1 + d])
