r"""Factors of few rows, kept as their rows: they never become d x d.

A factor is a Gram matrix, :math:`F = X^\top X` with rows ``X [r, d]`` that carry the root of its
scale. As long as ``2 r < d`` the rows are the smaller thing to keep, and to decompose: the same
slot then holds ``X`` itself, told apart by its shape. Sums put rows below each other; once there
are too many, the matrix takes their place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "KFACApprox",
    "KFAC_APPROXES",
    "RowSum",
    "add_gram_",
    "added",
    "are_few",
    "as_matrix",
    "averaged",
    "check_datum",
    "dimension",
    "is_rows",
    "mirror_",
    "scaled",
    "total_of",
]


KFACApprox = Literal["expand", "reduce", "backpack"]
"""How positions are summed, see above."""

KFAC_APPROXES: tuple[KFACApprox, ...] = ("expand", "reduce", "backpack")


# Above this dimension a Gram matrix is built in halves, which skips its redundant upper triangle.
_HALVE_ABOVE = 384


def are_few(r: int, d: int) -> bool:
    """Whether r rows of d dimensions are kept as such.

    Args:
        r: Number of rows.
        d: Their dimension.

    Example:
        >>> are_few(392, 4608), are_few(2304, 4608)
        (True, False)
    """
    return 2 * r < d


def is_rows(M: Tensor) -> bool:
    """Whether a factor is given by its rows.

    Args:
        M: Matrix ``[d, d]``, rows ``[r, d]``, or curvatures ``[d]`` along a basis.

    Example:
        >>> is_rows(torch.ones(1, 3)), is_rows(torch.ones(3, 3)), is_rows(torch.ones(3))
        (True, False, False)
    """
    return M.ndim == 2 and M.shape[0] != M.shape[1]


def dimension(M: Tensor) -> int:
    """Dimension d of a factor in any form.

    Args:
        M: As in :func:`is_rows`.

    Example:
        >>> dimension(torch.ones(1, 3))
        3
    """
    return M.shape[-1]


def as_matrix(M: Tensor) -> Tensor:
    """A factor as a matrix.

    Args:
        M: Matrix ``[d, d]`` or rows ``[r, d]``; curvatures ``[d]`` are returned as they are.

    Example:
        >>> as_matrix(torch.tensor([[1.0, 0.0, 2.0]]))[2].tolist()
        [2.0, 0.0, 4.0]
    """
    if not is_rows(M):
        return M
    out = M.new_empty(M.shape[1], M.shape[1])
    add_gram_(out, M, beta=0.0)
    return mirror_(out)


def scaled(M: Tensor, scale: float) -> Tensor:
    """A factor times a number.

    Args:
        M: A factor in any form.
        scale: The number, not negative.

    Example:
        >>> scaled(torch.ones(1, 3), 4.0)
        tensor([[2., 2., 2.]])
    """
    return M * (math.sqrt(scale) if is_rows(M) else scale)


def added(one: Tensor, two: Tensor) -> Tensor:
    """Sum of two factors, as rows if these are still few.

    Args:
        one: A factor in any form.
        two: Another one.

    Example:
        >>> added(torch.ones(1, 5), torch.ones(1, 5)).shape
        torch.Size([2, 5])
        >>> added(torch.ones(1, 3), torch.ones(1, 3)).shape
        torch.Size([3, 3])
    """
    if is_rows(one) and is_rows(two):
        rows = torch.cat([one, two])
        return rows if are_few(*rows.shape) else as_matrix(rows)
    return as_matrix(one) + as_matrix(two)


def total_of(parts: Sequence[Tensor]) -> Tensor:
    """Sum of factors, such as those of the layers that share a parameter.

    Args:
        parts: Factors in any form, at least one.

    Example:
        >>> total_of([torch.eye(1), torch.eye(1), torch.eye(1)])
        tensor([[3.]])
    """
    return reduce(added, parts)


def averaged(one: Tensor, two: Tensor, share: float) -> Tensor:
    """Weighted mean of two factors.

    Args:
        one: A factor in any form.
        two: Another one.
        share: Weight of the second, 0 to 1.

    Example:
        >>> averaged(torch.eye(1), 5 * torch.eye(1), 0.25)
        tensor([[2.]])
    """
    if is_rows(one) or is_rows(two):
        return added(scaled(one, 1 - share), scaled(two, share))
    return one.lerp(two, share)


class RowSum:
    """Sums outer products of rows, as rows while these are few.

    Args:
        d: Dimension of the rows.
        like: A tensor whose device and type the sum has.
        few: Whether rows may be kept at all.

    Example:
        >>> total = RowSum(3, torch.empty(0), few=True)
        >>> total.add(torch.ones(1, 3))
        >>> total.result()
        tensor([[1., 1., 1.]])
    """

    def __init__(self, d: int, like: Tensor, few: bool = False) -> None:
        self.d, self._like = d, like
        self._rows: list[Tensor] | None = [] if few else None
        self._sum = None if few else like.new_zeros(d, d)

    def add(self, rows: Tensor) -> None:
        """Add rows ``[r, d]``."""
        if self._rows is not None:
            self._rows.append(rows)
            if are_few(sum(map(len, self._rows)), self.d):
                return
            rows, self._rows = torch.cat(self._rows), None
            self._sum = self._like.new_zeros(self.d, self.d)
        assert self._sum is not None
        add_gram_(self._sum, rows)

    def result(self) -> Tensor:
        """Rows ``[r, d]`` or the matrix ``[d, d]``."""
        if self._rows is not None:
            return torch.cat([self._like.new_empty(0, self.d), *self._rows])
        assert self._sum is not None
        return mirror_(self._sum)


def add_gram_(out: Tensor, rows: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> None:
    """Set the lower triangle of ``out`` to ``beta * out + alpha * rows^T rows``.

    The matrix is split into halves recursively: the two diagonal blocks, and the block below them.
    Large Gram matrices so cost little more than half of the full product. Above the diagonal
    ``out`` is undefined until ``mirror_``.

    Args:
        out: Square matrix ``[d, d]``, changed in place.
        rows: Matrix ``[r, d]``, of any strides.
        alpha: Factor of the product.
        beta: Factor of what was there before; with 0 it may be uninitialised.

    Example:
        >>> import torch
        >>> rows, out = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.empty(2, 2)
        >>> add_gram_(out, rows, alpha=0.5, beta=0.0)
        >>> out.tril()
        tensor([[ 5.,  0.], [ 7., 10.]])
    """
    d = rows.shape[1]
    if d <= _HALVE_ABOVE:
        out.addmm_(rows.T, rows, alpha=alpha, beta=beta)
        return
    h = d // 2
    add_gram_(out[:h, :h], rows[:, :h], alpha=alpha, beta=beta)
    add_gram_(out[h:, h:], rows[:, h:], alpha=alpha, beta=beta)
    out[h:, :h].addmm_(rows[:, h:].T, rows[:, :h], alpha=alpha, beta=beta)


def mirror_(out: Tensor) -> Tensor:
    """Complete in place what ``add_gram_`` has built, block by block.

    Args:
        out: Square matrix ``[d, d]`` from ``add_gram_``.

    Returns:
        The same matrix, symmetric.

    Example:
        >>> import torch
        >>> out = torch.empty(500, 500)
        >>> add_gram_(out, torch.ones(2, 500), beta=0.0)
        >>> bool((mirror_(out) == 2).all())
        True
    """
    d = len(out)
    if d > _HALVE_ABOVE:
        h = d // 2
        mirror_(out[:h, :h])
        mirror_(out[h:, h:])
        out[:h, h:] = out[h:, :h].T
    return out


def check_datum(rows: int, n: int, name: str) -> None:
    """Raise unless a layer's first dimension runs over the data.

    Args:
        rows: Size of the first dimension.
        n: Number of data.
        name: What the layer is called in the error.

    Raises:
        ValueError: If the two differ.

    Example:
        >>> check_datum(8, 8, "weight")
    """
    if rows != n:
        raise ValueError(
            f"Expected '{name}' to see its {n} data along the first dimension, because "
            "kfac_approx='reduce' and 'backpack' and normalisations sum the positions of each "
            f"datum, and effective rows count data; got a first dimension of {rows} (data merged "
            "with positions, or positions first). Remedy: kfac_approx='expand' without counting "
            "rows, a normalisation frozen, or reshape inside the model."
        )
