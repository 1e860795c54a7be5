"""Scores for free: the curvature each datum carries, kept while the network is trained."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace_debias.network.loss import curvature_scores

__all__ = ["CurvatureRecorder"]


class CurvatureRecorder:
    """Keeps the last score of every datum, four bytes each.

    Data drawn by these scores are weighted by the probability of the draw, and their vectors come
    from the outputs at the time of the fit: the posterior is unbiased however old the scores are.
    They save the fit its scoring pass; a part of the data still goes through forward passes for
    the input factors, the output layer and the loss.

    Args:
        n_data: Number of data in the dataset.
        likelihood: ``"classification"`` or ``"regression"``.

    Raises:
        ValueError: If ``n_data`` is not positive.

    Example:
        >>> recorder = CurvatureRecorder(3)
        >>> recorder.update(torch.tensor([0, 2]), torch.tensor([[0.0, 0.0], [9.0, -9.0]]))
        >>> recorder.scores.round(decimals=3)  # the datum in the middle gets the mean
        tensor([0.5000, 0.2500, 0.0000])
    """

    def __init__(self, n_data: int, likelihood: str = "classification") -> None:
        if isinstance(n_data, bool) or not isinstance(n_data, int) or n_data < 1:
            raise ValueError(
                f"Expected a positive whole number of data, got {n_data!r}. Remedy: pass "
                "`len(dataset)`."
            )
        self.likelihood = likelihood
        self._scores = torch.full((n_data,), float("nan"))

    def update(self, indices: Tensor, logits: Tensor) -> None:
        """Keep the scores of a mini-batch.

        Args:
            indices: Positions of its data in the dataset, ``[n]``.
            logits: The network's outputs ``[n, C]``; they may require gradients.

        Raises:
            ValueError: If numbers differ, a position is outside the dataset, or an output is not
                finite.
        """
        indices = torch.as_tensor(indices).reshape(-1).cpu()
        n = len(self._scores)
        if logits.ndim != 2 or len(logits) != len(indices):
            raise ValueError(
                f"Expected logits [n, C] for {len(indices)} data, got {list(logits.shape)}. "
                "Remedy: pass one row per index."
            )
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < n:
            raise ValueError(
                f"Expected positions between 0 and {n - 1}, got {int(indices.min())} to "
                f"{int(indices.max())}. Remedy: pass positions in the whole dataset."
            )
        scores = curvature_scores(logits.detach(), self.likelihood)
        if not bool(torch.isfinite(scores).all()):
            raise ValueError(
                "Expected finite logits, got NaN or Inf. Remedy: record after the loss is checked."
            )
        self._scores[indices] = scores.float().cpu()

    @property
    def scores(self) -> Tensor:
        """Scores ``[n_data]``; data that were never recorded have the mean of the others.

        Raises:
            ValueError: If nothing was recorded.
        """
        seen = ~self._scores.isnan()
        if not bool(seen.any()):
            raise ValueError(
                "Expected recorded scores, got none. Remedy: call `update(indices, logits)` in the "
                "training loop first."
            )
        return torch.where(seen, self._scores, self._scores[seen].mean())
