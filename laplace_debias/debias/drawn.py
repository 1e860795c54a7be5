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

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laplace_debias.data.processes import processes
from laplace_debias.debias.eigen import EigenFactors, eigh_float64
from laplace_debias.debias.inverse import inverse_inflation, null_floor, resolvent_inflation
from laplace_debias.network.ownership import RowsKey

__all__ = ["N_GROUPS", "DrawnFactor", "DrawnRows", "corrected_block"]

N_GROUPS = 4
MOST_NUMBERS = 2**20
"""Most numbers of gradient rows that are kept per layer: beyond, those of a part of the draws."""
MOST_BLOCK_NUMBERS = 2**18
"""The same for layers with several rows per datum, whose correction is small and costs more."""


@dataclass
class DrawnRows:
    """What is known of all draws so far, in their order; weights are relative to the pool.

    Attributes:
        drawn: Weight of each draw by its own round, ``[m]``.
        known: Weight of each draw as a known term of later rounds, ``[m]``.
        groups: Group of each draw, ``[m]``; -1 for certain ones, which all groups share.

    Example:
        >>> rows = DrawnRows()
        >>> rows.add(torch.tensor([0.5, 1.0]), torch.tensor([0, -1]), share=1.0, growth=1.0)
        >>> rows.weights, rows.of([0])[1], rows.of([1])[1]
        (tensor([2., 1.]), tensor([8., 1.]), tensor([0., 1.]))
    """

    drawn: Tensor = field(default_factory=lambda: torch.zeros(0))
    known: Tensor = field(default_factory=lambda: torch.zeros(0))
    groups: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    @property
    def weights(self) -> Tensor:
        """Weight of each draw in the estimate, ``[m]``."""
        return self.drawn + self.known

    def add(
        self,
        probabilities: Tensor,
        groups: Tensor,
        share: float,
        growth: float,
        *,
        distinct: bool = True,
    ) -> None:
        """Add a round that counts by ``share``; the pool has become ``growth`` times as large.

        Args:
            probabilities: Inclusion probabilities of the new draws.
            groups: Their groups.
            share: The round's part in the average of all rounds.
            growth: By how much the pool has become larger since the last round.
            distinct: Whether earlier draws are known terms of this round's estimate.
        """
        old, new = (1 - share) * growth, share / probabilities.cpu()
        self.drawn = torch.cat([old * self.drawn, new])
        known = old * self.known + (share if distinct else 0.0)
        self.known = torch.cat([known, torch.zeros_like(new)])
        self.groups = torch.cat([self.groups, groups.cpu()])

    def rarity(self, scale: float) -> float:
        """Mean share of the draws' noise that sampling without replacement leaves.

        Args:
            scale: N over the number of data that draws are made from.

        Returns:
            The mean of ``1 - 1 / weight`` over draws that are not certain.
        """
        free = self.groups >= 0
        if not bool(free.any()):
            return 0.0
        return float((1 - 1 / (scale * self.weights[free])).clamp(min=0).mean())

    def of(self, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Which draws count in the estimate of some groups, and their weights there."""
        scale = (self.groups < 0).to(self.drawn)
        for group in groups:
            scale[self.groups == group] = N_GROUPS / len(groups)
        weights = scale * self.drawn + self.known
        return weights > 0, weights


@dataclass
class DrawnFactor:
    """Output factor of one layer (or several that share a parameter), from rounds of draws.

    Attributes:
        key: What its rows are found by, see :func:`laplace_debias.network.ownership.rows_key`.
        sums: The groups' estimates of the pool's sum, ``[N_GROUPS, d, d]``.
        known: Plain sum over all draws so far, ``[d, d]``.
        rows: Kept rows ``[m, r, d]`` of some draws, with the draws' numbers.
        device: Where sums are to be in a process without draws.
    """

    key: RowsKey
    sums: Tensor | None = None
    known: Tensor | None = None
    rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    device: torch.device | None = None
    _new: Tensor | None = None
    _new_known: Tensor | None = None
    _new_rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)

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
        self._new_known += _gram(rows)
        weights, groups = weights.to(rows), groups.to(rows.device)
        weighted = rows * weights.sqrt()[:, None, None]
        self._new += _gram(weighted[groups < 0])
        for group in range(N_GROUPS):
            self._new[group] += N_GROUPS * _gram(weighted[groups == group])
        most = MOST_NUMBERS if r == 1 else MOST_BLOCK_NUMBERS
        most = min(n, max(2, most // (r * d)))
        kept = (at + 1) * most // n > at * most // n
        self._new_rows.append((rows[kept.to(rows.device)], first + at[kept]))

    def exchange(self) -> None:
        """Make the present round's draws of this process, if it has any, those of all."""
        group = processes()
        if group is None:
            return
        shares = group.gather([(rows.cpu(), at) for rows, at in self._new_rows])
        kept = [pair for share in shares for pair in share]
        if not kept:
            return
        device, d = self.device, kept[0][0].shape[2]
        if self._new is None or self._new_known is None:
            self._new = torch.zeros(N_GROUPS, d, d, dtype=torch.float64, device=device)
            self._new_known = torch.zeros(d, d, dtype=torch.float64, device=device)
        group.sum_(self._new)
        group.sum_(self._new_known)
        order = torch.cat([at for _, at in kept]).argsort()
        rows = torch.cat([rows for rows, _ in kept])[order].to(device)
        self._new_rows = [(rows, torch.cat([at for _, at in kept])[order])]

    def close(self, share: float, growth: float, *, distinct: bool) -> None:
        """End a round that counts by ``share``, see :meth:`DrawnRows.add`.

        Args:
            share: The round's part in the average of all rounds.
            growth: By how much the pool has become larger since the last round.
            distinct: Whether this round drew from pairs that none before has drawn.
        """
        self.rows += self._new_rows
        self._new_rows = []
        if self._new is None or self._new_known is None:
            return
        new = self._new
        if self.sums is not None and self.known is not None:
            if distinct:
                new = new + self.known
            new = (1 - share) * growth * self.sums + share * new
            self._new_known = self.known + self._new_known
        self.sums, self.known, self._new, self._new_known = new, self._new_known, None, None

    def estimate(self, groups: Sequence[int], scale: float) -> Tensor:
        """Some groups' estimate of the sum over N data, ``[d, d]``.

        Args:
            groups: Which groups.
            scale: N over the number of data in the pool.

        Returns:
            B, in float64.
        """
        assert self.sums is not None  # a round has been closed
        return self.sums[list(groups)].mean(0) * scale

    def spectrum(
        self,
        drawn: DrawnRows,
        groups: Sequence[int],
        scale: float,
        pair: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        """Eigenbasis of some groups' estimate, and what the correction for the inverse needs.

        Args:
            drawn: Weights and groups of all draws.
            groups: Which groups.
            scale: N over the number of data in the pool.
            pair: Eigenvalues and eigenvectors of :meth:`estimate`, if they are known.

        Returns:
            Q and eigenvalues; weighted rows ``[m, r, d]`` in that basis with their inclusion
            probabilities; and the floor of the null space.
        """
        lam, Q = pair if pair is not None else eigh_float64(self.estimate(groups, scale), "B")
        chosen, weights = drawn.of(groups)
        parts, numbers = [], []
        for rows, at in self.rows:
            keep = chosen[at]
            parts.append(rows[keep.to(rows.device)].double())
            numbers.append(at[keep])
        at = torch.cat(numbers)
        w = (scale * weights[at]).to(Q.device)
        X = torch.cat(parts) * w.sqrt()[:, None, None]
        whole = len(at) == int(chosen.sum())
        n_rows = X.shape[0] * X.shape[1]
        floor = null_floor(X.flatten(0, 1)) if whole and n_rows < X.shape[2] else 0.0
        return Q, lam.clamp(min=0), X @ Q, (1 / w).clamp(max=1.0), floor


def _gram(rows: Tensor) -> Tensor:
    """Sum over draws and rows of ``g g^T``, in float64."""
    flat = rows.flatten(0, 1)
    return (flat.T @ flat).double()


def corrected_block(
    output: tuple[Tensor, Tensor, Tensor, Tensor, float],
    inputs: tuple[Tensor, Tensor] | None,
    ridge: float,
    *,
    correct: bool = True,
    input_rows: tuple[float, float] | None = None,
) -> EigenFactors:
    r"""A block with eigenvalues made for the inverse, see :mod:`laplace_debias.debias.inverse`.

    A bias: :math:`c \lambda_B + \tau`. A weight: :math:`(\lambda_{B,j} + \tau / c_{\max})\, c_i
    \lambda_{A,i}`, c of the ridges :math:`\delta / (h \lambda_{A,i})`: a Kronecker product whose
    floor is :math:`\tau` where the ridge is small, and matters nowhere else.

    Args:
        output: See :meth:`DrawnFactor.spectrum`.
        inputs: Eigenvectors and eigenvalues of A, ``None`` for a bias.
        ridge: Prior precision over the Hessian factor.
        correct: Whether to correct at all.
        input_rows: Numbers n and N of the rows behind A, if it is drawn as well, one row a datum.

    Returns:
        The block.
    """
    Q, lam, rows, probabilities, floor = output
    if not correct:
        return EigenFactors(Q, lam, *(inputs or ()))
    if inputs is None:
        ridges = lam.new_tensor([ridge])
        c = inverse_inflation(rows, probabilities, lam, ridges, floor)
        return EigenFactors(Q, c * lam + floor)
    Q_A, lam_A = inputs
    least = max(float(lam_A.max()), 1e-300) * 1e-14
    c = inverse_inflation(rows, probabilities, lam, ridge / lam_A.clamp(min=least), floor)
    lam_B = lam + floor / float(c.max())
    lam_A = c * lam_A
    if input_rows is not None:
        least = max(float(lam_B.max()), 1e-300) * 1e-14
        lam_B = lam_B * resolvent_inflation(lam_A, ridge / lam_B.clamp(min=least), *input_rows)
    return EigenFactors(Q, lam_B, Q_A, lam_A)
