"""Streams of class probabilities and labels into reports, by torchmetrics.

Conventions: probabilities ``[N, C]`` (or ``[..., C]``, flattened), labels ``[N]`` from 0 to C - 1.
Entropies and log-probabilities are in nats. A probability of 0 counts as the dtype's smallest
normal number in logarithms, so that the NLL stays finite.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.aggregation import CatMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.utilities import dim_zero_cat

from laplace_debias.evaluation.reports import (
    ClassificationReport,
    OODReport,
    adaptive_bins,
    equal_width_bins,
)

__all__ = ["CalibrationMetrics", "entropy_auroc", "mean_metric", "predictive_entropy"]


def predictive_entropy(probs: Tensor) -> Tensor:
    r"""Entropy :math:`-\sum_c p_c \log p_c` of class probabilities.

    Args:
        probs: ``[..., C]``.

    Returns:
        Entropies in nats, ``[...]``.

    Example:
        >>> predictive_entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        tensor([0.6931, 0.0000])
    """
    return torch.special.entr(probs).sum(-1)


def entropy_auroc(id_entropies: Tensor, ood_entropies: Tensor) -> float:
    """Area under the ROC curve of telling OOD from in-distribution inputs by their entropies.

    The probability that a random OOD input has the larger entropy, ties counting one half.

    Args:
        id_entropies: Predictive entropies of in-distribution inputs, ``[N]``.
        ood_entropies: Predictive entropies of out-of-distribution inputs, ``[M]``.

    Example:
        >>> entropy_auroc(torch.tensor([0.1, 0.4]), torch.tensor([0.3, 2.0]))
        0.75
    """
    entropies = torch.cat([id_entropies, ood_entropies])
    is_ood = torch.zeros(len(entropies), dtype=torch.long, device=entropies.device)
    is_ood[len(id_entropies) :] = 1
    # torchmetrics squashes scores outside [0, 1] by a sigmoid, in which small ones become ties
    scores = entropies / entropies.max().clamp_min(1)
    return binary_auroc(scores.clamp_min(0), is_ood, thresholds=None, validate_args=False).item()


def _check_probs(probs: Tensor) -> Tensor:
    """Flatten to ``[N, C]``; raise unless every row is a probability vector.

    Values are clamped to [0, 1]: torchmetrics takes anything outside, be it by rounding, for
    logits and applies a softmax.
    """
    if probs.ndim < 2 or probs.shape[-1] < 2 or not probs.is_floating_point():
        raise ValueError(
            "Expected floating-point class probabilities of shape [N, C] with C >= 2, got "
            f"{probs.dtype} of shape {list(probs.shape)}. Remedy: for one logit per datum pass "
            "`torch.stack([1 - p, p], -1)` with p its sigmoid."
        )
    probs = probs.detach().flatten(0, -2)
    slack = max(1e-4, torch.finfo(probs.dtype).eps ** 0.5)
    if not torch.isfinite(probs).all():
        bad = int((~torch.isfinite(probs)).any(-1).sum())
        raise ValueError(
            f"Expected finite probabilities, got NaN or Inf in {bad} of {len(probs)} rows. "
            "Remedy: check the inputs, and the prior precision of a Laplace approximation."
        )
    low, high = (probs.min().item(), probs.max().item()) if len(probs) else (0.0, 1.0)
    sums = probs.sum(-1)
    worst = (sums - 1).abs().max().item() if len(probs) else 0.0
    if low < -slack or high > 1 + slack or worst > slack:
        raise ValueError(
            f"Expected probabilities in [0, 1] that sum to one, got values in [{low:.4g}, "
            f"{high:.4g}] and a row sum off by {worst:.4g}. Remedy: pass `logits.softmax(-1)` "
            "if these are logits, `log_probs.exp()` if they are log-probabilities."
        )
    return probs.clamp(0, 1)


def _check_labels(labels: Tensor, probs: Tensor) -> Tensor:
    """Flatten to ``[N]``; raise unless they are class indices that fit the probabilities."""
    n, C = probs.shape
    if labels.is_floating_point() or labels.is_complex() or labels.numel() != n:
        raise ValueError(
            f"Expected {n} class indices of an integer dtype, one per row of probabilities, got "
            f"{labels.dtype} of shape {list(labels.shape)}. Remedy: `y.argmax(-1)` for one-hot "
            'targets; for a regression pass `likelihood="regression"`.'
        )
    labels = labels.detach().flatten().long()
    low, high = (labels.min().item(), labels.max().item()) if n else (0, 0)
    if low < 0 or high >= C:
        raise ValueError(
            f"Expected labels in [0, {C - 1}] for {C} classes, got values in [{low}, {high}]. "
            "Remedy: re-index the classes from 0, or check that data and model belong together."
        )
    return labels


class CalibrationMetrics:
    """Accumulate class probabilities and labels, mini-batch by mini-batch, into a report.

    Accuracy, NLL and Brier score are running sums; ECE, bins and AUROC need the confidence and the
    entropy of every datum and keep no more than that.

    Args:
        n_bins: Number of bins of the ECE and of both kinds of reliability bins.

    Example:
        >>> metrics = CalibrationMetrics()
        >>> metrics.update(torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([0, 0]))
        >>> report = metrics.compute()
        >>> report.accuracy, round(report.brier, 4), round(report.ece, 4)
        (1.0, 0.3125, 0.375)
    """

    def __init__(self, n_bins: int = 15) -> None:
        """Start empty; the number of classes is learnt from the first mini-batch."""
        if n_bins < 1:
            raise ValueError(f"Expected n_bins >= 1, got {n_bins}. Remedy: the paper's is 15.")
        self.n_bins = n_bins
        self.num_classes: int | None = None
        self.n_data = self.n_ood = 0

    def _start(self, probs: Tensor) -> None:
        """Build the metrics once the number of classes and the device are known."""
        C, device = probs.shape[-1], probs.device
        if self.num_classes is None:
            self.num_classes = C
            self._accuracy = MulticlassAccuracy(C, average="micro", validate_args=False).to(device)
            self._ece = MulticlassCalibrationError(
                C, n_bins=self.n_bins, norm="l1", validate_args=False
            ).to(device)
            self._nll, self._brier = mean_metric(device), mean_metric(device)
            self._entropies, self._ood_entropies = (
                CatMetric(nan_strategy="error").to(device).set_dtype(probs.dtype) for _ in range(2)
            )
        elif C != self.num_classes:
            raise ValueError(
                f"Expected probabilities of {self.num_classes} classes as before, got {C}. "
                "Remedy: use one `CalibrationMetrics` per model."
            )

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add in-distribution predictions.

        Args:
            probs: Class probabilities, ``[N, C]``.
            labels: Class indices, ``[N]``.

        Raises:
            ValueError: If they are not probabilities and labels. Nothing was added then.
        """
        probs = _check_probs(probs)  # [N, C]
        labels = _check_labels(labels.to(probs.device), probs)  # [N]
        if len(probs) == 0:
            return
        self._start(probs)
        self._accuracy.update(probs, labels)
        self._ece.update(probs, labels)
        p_y = probs.gather(-1, labels[:, None]).squeeze(-1)  # [N]
        self._nll.update(-p_y.clamp_min(torch.finfo(probs.dtype).tiny).log())
        one_hot = torch.nn.functional.one_hot(labels, self.num_classes)
        self._brier.update((probs - one_hot).square().sum(-1))
        self._entropies.update(predictive_entropy(probs))
        self.n_data += len(probs)

    def update_ood(self, probs: Tensor) -> None:
        """Add out-of-distribution predictions, whose labels do not matter.

        Args:
            probs: Class probabilities, ``[N, C]``.

        Raises:
            ValueError: If they are not probabilities. Nothing was added then.
        """
        probs = _check_probs(probs)
        if len(probs) == 0:
            return
        self._start(probs)
        self._ood_entropies.update(predictive_entropy(probs))
        self.n_ood += len(probs)

    @property
    def entropies(self) -> Tensor:
        """Predictive entropies of the in-distribution data added so far, ``[n_data]``, in nats."""
        return self._entropies.compute().reshape(-1) if self.n_data else torch.empty(0)

    @property
    def ood_entropies(self) -> Tensor:
        """Predictive entropies of the OOD data added so far, ``[n_ood]``, in nats."""
        return self._ood_entropies.compute().reshape(-1) if self.n_ood else torch.empty(0)

    def compute(self) -> ClassificationReport:
        """Return the report of everything added so far.

        Raises:
            ValueError: If no in-distribution prediction was added.
        """
        if self.n_data == 0:
            raise ValueError(
                "Expected at least one in-distribution prediction, got none. Remedy: call "
                "`update(probs, labels)` first."
            )
        # the very numbers that the ECE is computed from
        confidences = dim_zero_cat(self._ece.confidences)
        correct = dim_zero_cat(self._ece.accuracies)
        ood = None
        if self.n_ood:
            auroc = entropy_auroc(self.entropies, self.ood_entropies)
            ood = OODReport(auroc, self.ood_entropies.double().mean().item(), self.n_ood)
        return ClassificationReport(
            n_data=self.n_data,
            accuracy=self._accuracy.compute().item(),
            nll=self._nll.compute().item(),
            ece=self._ece.compute().item(),
            brier=self._brier.compute().item(),
            mean_entropy=self.entropies.double().mean().item(),
            bins=equal_width_bins(confidences, correct, self.n_bins),
            adaptive_bins=adaptive_bins(confidences, correct, self.n_bins),
            ood=ood,
        )


def mean_metric(device: torch.device) -> MeanMetric:
    """A running mean in double precision that refuses NaN."""
    return MeanMetric(nan_strategy="error").to(device).set_dtype(torch.float64)
