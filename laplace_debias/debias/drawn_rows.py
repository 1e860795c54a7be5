"""Draws of all rounds: how much each counts, whose rows are kept, and what there is room for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laplace_debias.debias.leverages import BlockGrams

__all__ = [
    "ALIKE",
    "N_GROUPS",
    "RUN",
    "DrawnRows",
    "KeptRows",
    "Room",
    "in_runs",
    "moved",
    "numbers_of",
    "thinned",
]

N_GROUPS = 4
ALIKE = (1.0,) * N_GROUPS
"""All groups count once."""
RUN = 2 * N_GROUPS
"""A part of the draws is kept in runs: neighbours stay neighbours, also within half the groups."""
KeptRows = tuple[Tensor | BlockGrams, Tensor]
"""Rows ``[m, r, d]`` of some draws, or their blocks, and the draws' numbers ``[m]``."""


class Room(NamedTuple):
    """How much a fit in rounds may keep.

    Attributes:
        numbers: Numbers of rows per layer, of all rounds.
        n_probes: Most inputs of the pool that serve as probes.
        n_pool: Most data of the pool.
        n_forward: Most data of a forward pass, ``None`` for a whole mini-batch.
        n_backward: Most data of a backward pass.
    """

    numbers: float = math.inf
    n_probes: float = math.inf
    n_pool: float = math.inf
    n_forward: int | None = None
    n_backward: int | None = None

    def with_all(self, others: list[Room]) -> Room:
        """The same for several processes, which keep the same things.

        Args:
            others: What each has room for.

        Example:
            >>> Room(100, 4, 50, 8, 8).with_all([Room(100, 4, 50, 8, 8), Room(70, 5, 60, 9, 9)])
            Room(numbers=70, n_probes=4, n_pool=50, n_forward=8, n_backward=8)
        """
        return self._replace(
            numbers=min(room.numbers for room in others),
            n_probes=min(room.n_probes for room in others),
            n_pool=min(room.n_pool for room in others),
        )


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
        >>> rows.weights, rows.counts((1.5, 0.5, 0.5, 1.5))
        (tensor([2., 1.]), tensor([1.5000, 1.0000]))
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

    def counts(self, counts: Sequence[float]) -> Tensor:
        """How often each draw counts if its group does so often; certain ones count once.

        Args:
            counts: How often each group counts, of mean 1.

        Returns:
            The counts, ``[m]``.
        """
        of_group = torch.tensor([*counts, 1.0], dtype=self.drawn.dtype)
        return of_group[self.groups]  # -1 is the last

    def weighted(self, counts: Sequence[float]) -> Tensor:
        """Weight of each draw in the estimate if groups count so often, ``[m]``."""
        return self.counts(counts) * self.drawn + self.known


def in_runs(at: Tensor, n: int, most: int) -> Tensor:
    """Which of n draws are kept: all, or some runs of neighbours, spread evenly.

    Args:
        at: Numbers of some draws of a round, ``[m]``.
        n: Number of draws of the round.
        most: Number of draws to keep; two runs are kept at least.

    Returns:
        Which of them, ``[m]``.

    Example:
        >>> in_runs(torch.arange(64), 64, 32).view(-1, RUN).all(1)
        tensor([False,  True, False,  True, False,  True, False,  True])
    """
    if n <= most:
        return torch.ones_like(at, dtype=torch.bool)
    n_runs = -(-n // RUN)
    wanted = min(n_runs, max(2, most // RUN))
    run = at // RUN
    return (run + 1) * wanted // n_runs > run * wanted // n_runs


def thinned(kept: list[KeptRows], most: float) -> list[KeptRows]:
    """Every second run of the kept draws, and of these again, until they are few enough.

    Args:
        kept: Rows of some draws.
        most: Most numbers of all of them; two runs are kept at least.

    Returns:
        Rows of fewer draws, or the same.

    Example:
        >>> kept = [(torch.ones(32, 1, 5), torch.arange(32))]
        >>> thinned(kept, 100)[0][1].tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23]
    """
    while sum(numbers_of(rows).numel() for rows, _ in kept) > most:
        runs = (torch.cat([at for _, at in kept]) // RUN).unique()
        if len(runs) <= 2:
            break
        fewer = []
        for rows, at in kept:
            keep = torch.isin(at // RUN, runs[::2])
            numbers = numbers_of(rows)[keep.to(numbers_of(rows).device)]
            fewer.append((numbers if isinstance(rows, Tensor) else BlockGrams(numbers), at[keep]))
        kept = [pair for pair in fewer if len(pair[1])]
    return kept


def numbers_of(rows: Tensor | BlockGrams) -> Tensor:
    """Rows ``[m, r, d]``, or blocks ``[m, d, d]``."""
    return rows if isinstance(rows, Tensor) else rows.G


def moved(rows: Tensor | BlockGrams, device: Any) -> Tensor | BlockGrams:
    """The same on a device."""
    return rows.to(device) if isinstance(rows, Tensor) else BlockGrams(rows.G.to(device))
