r"""Eigenvalues made for the inverse: inflate a sampled curvature by the degrees of freedom it used.

A posterior needs :math:`(S + d)^{-1}` of a sum :math:`S = \sum_i E_i` over a population, with a
ridge d, and has :math:`S_n = \sum_{i \in n} \omega_i E_i` of a draw. The inverse of an unbiased
:math:`S_n` is biased: the draw's own rows look well determined along themselves. To leading order

.. math:: (S + d)^{-1} \approx (c\, S_n + d)^{-1}, \qquad c = \frac{1 - df / N}{1 - df / n},

(the deterministic equivalent of the resolvent, the fact behind generalised cross-validation) for n
of N alike rows, ``df = tr c S_n (c S_n + d)^-1``. For rows drawn with unequal probabilities
:math:`\pi_i` and weighted by :math:`1 / \pi_i`, leave one out: the draw's resolvent has the
expectation of one with the weights :math:`\hat w_i = E[w_i / (1 + w_i \kappa_i)] / E[1 / (1 + w_i
\kappa_i)]`, :math:`\kappa_i` the leverage of row i without itself. Asking for :math:`\hat w_i = 1`
gives each row the factor

.. math:: u_i = 1 + (1 - \pi_i) \frac{h_i}{1 - h_i},

with :math:`h_i` its leverage within :math:`c\, S_n + d`: 1 for certain rows, :math:`1 / (1 - h_i)`
for rare ones, and the formula above where all rows are alike. One number per ridge keeps the basis:

.. math:: c(d) = 1 + D(d)\, \frac{1}{n} \sum_i (1 - \pi_i) \frac{h_i}{1 - h_i},
          \qquad
          D(d) = 1 - \frac{\sum_i \operatorname{tr} H_i H_{i+1}}{\sum_i \operatorname{tr} H_i^2},

the mean of :math:`u_i`. D is the design effect of a systematic draw, by
successive differences: neighbours in its order that resemble each other mean that its noise is
less than that of independent draws. With several rows per datum (positions), :math:`h_i` is
:math:`\operatorname{tr} H_i^2 / \operatorname{tr} H_i` of the datum's block :math:`H_i`, its mean
leverage per direction.

In a block ``kron(B, A) + delta`` the ridge of B along A's i-th direction is ``delta / lam_A,i``, so
that c is a number per direction of A: ``kron(B, A)`` becomes a Kronecker product again, with
``c_i lam_A,i`` in place of ``lam_A,i``; and the other way round.

Rows that are alone in a direction (all, where there are fewer rows than dimensions) have the
leverage 1 without a ridge, and say nothing about the others: they do not count in the mean. What
they tell of is the curvature outside the draw's span, :mod:`laplace_debias.debias.span`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from laplace_debias.debias.leverages import BlockGrams, Leverages

__all__ = ["inverse_inflation", "resolvent_inflation"]

MOST_LEVERAGE = 0.98
"""Leverages are cut off here: a row that is nearly alone in its direction says nothing about it."""
MOST_INFLATION = 50.0
N_NODES = 12
"""Ridges at which c is computed; between them it is interpolated over the ridge's logarithm."""


def resolvent_inflation(lam: Tensor, ridges: Tensor, n: float, n_total: float) -> Tensor:
    r"""The factor c for n of N alike rows, :math:`(1 - df / N) / (1 - df / n)`, self-consistent.

    Args:
        lam: Eigenvalues ``[d]`` of the draw's factor.
        ridges: Ridges ``[k]``, on the scale of ``lam``.
        n: Number of independent rows.
        n_total: Number N of rows that the draw stands for.

    Returns:
        c, ``[k]``, at least 1; 1 for ``n = n_total``.

    Example:
        >>> resolvent_inflation(torch.ones(10), torch.tensor([1e-9, 1e9]), n=20, n_total=1e12)
        tensor([2.0000, 1.0000])
    """
    c = torch.ones_like(ridges)
    for _ in range(100):
        scaled = c[:, None] * lam
        df = (scaled / (scaled + ridges[:, None])).sum(1).clamp(max=MOST_LEVERAGE * n)
        new = (1 - df / n_total) / (1 - df / n)
        done = bool(((new - c).abs() < 1e-6 * c).all())
        c = 0.5 * (c + new)
        if done:
            break
    return c.clamp(1.0, MOST_INFLATION)


