"""Streams of class predictions and labels, mini-batch by mini-batch, into reports.

Predictions that are none (NaN, no distribution) are refused; earlier ones stay.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.aggregation import CatMetric

from laplace_debias.data.processes import processes, total
from laplace_debias.data.targets import IGNORED, check_targets
from laplace_debias.evaluation.metrics import (
    ECE,
    entropy_auroc,
    entropy_fpr95,
    predictive_entropy,
)
from laplace_debias.evaluation.predictors import counted_rows
from laplace_debias.evaluation.reports import (
    ClassificationReport,
    OODReport,
    adaptive_bins,
    equal_width_bins,
)
from laplace_debias.evaluation.table import metric_table

__all__ = ["CalibrationMetrics"]


def _check_form(values: Tensor) -> None:
    """Raise unless values have the form of class predictions, without NaN."""
    if values.ndim < 2 or values.shape[-1] < 2 or not values.is_floating_point():
        raise ValueError(
            "Expected floating-point class predictions of shape [N, C] with C >= 2, got "
            f"{values.dtype}, {list(values.shape)}. Remedy: `logsigmoid(torch.stack([-f, f], -1))`."
        )
    if values.isnan().any():
        rows = values.isnan().flatten(0, -2).any(-1)
        raise ValueError(
            f"Expected predictions without NaN, got some in {int(rows.sum())} of {len(rows)} rows. "
            "Remedy: check the inputs, the model's outputs, and the prior precision of a posterior."
        )


class CalibrationMetrics:
    """Accumulate class predictions and labels into a report.

    Accuracy, NLL and Brier score are running sums; ECE, bins and AUROC need the confidence and the
    entropy of every datum and keep no more than that.

    Args:
        n_bins: Number of bins of the ECE and of both kinds of reliability bins.
        ignore_index: The label of positions (tokens, pixels) that do not count.

    Attributes:
        n_data: Number of in-distribution predictions added, each position one.
        n_ood: Number of out-of-distribution predictions added.
        n_classes: Number of classes, ``None`` before the first prediction.

    Raises:
        ValueError: If ``n_bins`` is not positive.

    Example:
        >>> metrics = CalibrationMetrics()
        >>> metrics.update(torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log(), torch.tensor([0, 0]))
        >>> report = metrics.compute()
        >>> report.accuracy, round(report.brier, 4), round(report.ece, 4)
        (1.0, 0.3125, 0.375)
    """

    def __init__(self, n_bins: int = 15, ignore_index: int = IGNORED) -> None:
        """Start empty; the number of classes is learnt from the first mini-batch."""
        table = metric_table("classification", n_bins=n_bins)
        self._metrics: dict[str, Metric] = {name: make() for name, make in table.items()}
        self._entropies, self._ood_entropies = (CatMetric(nan_strategy="error") for _ in range(2))
        self.n_bins, self.ignore_index = n_bins, ignore_index
        self.n_classes: int | None = None
        self.n_data = self.n_ood = 0

    def update(self, log_probs: Tensor, labels: Tensor) -> None:
        """Add in-distribution predictions.

        Args:
            log_probs: Log-probabilities of the classes, ``[N, C]`` or ``[N, ..., C]``.
            labels: Class indices ``[N]`` or ``[N, ...]``, or class probabilities of the shape of
                ``log_probs``.

        Raises:
            ValueError: If they are not log-probabilities and labels. Nothing was added then.
        """
        checked = self._checked(log_probs)  # [n, C]
        if len(labels) != len(log_probs):
            raise ValueError(
                f"Expected {len(log_probs)} labels, one per prediction, got {len(labels)}. Remedy: "
                "check that inputs and labels belong together."
            )
        if len(checked) == 0:
            return
        check_targets(labels, log_probs.shape, "classification", self.ignore_index)
        checked, labels = counted_rows(
            checked.view(log_probs.shape), labels.detach(), self.ignore_index
        )
        if len(labels) == 0:
            return
        self._start(checked)
        for metric in self._metrics.values():
            metric.update(checked, labels)
        self._entropies.update(predictive_entropy(checked))
        self.n_data += len(checked)

    def update_ood(self, log_probs: Tensor, labels: Tensor | None = None) -> None:
        """Add out-of-distribution predictions, whose labels do not matter.

        Args:
            log_probs: Log-probabilities of the classes, ``[N, C]`` or ``[N, ..., C]``.
            labels: Class indices ``[N, ...]``, if any: they tell positions that do not count.

        Raises:
            ValueError: If they are not log-probabilities. Nothing was added then.
        """
        checked = self._checked(log_probs)
        if labels is not None and log_probs.ndim > 2 and labels.shape == log_probs.shape[:-1]:
            checked, _ = counted_rows(checked.view(log_probs.shape), labels, self.ignore_index)
        if len(checked) == 0:
            return
        self._start(checked)
        self._ood_entropies.update(predictive_entropy(checked))
        self.n_ood += len(checked)

    @property
    def entropies(self) -> Tensor:
        """Predictive entropies of the in-distribution data added so far, ``[n_data]``, in nats."""
        return _of_all(self._entropies)

    @property
    def ood_entropies(self) -> Tensor:
        """Predictive entropies of the OOD data added so far, ``[n_ood]``, in nats."""
        return _of_all(self._ood_entropies)

    def compute(self) -> ClassificationReport:
        """Return the report of everything added so far.

        Raises:
            ValueError: If no in-distribution prediction was added.
        """
        if total(self.n_data) == 0:
            raise ValueError(
                "Expected at least one in-distribution prediction, got none. Remedy: call "
                "`update(log_probs, labels)` first."
            )
        self._take_form()
        # the very numbers that the ECE is computed from
        ece = self._metrics["ece"]
        assert isinstance(ece, ECE)
        confidences, correct = ece.top_label()
        ood = None
        if total(self.n_ood):
            entropies = self.ood_entropies
            known = self.entropies
            auroc, fpr95 = (of(known, entropies) for of in (entropy_auroc, entropy_fpr95))
            ood = OODReport(auroc, fpr95, entropies.double().mean().item(), len(entropies))
        return ClassificationReport(
            n_data=len(confidences),
            bins=equal_width_bins(confidences, correct, self.n_bins),
            adaptive_bins=adaptive_bins(confidences, correct, self.n_bins),
            ood=ood,
            **{name: metric.compute().item() for name, metric in self._metrics.items()},
        )

    def _take_form(self) -> None:
        """Give metrics without data the form that those of other processes have."""
        group = processes()
        C = max(found or 0 for found in group.gather(self.n_classes)) if group is not None else 0
        if group is not None and self.n_data == 0:
            for metric in self._metrics.values():
                metric.update(torch.empty(0, C), torch.empty(0, dtype=torch.long))

    def _checked(self, log_probs: Tensor) -> Tensor:
        """Flatten to ``[n, C]``; raise unless every row is a vector of log-probabilities."""
        _check_form(log_probs)
        log_probs = log_probs.detach().flatten(0, -2)
        C = log_probs.shape[-1]
        if self.n_classes not in (None, C):
            raise ValueError(
                f"Expected predictions of {self.n_classes} classes as before, got {C}. "
                "Remedy: use one `CalibrationMetrics` per model."
            )
        off = log_probs.logsumexp(-1).abs().max().item() if len(log_probs) else 0.0
        if off > max(1e-4, torch.finfo(log_probs.dtype).eps ** 0.5):
            raise ValueError(
                "Expected log-probabilities, whose exponentials sum to one, got a row whose sum "
                f"has the logarithm {off:.4g} in absolute value. Remedy: pass "
                "`logits.log_softmax(-1)`, or `probs.log()`."
            )
        return log_probs.clamp(max=0)  # rounding

    def _start(self, log_probs: Tensor) -> None:
        """Follow the first prediction's device and number of classes."""
        if self.n_classes is None:
            self.n_classes = log_probs.shape[-1]
            for metric in self._metrics.values():
                metric.to(log_probs.device)
            for metric in (self._entropies, self._ood_entropies):
                metric.to(log_probs.device).set_dtype(log_probs.dtype)


def _of_all(kept: CatMetric) -> Tensor:
    """Kept numbers of all processes; torchmetrics cannot collect from one that has none."""
    own, group = torch.cat([p.reshape(-1) for p in kept.value] or [torch.empty(0)]), processes()
    return own if group is None else torch.cat(group.gather(own.cpu())).to(own.device)
