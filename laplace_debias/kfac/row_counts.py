r"""How many rows stand behind a factor, and how unequal the data are that bring them.

A factor is a sum over n data of :math:`E_i = X_i^\top X_i`, with the rows ``X_i`` ``[r, d]`` of
datum i: one per position, and for an output factor one per backward vector and position. Rows of
one datum resemble each other, so data are counted, by the squared size of what each brings:

.. math:: S = \sum_i \lVert E_i \rVert_F^2 = \sum_i \lVert X_i X_i^\top \rVert_F^2 .

With one row per datum this is :math:`\sum_i |x_i|^4`. The effective number of rows is the number
of equally long, mutually orthogonal rows that would give the same :math:`S` at the same trace,
:math:`(\sum_i \operatorname{tr} E_i)^2 / S`.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from laplace_debias.kfac.counts import RowCount
from laplace_debias.kfac.few_rows import KFACApprox, check_datum
from laplace_debias.network.layers import KFACLayer, has_rows_last
from laplace_debias.network.unfold import conv_image, conv_windows, last_first

__all__ = ["RowCounter", "input_rows", "output_rows"]


class RowCounter:
    """Accumulates the rows of n data, as rows or as ``E_i``, whichever is smaller.

    Args:
        name: What the parameter is called in errors.

    Example:
        >>> counter = RowCounter()
        >>> counter.add(torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]]]))
        >>> counter.result(n=2)  # two different rows, then twice the same
        RowCount(n_data=2, n_rows=4, trace=4.0, trace_squares=8.0, squares=6.0)
    """

    def __init__(self, name: str = "weight") -> None:
        self.name = name
        self._rows: list[Tensor] = []
        self._grams: Tensor | None = None
        self._n_rows = 0

    def add(self, rows: Tensor, *, to_last: bool = False) -> None:
        """Add r rows for each of n data.

        Args:
            rows: ``[n, r, d]``.
            to_last: Whether they are summands of the rows added last, not further rows.
        """
        if to_last and self._rows:
            self._rows[-1] = self._rows[-1] + rows
            return
        self._rows.append(rows)
        self._n_rows += rows.shape[0] * rows.shape[1]
        if sum(part.shape[1] for part in self._rows) > rows.shape[2]:
            self._grams = self._with_rows()
            self._rows = []

    def _with_rows(self) -> Tensor:
        """``E_i`` of everything so far, ``[n, d, d]``."""
        X = torch.cat(self._rows, dim=1)
        return X.mT @ X if self._grams is None else torch.baddbmm(self._grams, X.mT, X)

    def result(self, n: int) -> RowCount:
        """The count of the rows of n data.

        Raises:
            ValueError: If the rows are not those of n data.
        """
        if self._grams is not None:
            E = self._with_rows() if self._rows else self._grams
        elif self._rows:
            X = torch.cat(self._rows, dim=1)
            E = X @ X.mT  # [n, r, r], of the trace and the norm that [n, d, d] has
        else:
            return RowCount(n, 0, 0.0, 0.0, 0.0)  # the outputs do not depend on the layer
        check_datum(len(E), n, self.name)
        E = E.detach().double()
        traces = E.diagonal(dim1=1, dim2=2).sum(1)
        return RowCount(
            n,
            self._n_rows,
            float(traces.sum()),
            float(traces.square().sum()),
            float(E.square().sum()),
        )


def input_rows(layer: KFACLayer, x: Tensor, approx: KFACApprox) -> Tensor:
    """Rows of a layer's input for each datum.

    Args:
        layer: ``Linear``, ``Conv1d``, ``Conv2d`` or ``Conv3d``.
        x: Its input, ``[n, ..., d_in]`` or ``[n, C_in, *spatial]``.
        approx: How positions are summed: ``"reduce"`` makes one row of them.

    Returns:
        Rows ``[n, r, d_in]``, for ``"reduce"`` sums over positions, in at least single precision.

    Example:
        >>> input_rows(torch.nn.Conv1d(1, 1, 2), torch.arange(3.0).view(1, 1, 3), "expand")
        tensor([[[0., 1.], [1., 2.]]])
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if has_rows_last(layer):
        rows = x.reshape(len(x), prod(x.shape[1:-1]), x.shape[-1])
    else:
        x, pads = conv_image(layer, x)
        windows = conv_windows(layer, F.pad(x, last_first(pads)) if any(map(any, pads)) else x)
        d = len(layer.kernel_size)
        rows = windows.flatten(1 + d).flatten(1, d)
    return rows.sum(1, keepdim=True) if approx == "reduce" else rows


def output_rows(layer: KFACLayer, g: Tensor, approx: KFACApprox) -> Tensor:
    """Rows of the gradient of a layer's output for each datum.

    Args:
        layer: ``Linear``, ``Conv1d``, ``Conv2d`` or ``Conv3d``.
        g: Gradient of its output, ``[n, ..., d_out]`` or ``[n, d_out, *positions]``.
        approx: How positions are summed: all but ``"expand"`` make one row of them.

    Returns:
        Rows ``[n, r, d_out]``, in at least single precision.

    Example:
        >>> output_rows(torch.nn.Linear(3, 1), torch.ones(1, 4, 1), "backpack")
        tensor([[[4.]]])
    """
    g = g.to(torch.promote_types(g.dtype, torch.float32))
    if not has_rows_last(layer):
        g = g.movedim(1, -1)
    rows = g.reshape(len(g), prod(g.shape[1:-1]), g.shape[-1])
    return rows if approx == "expand" else rows.sum(1, keepdim=True)