def inverse_inflation(
    rows: Tensor | BlockGrams,
    probabilities: Tensor,
    lam: Tensor,
    ridges: Tensor,
    *,
    linked: Tensor | None = None,
    counts: Tensor | None = None,
    alone: Tensor | None = None,
) -> Tensor:
    """The factor c of a weighted draw, for each of several ridges.

    Args:
        rows: Weighted rows ``[n, r, d]`` of n draws in their order, rotated into the eigenbasis of
            the factor: r rows (positions) each; or their blocks. They may be a part of those behind
            ``lam``.
        probabilities: Inclusion probabilities ``[n]``, one over the weights.
        lam: Eigenvalues ``[d]`` of the draw's factor.
        ridges: Ridges ``[k]``, positive.
        linked: Which draws follow their predecessor here in the draw as well, ``[n - 1]``; all by
            default.
        counts: How often each draw counts, ``[n]``, in its rows' weights, too; once by default.
        alone: Share of each draw's rows that are alone in a direction and say nothing about the
            others, ``[n]``, see
            :mod:`laplace_debias.debias.span`; none by default.

    Returns:
        c, ``[k]``, between 1 and ``MOST_INFLATION``.

    Example:
        >>> rows = torch.eye(2).repeat(8, 1)[:, None]  # 8 rows along each of two directions
        >>> lam, ridges = torch.full((2,), 8.0), torch.tensor([1e-6])
        >>> inverse_inflation(rows, torch.full((16,), 1e-9), lam, ridges)
        tensor([1.1429])
    """
    if not len(probabilities) or not bool((lam > 0).any()):
        return torch.ones_like(ridges)
    rare = (1 - probabilities).clamp(min=0)
    both = (rare[1:] > 0) & (rare[:-1] > 0)
    both = both if linked is None else both & linked
    counts = torch.ones_like(rare) if counts is None else counts
    shares = counts / counts.sum() * (1 if alone is None else 1 - alone)
    draws = _Draws(Leverages(rows), (rare * shares).to(lam), both.to(lam), counts.to(lam))
    if len(ridges) <= N_NODES:
        return _solved(draws, lam, ridges)
    # Far below the least curvature and far above the largest, c no longer changes.
    top = float(lam.max())
    x = ridges.clamp(1e-12 * top, 1e3 * top).log()
    nodes = torch.linspace(float(x.min()), float(x.max()), N_NODES).to(x)
    if float(nodes[-1] - nodes[0]) < 1e-9:
        return _solved(draws, lam, ridges[:1]).expand(len(ridges))
    values = _solved(draws, lam, nodes.exp())
    step = nodes[1] - nodes[0]
    left = ((x - nodes[0]) / step).floor().long().clamp(0, N_NODES - 2)
    share = ((x - nodes[left]) / step).clamp(0, 1)
    return values[left] + share * (values[left + 1] - values[left])


class _Draws(NamedTuple):
    """Leverages of draws, and how much of them and of pairs of neighbours counts."""

    leverages: Leverages
    shares: Tensor
    linked: Tensor
    counts: Tensor

    def used(self, D: Tensor) -> Tensor:
        """What draws have used up at whitening weights ``[k, d]``: c - 1, ``[k]``."""
        h, squares, crosses = self.leverages(D)
        tiny = torch.finfo(h.dtype).tiny
        # of a block, the mean leverage per direction it has; of one row, the leverage itself
        mean = (squares / h.clamp(min=tiny)).clamp(max=MOST_LEVERAGE)
        # neighbours are as alike as they are, however often they count
        once = squares / self.counts.square()
        own = (0.5 * (once[:, 1:] + once[:, :-1])) @ self.linked
        alike = (crosses / (self.counts[1:] * self.counts[:-1])) @ self.linked
        effect = torch.where(own > 0, (1 - alike / own.clamp(min=tiny)).clamp(0, 1), 1.0)
        return effect * ((mean / (1 - mean)) @ self.shares)


def _solved(draws: _Draws, lam: Tensor, ridges: Tensor) -> Tensor:
    """Solve for c at some ridges ``[k]`` by fixed-point steps, halved while they are large."""
    c, open_ = torch.ones_like(ridges), torch.ones_like(ridges, dtype=torch.bool)
    for _ in range(60):
        at = c[open_, None]
        used = draws.used(at / (at * lam + ridges[open_, None]))
        old, new = at[:, 0], (1 + used).clamp(max=MOST_INFLATION)
        done = (new - old).abs() < 1e-5 * old
        c[open_] = torch.where(done | ((new - old).abs() < 0.1), new, 0.5 * (old + new))
        open_[open_.clone()] = ~done
        if not bool(open_.any()):
            break
    return c
