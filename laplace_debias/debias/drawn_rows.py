"""How much each draw of all rounds counts, in the whole estimate and in those of groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["N_GROUPS", "DrawnRows"]

N_GROUPS = 4


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
