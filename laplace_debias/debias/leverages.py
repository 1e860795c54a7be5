r"""Leverages of draws at any number of ridges, from what is computed once.

With a draw's block :math:`G_i = X_i^\top X_i` in the eigenbasis of the factor and the whitening
:math:`D = \operatorname{diag}(c / (c \lambda + d))` of a ridge d, its whitened block is
:math:`H_i = D^{1/2} G_i D^{1/2}`, and all that the correction needs is linear or quadratic in D:

.. math:: \operatorname{tr} H_i = \sum_j D_j G_{i,jj}, \qquad
          \operatorname{tr} H_i H_{i'} = \sum_{jk} D_j D_k\, G_{i,jk} G_{i',jk}.

So the products of blocks are formed once, and ridges and steps cost a matrix product each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BlockGrams", "Leverages"]

MOST_DIMENSIONS_PER_ROW = 16
"""Up to here blocks ``[d, d]`` of r rows are formed, beyond it matrices ``[r, r]`` per ridge."""


class BlockGrams(NamedTuple):
    """Blocks ``X_i^T X_i`` of draws, ``[n, d, d]``, where that is less than their rows."""

    G: Tensor


class Leverages:
    """Traces and products of whitened blocks, for draws in their order.

    Args:
        draws: Weighted rows ``[n, r, d]`` in the eigenbasis of the factor, or their blocks.

    Example:
        >>> leverages = Leverages(torch.ones(2, 3, 1))  # 2 draws of 3 rows
        >>> [part.tolist() for part in leverages(torch.tensor([[1.0], [0.5]]))]
        [[[3.0, 3.0], [1.5, 1.5]], [[9.0, 9.0], [2.25, 2.25]], [[9.0], [2.25]]]
    """

    def __init__(self, draws: Tensor | BlockGrams) -> None:
        self.rows: Tensor | None = None
        if isinstance(draws, Tensor):
            n, r, d = draws.shape
            if r == 1:
                self.linear = draws[:, 0].square()
                self.products = draws[1:, 0] * draws[:-1, 0]
                self.kind = "rows"
                return
            if d > MOST_DIMENSIONS_PER_ROW * r:
                self.rows, self.kind = draws, "grams"
                self.linear = draws.square().sum(1)
                return
            draws = BlockGrams(draws.mT @ draws)
        G, self.kind = draws.G, "blocks"
        self.linear = G.diagonal(dim1=1, dim2=2)
        self.squares = G.square().flatten(1)
        self.products = (G[1:] * G[:-1]).flatten(1)

    def __len__(self) -> int:
        """Number of draws."""
        return len(self.linear)

    def __call__(self, D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Traces, squared norms, and products of neighbours.

        Args:
            D: Whitening weights ``[k, d]``, one row per ridge.

        Returns:
            ``tr H_i`` and ``tr H_i^2``, ``[k, n]``, and ``tr H_i H_(i+1)``, ``[k, n - 1]``.
        """
        h = D @ self.linear.T
        if self.kind == "rows":
            return h, h.square(), (D @ self.products.T).square()
        if self.rows is None:
            pairs = (D[:, :, None] * D[:, None, :]).flatten(1)
            return h, pairs @ self.squares.T, pairs @ self.products.T
        own, crosses = [], []
        for d in D:
            Z = self.rows * d.sqrt()
            own.append((Z @ Z.mT).square().sum((1, 2)))
            crosses.append((Z[1:] @ Z[:-1].mT).square().sum((1, 2)))
        return h, torch.stack(own), torch.stack(crosses)
