r"""Calibration errors beside the usual one: bins of equal mass, and every class by itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torchmetrics import Metric

from laplace_debias.evaluation.metrics import ECE
from laplace_debias.evaluation.reports import adaptive_bins

__all__ = ["AdaptiveECE", "ClasswiseECE"]


class AdaptiveECE(ECE):
    r"""Calibration error of the most probable class over bins of equal mass.

    :math:`\sum_b \frac{n_b}{n} |\mathrm{acc}_b - \mathrm{conf}_b|` with as many data in each bin.
    Bins of equal width put nearly all data of a confident network into the last one, where
    errors of both signs cancel.

    Args:
        n_bins: Number of bins.

    Example:
        >>> metric = AdaptiveECE(2)
        >>> log_probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]]).log()
        >>> metric.update(log_probs, torch.tensor([0, 0, 1, 0]))
        >>> round(metric.compute().item(), 4)  # (|1 - 0.85| + |0.5 - 0.65|) / 2
        0.15
    """

    def compute(self) -> Tensor:
        """Return the calibration error of all data added so far."""
        confidences, correct = self.top_label()
        if confidences.isnan().any():
            return torch.tensor(math.nan)
        return torch.tensor(adaptive_bins(confidences, correct, self.n_bins).calibration_error)


class ClasswiseECE(Metric):
    r"""Calibration error of every class's probability, averaged over classes.

    :math:`\frac1C \sum_c \sum_b \frac1n \bigl| \sum_{i \in b(c)} (1[y_i = c] - p_{ic}) \bigr|` over
    bins of equal width in :math:`p_{ic}`; with one class against the rest the same as
    torchmetrics' ``BinaryCalibrationError``. Unlike the ECE it sees the probabilities of classes
    that are not the most probable. Only the sums are kept.

    Args:
        n_bins: Number of bins.

    Raises:
        ValueError: If it is not positive.

    Example:
        >>> metric = ClasswiseECE()
        >>> metric.update(torch.tensor([[0.75, 0.25], [0.75, 0.25]]).log(), torch.tensor([0, 0]))
        >>> round(metric.compute().item(), 4)
        0.25
    """

    full_state_update = False
    higher_is_better = False
    gaps: Tensor
    count: Tensor

    def __init__(self, n_bins: int = 15) -> None:
        """Start from no data; the number of classes is learnt from the first."""
        super().__init__()
        if n_bins < 1:
            raise ValueError(f"Expected n_bins >= 1, got {n_bins}. Remedy: the paper's is 15.")
        self.n_bins = n_bins
        empty = torch.zeros(0, dtype=torch.float64)
        self.add_state("gaps", empty, dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, log_probs: Tensor, labels: Tensor) -> None:
        """Add data: ``log_probs [n, C]``, ``labels [n]`` or ``[n, C]``."""
        C = log_probs.shape[-1]
        soft = labels.is_floating_point()
        target = labels if soft else one_hot(labels, C)  # [n, C]
        probs = log_probs.exp().clamp(max=1)
        # a bin of its own for exactly 1, as torchmetrics has it
        bins = (probs.float() * self.n_bins).floor().nan_to_num().long()
        if self.gaps.numel() == 0:
            self.gaps = self.gaps.new_zeros(self.n_bins + 1, C)
        self.gaps = self.gaps.scatter_add(0, bins, target.double() - probs.double())
        self.count += len(probs)

    def compute(self) -> Tensor:
        """Return the calibration error of all data added so far."""
        return self.gaps.abs().sum() / (self.count * self.gaps.shape[-1])
