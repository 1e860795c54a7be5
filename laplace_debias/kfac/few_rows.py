r"""Factors of few rows, kept as their rows: they never become d x d.

A factor is a Gram matrix, :math:`F = X^\top X` with rows ``X [r, d]`` that carry the root of its
scale. As long as ``2 r < d`` the rows are the smaller thing to keep, and to decompose: the same
slot then holds ``X`` itself, told apart by its shape. Sums put rows below each other; once there
are too many, the matrix takes their place.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laplace_debias.kfac.symmetric import add_gram_, mirror_

__all__ = ["RowSum", "added", "as_matrix", "averaged", "dimension", "are_few", "is_rows", "scaled"]


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
