r"""Accumulators: from the rows of a layer to its curvatures along given directions.

The curvatures of other data along the columns of ``Q`` are squares of rotated rows,

.. math:: \mathrm{diag}(Q^\top (\textstyle\sum_r x_r x_r^\top)\, Q)
          = \sum_r (Q^\top x_r)^{\circ 2},

so the d x d Gram matrix of :mod:`laplace_debias.kfac.grams` need not be formed: a row goes by, and
d numbers stay. Rotating r rows costs ``r d^2``. Where a Gram matrix is cheaper by more than the
``d^3 / 2`` that it takes to measure along ``Q`` (many rows of a wide layer, whose products are
symmetric; patches of a convolution, whose products repeat), that one is formed, measured and freed
before the next layer, as long as it is no larger than the scratch that unfolding takes anyway.

Along a thin basis (:mod:`laplace_debias.kfac.thin`) the null space gets the mean of what is left of
the trace: the sum of the rows' squared lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import torch
from torch import Tensor, nn

from laplace_debias.kfac import few_rows, grams
from laplace_debias.kfac.factors import Block
from laplace_debias.kfac.few_rows import KFACApprox, add_gram_, as_matrix, mirror_
from laplace_debias.kfac.grams import InputGram, OutputGram, input_mean
from laplace_debias.kfac.shifts import saves_work
from laplace_debias.kfac.thin import curvatures_of, is_thin, with_null_space
from laplace_debias.network.layers import KFACLayer, has_rows_last, is_kfac_layer, n_in
from laplace_debias.network.ownership import OwnedParameter
from laplace_debias.network.unfold import conv_image, n_positions, unfolded

__all__ = ["RotatedInputs", "RotatedOutputs", "input_gram", "output_grams", "squares_along"]

# From this many rows per dimension a symmetric product saves more than measuring along Q costs.
_ROWS_PER_DIMENSION = 2


def squares_along(rows: Tensor, Q: Tensor) -> Tensor:
    r"""Sum over rows of their squared coordinates, :math:`\sum_r (Q^\top x_r)^{\circ 2}`.

    Args:
        rows: Matrix ``[r, d]``, of any strides.
        Q: Directions ``[d, k]`` in columns, orthonormal, in the type of the rows.

    Returns:
        Sums ``[d]`` in float64, first those of the null space of a thin basis.

    Example:
        >>> squares_along(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.eye(2))
        tensor([10., 20.], dtype=torch.float64)
    """
    r, d = rows.shape
    many = r > _ROWS_PER_DIMENSION * d and not is_thin(Q)
    if many and d > few_rows._HALVE_ABOVE and _is_scratch(d, rows):
        M = rows.new_empty(d, d)
        add_gram_(M, rows, beta=0.0)
        return curvatures_of(mirror_(M), Q)
    values = Q.new_zeros(Q.shape[1], dtype=torch.float64)
    trace = values.new_zeros(())
    step = max(1, grams._SLICE_BYTES // (max(1, Q.shape[1]) * rows.element_size()))
    for part in rows.split(step):
        values += (part @ Q).square_().sum(0, dtype=torch.float64)
        if is_thin(Q):
            trace += torch.linalg.vector_norm(part, dtype=torch.float64).square()
    return with_null_space(values, trace, d)


def _is_scratch(d: int, like: Tensor) -> bool:
    """Whether a d x d matrix fits into the scratch of unfolding."""
    return d * d * like.element_size() <= grams._SLICE_BYTES


class RotatedInputs(InputGram):
    """Accumulates ``diag(Q_A^T A Q_A)`` of one weight over the calls of its layers in one pass.

    Args:
        Q: Directions ``[d_in, d_in]`` in columns.
        approx: How positions are summed.
        name: What the weight is called in errors.

    Example:
        >>> squares, layer = RotatedInputs(torch.eye(2)), nn.Linear(2, 1)
        >>> squares.add(layer, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> squares.result(n=2)
        tensor([ 5., 10.], dtype=torch.float64)
    """

    def __init__(self, Q: Tensor, approx: KFACApprox = "expand", name: str = "weight") -> None:
        super().__init__(approx, name)
        self.Q = Q

    def mean(self, layer: KFACLayer, a: Tensor) -> tuple[Tensor, int]:
        """Mean over data and positions of ``(Q^T a)^2``, and the number of rows."""
        x = a.to(self.Q.dtype)
        if has_rows_last(layer):
            rows = x.reshape(-1, x.shape[-1])
            return self.summed(rows, 1 / len(rows)), len(rows)
        image, pads = conv_image(layer, x)
        shape = layer.kernel_size, layer.dilation, pads, layer.stride
        n_rows = len(image) * prod(map(n_positions, image.shape[2:], *shape))
        d = len(self.Q)
        if n_rows > d and _is_scratch(d, image):
            many = n_rows > _ROWS_PER_DIMENSION * d and not is_thin(self.Q)
            if many or saves_work(image, *shape):
                return curvatures_of(as_matrix(input_mean(layer, x)[0]), self.Q), n_rows
        slices = unfolded(layer, image, pads, grams._SLICE_BYTES)
        return torch.stack([self.summed(rows, 1 / n_rows) for rows in slices]).sum(0), n_rows

    def summed(self, rows: Tensor, scale: float) -> Tensor:
        """Sum over rows ``[r, d_in]`` of ``(Q^T a)^2``, times ``scale``."""
        return squares_along(rows, self.Q).mul_(scale)

    def zeros(self, layer: KFACLayer) -> Tensor:
        """What no datum comes to."""
        return layer.weight.new_zeros(n_in(layer), dtype=torch.float64)


class RotatedOutputs(OutputGram):
    """Accumulates ``diag(Q_B^T B Q_B)`` of one layer over backward vectors.

    Args:
        Q: Directions ``[d_out, d_out]`` in columns.
        layer: The layer.
        approx: How positions are summed.
        name: What the layer is called in errors.

    Example:
        >>> squares = RotatedOutputs(torch.eye(2), nn.Linear(1, 2))
        >>> squares.add([torch.tensor([[1.0, 2.0], [3.0, 4.0]])], n=2)
        >>> squares.result()
        tensor([10., 20.], dtype=torch.float64)
    """

    def __init__(
        self, Q: Tensor, layer: KFACLayer, approx: KFACApprox = "expand", name: str = "layer"
    ) -> None:
        self.Q = Q
        super().__init__(layer, Q, approx, name, few=True)  # no matrix is allocated
        self._squares = Q.new_zeros(len(Q), dtype=torch.float64)

    def add_rows(self, rows: Tensor) -> None:
        """Add the squares of rotated rows ``[r, d_out]``."""
        self._squares += squares_along(rows, self.Q)

    def result(self) -> Tensor:
        """``diag(Q_B^T B Q_B)``, ``[d_out]``."""
        return self._squares


def input_gram(
    approx: KFACApprox, name: str, Q: Block | None = None, few: bool = False
) -> InputGram:
    """What sums the input rows of a weight: to A, or to its curvatures along ``Q``.

    Args:
        approx: How positions are summed.
        name: What the weight is called in errors.
        Q: Eigenvectors ``[Q_B, Q_A]`` of its block, if there are any.
        few: Whether to keep the rows behind A as such where they are few.

    Returns:
        The accumulator.

    Example:
        >>> type(input_gram("expand", "weight")).__name__
        'InputGram'
    """
    return InputGram(approx, name, few) if Q is None else RotatedInputs(Q[1], approx, name)


def output_grams(
    owned: Iterable[OwnedParameter],
    like: Tensor,
    approx: KFACApprox,
    names: Mapping[KFACLayer, str],
    Q: Mapping[str, Block],
    few: bool = False,
) -> dict[nn.Module, dict[str, OutputGram]]:
    """What sums the gradients of every layer: to B, or to its curvatures along each basis.

    Args:
        owned: The parameters and their layers.
        like: A tensor of the device and type of the gradients.
        approx: How positions are summed.
        names: What every layer is called in errors.
        Q: Eigenvectors of the blocks by parameter; or nothing at all.
        few: Whether to keep the rows behind B as such where they are few.

    Returns:
        For every layer the accumulators, by the parameter whose basis they use, or ``""``. A
        layer's weight and bias share one where they share their basis.

    Example:
        >>> output_grams([], torch.empty(0), "expand", {}, {})
        {}
    """
    found: dict[nn.Module, dict[str, OutputGram]] = {layer: {} for layer in names}
    if not Q:
        for layer, name in names.items():
            found[layer][""] = OutputGram(layer, like, approx, name, few)
        return found
    for p in owned:
        basis = Q[p.name][0]
        for layer in (layer for layer in p.layers if is_kfac_layer(layer) and layer in names):
            kept = found[layer].values()
            same = [g for g in kept if isinstance(g, RotatedOutputs) and g.Q is basis]
            new = same or [RotatedOutputs(basis, layer, approx, names[layer])]
            found[layer][p.name] = new[0]
    return found
