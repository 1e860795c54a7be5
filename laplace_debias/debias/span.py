r"""The curvature outside the span of a draw, as far as its own rows tell.

A row that is outside the span of all others is *alone* in a direction. It is held-out curvature
where the others know of none: with its squared distance :math:`e_i` to their span,

.. math:: T = \sum_i (1 - \pi_i)\, e_i

is unbiased for what the rows that were not drawn have outside the span of those that were. Where
there are fewer rows than dimensions all rows are alone; where units of a network are rarely active,
a few may be, however many rows there are. If none is, nothing is missing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["NullSpace", "Span", "null_floor", "null_tail", "outside_span", "span_of"]

RANK_TOL = 1e-12
"""Eigenvalues below this share of the largest are those of a null space."""
ALONE_TOL = 1e-6
"""A row whose leverage without a ridge is closer to 1 than this is alone in a direction."""


class Span(NamedTuple):
    """What rows have outside the span of the others, in all rows and in both halves of them.

    Spans do not depend on weights: if a row is weighted by w, its squared distances are, and the
    ranks stay.

    Attributes:
        outside: Squared distances ``[n]`` to the span of all others, 0 exactly within it.
        rank: Rank of all rows.
        of_half: Squared distances ``[n]`` to the span of the others in the row's half.
        half_rank: Mean rank of the halves.
    """

    outside: Tensor
    rank: int
    of_half: Tensor
    half_rank: float


class NullSpace(NamedTuple):
    r"""What is foretold of the directions that a draw says little or nothing about.

    Directions outside its span get the floor :math:`\tau`. Within it, eigenvectors are as good as
    their rows are many: directions get :math:`\bar a \tau`, with the share :math:`\bar a` of rows
    that are alone. With fewer rows than dimensions all are, no direction is known, and all get
    :math:`\tau`.

    Attributes:
        tail: See :func:`null_tail`.
        share: Share of rows that are alone.
        rank: Rank of the rows.
    """

    tail: Tensor
    share: float
    rank: int

    def floor(self, ridge: float, lam: Tensor) -> Tensor:
        """What the eigenvalues of a draw are raised by.

        Args:
            ridge: The ridge, positive.
            lam: Eigenvalues ``[d]``, ascending.

        Returns:
            The floor of each direction, ``[d]``.

        Example:
            >>> lam, tail = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.5])
            >>> NullSpace(tail, 0.25, 2).floor(1e-9, lam)
            tensor([0.5000, 0.1250, 0.1250])
        """
        tau = null_floor(self.tail, ridge)
        known = torch.arange(len(lam), device=lam.device) >= len(lam) - self.rank
        return torch.where(known, self.share * tau, tau).to(lam)


def outside_span(rows: Tensor) -> tuple[Tensor, int]:
    r"""What each row has outside the span of the others.

    With :math:`S = X^\top X`, the squared distance of row i to that span is
    :math:`1 / (x_i^\top S^{+2} x_i)` if its leverage :math:`x_i^\top S^+ x_i` is 1, and 0 else.
    As many rows as dimensions, or fewer, are taken to be independent, however steep their spectrum
    is; dimensions (units) that no row reaches do not count.

    Args:
        rows: Rows ``[n, d]``.

    Returns:
        Squared distances ``[n]`` in float64, 0 exactly for rows within the span of the others; and
        the rank of all rows.

    Example:
        >>> outside_span(torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 3.0, 0.0]]))
        (tensor([4., 0., 0.], dtype=torch.float64), 2)
    """
    X, reached = rows.double(), int(rows.any(0).sum())
    if len(X) <= reached:
        lam, U = torch.linalg.eigh(X @ X.T)
        least = max(float(lam[-1]), 1e-300) * RANK_TOL if len(X) else 1.0
        return 1 / (U.square() @ (1 / lam.clamp(min=least))), len(X)
    lam, Q = torch.linalg.eigh(X.T @ X)
    kept = lam > RANK_TOL * lam[-1:].clamp(min=1e-300)
    squares = (X @ Q[:, kept]).square() / lam[kept]
    nearness = (squares / lam[kept]).sum(1)
    alone = squares.sum(1) > 1 - ALONE_TOL
    return torch.where(alone, 1 / nearness.clamp(min=1e-300), 0.0), int(kept.sum())


def span_of(rows: Tensor) -> Span:
    """What rows have outside the span of the others, also of those in their half.

    Args:
        rows: Rows ``[n, d]``, in the order of the draw: every second one is a half.

    Returns:
        The span.

    Example:
        >>> span_of(torch.eye(4)[:2])
        Span(outside=tensor([1., 1.], ...), rank=2, of_half=tensor([1., 1.], ...), half_rank=1.0)
    """
    outside, rank = outside_span(rows)
    of_half, ranks = torch.zeros_like(outside), [0, 0]
    if bool((outside > 0).any()):  # else nothing is asked of the halves
        for h in (0, 1):
            of_half[h::2], ranks[h] = outside_span(rows[h::2])
    return Span(outside, rank, of_half, sum(ranks) / 2)


def null_tail(span: Span, d: int, rare: Tensor | None = None, w: Tensor | None = None) -> Tensor:
    r"""Curvatures that a draw foretells outside its span.

    :math:`T = \sum_i (1 - \pi_i)\, e_i` lies in :math:`k = d - r + 1` directions, for rows of rank
    r. How steeply the spectrum goes on is told by both halves of the rows: with half as many, of
    mean rank :math:`r'`, rows lie :math:`\bar e_{n/2}` outside, in the mean, and
    :math:`\bar e_n` with all. Of a flat spectrum
    :math:`\bar e_n / \bar e_{n/2}` is :math:`q_0 = k / (d - r' + 1)`. What falls faster falls by
    :math:`\rho` per direction:

    .. math:: \tau_j \propto \rho^j, \qquad
              \rho^{r - r'} = \min(1, \bar e_n / (q_0\, \bar e_{n/2})).

    Args:
        span: See :func:`span_of`.
        d: Number of dimensions.
        rare: One minus the inclusion probabilities of the rows, ``[n]``; ones by default.
        w: Weights of the rows, if they are others than those of the span, as ratios ``[n]``.

    Returns:
        Curvatures ``[d - r + 1]``, descending; none if no row that is not certain is alone.

    Example:
        >>> null_tail(span_of(torch.eye(4)[:2]), 4), len(null_tail(span_of(torch.ones(5, 4)), 4))
        (tensor([0.6667, 0.6667, 0.6667], dtype=torch.float64), 0)
    """
    outside, of_half = (e if w is None else w * e for e in (span.outside, span.of_half))
    total = float((outside if rare is None else rare * outside).sum())
    if total <= 0:
        return outside.new_zeros(0)
    k, ratio = d - span.rank + 1, 1.0
    if len(outside) > 1:
        flat = k / (d - span.half_rank + 1)
        ratio = float(outside.mean()) / max(float(of_half.mean()) * flat, 1e-300)
        ratio = max(min(1.0, ratio), 1e-12)
    steps = max(span.rank - span.half_rank, 1.0)
    directions = torch.arange(k, dtype=torch.float64, device=outside.device)
    shape = (math.log(ratio) / steps * directions).exp()
    return total * shape / shape.sum()


def null_floor(tail: Tensor, ridge: float) -> float:
    r"""One curvature for all directions outside the span, which have no basis.

    The geometric mean with the ridge in it, :math:`\exp(\mathrm{mean}_j \log(\tau_j + d)) - d`:
    a posterior is off by ratios of such sums.

    Args:
        tail: See :func:`null_tail`.
        ridge: The ridge d, positive.

    Returns:
        The floor; 0 if the tail is empty.

    Example:
        >>> tail = torch.tensor([1.0, 0.01], dtype=torch.float64)
        >>> round(null_floor(tail, 1e-9), 3), round(null_floor(tail, 1e3), 3)
        (0.1, 0.505)
    """
    return max(0.0, float((tail + ridge).log().mean().exp()) - ridge) if len(tail) else 0.0
