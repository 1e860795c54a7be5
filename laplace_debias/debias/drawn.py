r"""The curvature of drawn pairs: rounds of draws, in groups, with eigenvalues made for the inverse.

Rounds. No pair is propagated twice. Round r draws from the pairs that no earlier round has drawn,
whose plain sum is known, so that :math:`T_r = K_{<r} + \sum_{i \in r} E_i / \pi_i` is unbiased for
the pool's sum given all that went before (Des Raj 1956), and so is every average of the rounds'
estimates. They are averaged by their precision: draws over the squared trace that was left to draw.

Groups. Pairs that are not certain are dealt into ``N_GROUPS`` groups; each group's estimate is
unbiased as well, and the mean of all is the estimate. :mod:`laplace_debias.debias.certificate`
compares halves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from laplace_debias.data.processes import processes
from laplace_debias.debias.corrected import Spectrum
from laplace_debias.debias.drawn_rows import (
    ALIKE,
    N_GROUPS,
    RUN,
    DrawnRows,
    KeptRows,
    in_runs,
    moved,
    numbers_of,
    thinned,
)
from laplace_debias.debias.eigen import eigh_float64
from laplace_debias.debias.leverages import BlockGrams
from laplace_debias.debias.span import NullSpace, Span, null_tail, outside_span, span_of
from laplace_debias.network.ownership import RowsKey

__all__ = ["DrawnFactor"]

MOST_NUMBERS = 2**20
"""Most numbers of gradient rows that are kept per layer: beyond, those of a part of the draws."""
MOST_BLOCK_NUMBERS = 2**19
"""The same for layers with several rows per datum, whose correction is small and costs more."""


@dataclass
class DrawnFactor:
    """Output factor of one layer (or several that share a parameter), from rounds of draws.

    Attributes:
        key: What its rows are found by, see :func:`laplace_debias.network.ownership.rows_key`.
        sums: The groups' estimates of the pool's sum, ``[N_GROUPS, d, d]``.
        known: Plain sum over all draws so far, ``[d, d]``.
        rows: Kept rows ``[m, r, d]`` of some draws, or their blocks where ``r >= d``, with the
            draws' numbers.
        most: Most numbers of rows that are kept of all rounds, see :func:`thinned`.
        device: Where sums are to be in a process without draws.
    """

    key: RowsKey
    most: float = math.inf
    sums: Tensor | None = None
    known: Tensor | None = None
    rows: list[KeptRows] = field(default_factory=list)
    device: torch.device | None = None
    _new: Tensor | None = None
    _new_known: Tensor | None = None
    _new_rows: list[KeptRows] = field(default_factory=list)
    _span: tuple[tuple[bool, ...], Span] | None = None  # of these draws

    def add(
        self, rows: Tensor, weights: Tensor, groups: Tensor, at: Tensor, first: int, n: int
    ) -> None:
        """Add the rows ``[m, r, d]`` of a mini-batch of the present round.

        Rows of draws that are evenly spread over the round are kept, whatever the mini-batches.

        Args:
            rows: The rows, not weighted.
            weights: One over the inclusion probabilities, ``[m]``.
            groups: Groups of the draws, -1 for certain ones.
            at: Numbers of these draws within the round, ``[m]``.
            first: Number of draws before the round.
            n: Number of draws of the round.
        """
        m, r, d = rows.shape
        if self._new is None or self._new_known is None:
            self._new = rows.new_zeros(N_GROUPS, d, d, dtype=torch.float64)
            self._new_known = rows.new_zeros(d, d, dtype=torch.float64)
        weights, groups = weights.to(rows), groups.to(rows.device)
        most = min(MOST_NUMBERS if r == 1 else MOST_BLOCK_NUMBERS, self.most)
        keep = in_runs(at, n, int(most // (min(r, d) * d))).to(rows.device)
        of_group = groups == torch.arange(N_GROUPS, device=groups.device)[:, None]
        numbers = first + at[keep.cpu()]
        if r >= d:  # [m, d, d], no more numbers than the rows: all sums follow
            blocks = rows.mT @ rows
            counts = weights * (N_GROUPS * of_group + (groups < 0)).to(rows)
            self._new += (counts @ blocks.flatten(1)).view(N_GROUPS, d, d)
            self._new_known += blocks.sum(0)
            self._new_rows.append((BlockGrams(blocks[keep]), numbers))
            return
        self._new_known += _gram(rows)
        weighted = rows * weights.sqrt()[:, None, None]
        self._new += _gram(weighted[groups < 0])
        for group, member in enumerate(of_group):
            self._new[group] += N_GROUPS * _gram(weighted[member])
        self._new_rows.append((rows[keep], numbers))

    def exchange(self) -> None:
        """Make the present round's draws of this process, if it has any, those of all."""
        group = processes()
        if group is None:
            return
        shares = group.gather([(moved(rows, "cpu"), at) for rows, at in self._new_rows])
        kept = [pair for share in shares for pair in share]
        if not kept:
            return
        device, d = self.device, numbers_of(kept[0][0]).shape[2]
        if self._new is None or self._new_known is None:
            self._new = torch.zeros(N_GROUPS, d, d, dtype=torch.float64, device=device)
            self._new_known = torch.zeros(d, d, dtype=torch.float64, device=device)
        group.sum_(self._new)
        group.sum_(self._new_known)
        self._new_rows = [(moved(rows, device), at) for rows, at in kept]

    def close(self, share: float, growth: float, *, distinct: bool) -> None:
        """End a round that counts by ``share``, see :meth:`DrawnRows.add`.

        Args:
            share: The round's part in the average of all rounds.
            growth: By how much the pool has become larger since the last round.
            distinct: Whether this round drew from pairs that none before has drawn.
        """
        self.rows += self._new_rows
        self._new_rows = []
        self.rows = thinned(self.rows, self.most)
        if self._new is None or self._new_known is None:
            return
        new = self._new
        if self.sums is not None and self.known is not None:
            if distinct:
                new = new + self.known
            new = (1 - share) * growth * self.sums + share * new
            self._new_known = self.known + self._new_known
        self.sums, self.known, self._new, self._new_known = new, self._new_known, None, None

    def estimate(self, scale: float, counts: Sequence[float] = ALIKE) -> Tensor:
        """Estimate of the sum over N data, ``[d, d]``.

        Args:
            scale: N over the number of data in the pool.
            counts: How often each group counts, of mean 1.

        Returns:
            B, in float64.
        """
        assert self.sums is not None  # a round has been closed
        return (self.sums * self.sums.new_tensor(counts)[:, None, None]).mean(0) * scale

    def loses_span(self, drawn: DrawnRows, counts: Sequence[float]) -> bool:
        """Whether draws that are alone in a direction are left if groups count so often.

        Args:
            drawn: Weights and groups of all draws.
            counts: How often each group counts, of mean 1.

        Returns:
            Whether any is; not known, and not likely, of blocks and of a part of the draws.
        """
        if any(isinstance(rows, BlockGrams) for rows, _ in self.rows):
            return False
        if sum(len(at) for _, at in self.rows) < len(drawn.weights):
            return False
        weights = drawn.weighted(counts)
        kept = [(numbers_of(rows), weights[at] > 0) for rows, at in self.rows]
        parts = [rows[counted.to(rows.device)] for rows, counted in kept]
        flat = torch.cat([rows.flatten(0, 1) for rows in parts])
        return bool((outside_span(flat[flat.any(1)])[0] > 0).any())

    def spectrum(
        self,
        drawn: DrawnRows,
        scale: float,
        counts: Sequence[float] = ALIKE,
        pair: tuple[Tensor, Tensor] | None = None,
    ) -> Spectrum:
        """Eigenbasis of an estimate, and what the correction for the inverse needs.

        Args:
            drawn: Weights and groups of all draws.
            scale: N over the number of data in the pool.
            counts: How often each group counts, of mean 1.
            pair: Eigenvalues and eigenvectors of :meth:`estimate`, if they are known.

        Returns:
            The spectrum.
        """
        lam, Q = pair if pair is not None else eigh_float64(self.estimate(scale, counts), "B")
        as_blocks = any(isinstance(rows, BlockGrams) for rows, _ in self.rows)
        longest = max(numbers_of(rows).shape[1] for rows, _ in self.rows)  # sequences may differ
        parts, numbers = [], []
        for rows, at in self.rows:
            kept = numbers_of(rows).double()
            if as_blocks:
                parts.append(kept.mT @ kept if isinstance(rows, Tensor) else kept)
            else:  # rows of zeros change nothing
                parts.append(F.pad(kept, (0, 0, 0, longest - kept.shape[1])))
            numbers.append(at)
        at, order = torch.cat(numbers).sort()  # the order of the draw
        weights, n_kept = drawn.weighted(counts)[at], len(at)
        counted = weights > 0
        thin = as_blocks and tuple(counts) != ALIKE  # they cost more, for a small correction
        if thin:
            counted &= at // RUN % 2 == 0
        at, order, weights = at[counted], order[counted], weights[counted].to(Q.device)
        base, w = drawn.weights[at].to(Q.device), scale * weights
        R = torch.cat(parts)[order.to(Q.device)]
        whole = n_kept == len(drawn.weights) and not thin
        runs = torch.zeros_like(at) if whole else at // RUN
        lam, often = lam.clamp(min=0), drawn.counts(counts)[at].to(w)
        more = (1 / w).clamp(max=1.0), (runs[1:] == runs[:-1]).to(Q.device), often
        alone, null = torch.zeros_like(w), NullSpace(lam.new_zeros(0), 0.0, len(lam))
        if as_blocks:
            blocks = Q.T @ (R * w[:, None, None]) @ Q
            return Spectrum(Q, lam, BlockGrams(blocks), *more, alone, null)
        if whole:
            reached = R.any(2)  # no rows of data that do not reach the layer
            owner = reached.nonzero()[:, 0]
            key = tuple(counted.tolist())
            if self._span is None or self._span[0] != key:
                self._span = key, span_of(R[reached] * base[owner].sqrt()[:, None])
            span = self._span[1]
            are_alone = (span.outside > 0).to(w)
            alone = alone.index_add(0, owner, are_alone) / reached.sum(1).clamp(min=1)
            tail = null_tail(span, len(lam), (1 - more[0])[owner], (w / base)[owner])
            null = NullSpace(tail, float(are_alone.mean()) if len(owner) else 0.0, span.rank)
        return Spectrum(Q, lam, R * w.sqrt()[:, None, None] @ Q, *more, alone, null)


def _gram(rows: Tensor) -> Tensor:
    """Sum over draws and rows of ``g g^T``, in float64."""
    flat = rows.flatten(0, 1)
    return (flat.T @ flat).double()
