"""Curvature sampling from a stream: the same independent draw in one pass.

m reservoirs hold one item each, every one independent of the others. One weighted reservoir of m
items would draw without replacement, and the weights of ``draw_weighted`` would be wrong for it;
priority sampling has right weights of its own, but its items depend on each other through a common
threshold, and cross-fitting needs folds that do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laplace_debias.debias.sampling import DEFAULT_SHARE, WeightedDraw, check_share, checked_scores


class Reservoirs:
    """The same draw as ``draw_weighted``, in one pass over a stream whose length is not known.

    Every one of m reservoirs holds one item. An item with score s replaces it with probability s
    over the sum of all scores so far, independently for each reservoir; in the end each holds one
    item drawn with probability proportional to score, independent of the others. The uniform share
    is a coin that each reservoir tosses once, at the start: heads, and it counts every item as 1.

    The caller keeps the items; ``update`` says which of them go where.

    Args:
        m: Number of reservoirs, the data to draw.
        uniform: Share of the uniform distribution in the mixture.
        generator: Source of randomness; the global one by default.
        device: Where the scores live.

    Raises:
        ValueError: If m is not positive, or ``uniform`` lies outside ``[0, 1]``.

    Example:
        >>> reservoirs, kept = Reservoirs(2), {}
        >>> for batch in (torch.tensor([0.1, 0.2]), torch.tensor([0.3])):
        ...     slots, positions = reservoirs.update(batch)
        ...     kept.update({int(s): float(batch[p]) for s, p in zip(slots, positions)})
        >>> sorted(kept), reservoirs.draw().weights.shape
        ([0, 1], torch.Size([2]))
    """

    def __init__(
        self,
        m: int,
        *,
        uniform: float = DEFAULT_SHARE,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """See the class."""
        if m < 1:
            raise ValueError(
                f"Expected a positive number of reservoirs, got {m}. Remedy: draw at least one "
                "datum."
            )
        check_share(uniform)
        self._m, self._uniform, self._generator = m, uniform, generator
        self._device = torch.device(device)
        self._ignores_score = self._rand() < uniform  # [m]
        self._indices = torch.full((m,), -1, device=self._device)
        self._scores = torch.zeros(m, dtype=torch.float64, device=self._device)
        self._total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._n_pool = 0

    def _rand(self) -> Tensor:
        return torch.rand(
            self._m, dtype=torch.float64, device=self._device, generator=self._generator
        )

    def update(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Offer a batch of the stream.

        Args:
            scores: Non-negative score ``[b]`` of each item in the batch.

        Returns:
            ``(slots, positions)``: reservoir ``slots[j]`` now holds the item at ``positions[j]`` of
            this batch.

        Raises:
            ValueError: If scores are negative or not finite.
        """
        scores = checked_scores(scores)
        ones = torch.ones_like(scores)
        positions = torch.zeros_like(self._indices)
        taken = torch.zeros_like(self._ignores_score)
        for mine, mass, before in (
            (self._ignores_score, ones, float(self._n_pool)),
            (~self._ignores_score, scores, self._total),
        ):
            # One number decides both whether an item of this batch is taken, and which.
            cumulative = mass.cumsum(0)
            u = self._rand() * (before + cumulative[-1]) - before
            hit = mine & (u >= 0) & (cumulative[-1] > 0)
            where = torch.searchsorted(cumulative, u, right=True).clamp(max=len(scores) - 1)
            positions = torch.where(hit, where, positions)
            taken |= hit
        slots = taken.nonzero().squeeze(1)
        self._indices[slots] = positions[slots] + self._n_pool
        self._scores[slots] = scores[positions[slots]]
        self._total = self._total + scores.sum()
        self._n_pool += len(scores)
        return slots, positions[slots]

    def draw(self) -> WeightedDraw:
        """The draw from all items offered so far.

        Returns:
            Positions in the stream and importance weights of the items that the reservoirs hold.

        Raises:
            ValueError: If no item had a positive score, or the stream had fewer items than
                reservoirs.
        """
        if self._n_pool < self._m:
            raise ValueError(
                f"Expected a stream of at least {self._m} data, got {self._n_pool}. Remedy: "
                "score more data, or draw fewer."
            )
        if not self._total > 0:
            raise ValueError(
                f"Expected at least one positive score, got {self._n_pool} zeros: the model is so "
                f"sure of every datum that none carries curvature. Remedy: sample uniformly."
            )
        u, n = self._uniform, self._n_pool
        q = (1 - u) * self._scores / self._total + u / n
        return WeightedDraw(self._indices.clone(), 1 / (n * q), n)
