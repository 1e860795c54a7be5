"""What an evaluation found: frozen results that become a dict, JSON, CSV or a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from laplace_debias.storage.export import ExportedResult

__all__ = [
    "CalibrationReport",
    "ClassificationReport",
    "OODReport",
    "RegressionReport",
    "ReliabilityBins",
    "adaptive_bins",
    "equal_width_bins",
]


@dataclass(frozen=True)
class ReliabilityBins:
    r"""Predictions grouped by confidence: the content of a reliability diagram.

    Attributes:
        lower: Smallest confidence that belongs to each bin.
        upper: Upper edge of each bin.
        confidence: Mean confidence in each bin (0 if it is empty).
        accuracy: Share of correct predictions in each bin (0 if it is empty).
        count: Number of predictions in each bin.
    """

    lower: tuple[float, ...]
    upper: tuple[float, ...]
    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    count: tuple[int, ...]

    def __len__(self) -> int:
        """Return the number of bins, empty ones included."""
        return len(self.count)

    @property
    def calibration_error(self) -> float:
        r"""The bins' :math:`\sum_b \frac{n_b}{n} |\mathrm{acc}_b - \mathrm{conf}_b|`.

        Example:
            >>> bins = ReliabilityBins((0.0, 0.5), (0.5, 1.0), (0.4, 0.9), (0.4, 0.7), (1, 3))
            >>> round(bins.calibration_error, 6)
            0.15
        """
        n = sum(self.count)
        terms = zip(self.count, self.accuracy, self.confidence, strict=True)
        return sum(count * abs(acc - conf) for count, acc, conf in terms) / n if n else 0.0


def equal_width_bins(confidences: Tensor, correct: Tensor, n_bins: int = 15) -> ReliabilityBins:
    """Group predictions into bins of equal width, exactly as torchmetrics' calibration error does.

    Bin b holds the confidences in ``[b / n_bins, (b + 1) / n_bins)``. torchmetrics puts confidences
    that are exactly 1 into a bin of their own; so does this function, as bin ``n_bins``, if there
    are any. Hence ``ReliabilityBins.calibration_error`` equals the ECE.

    Args:
        confidences: Largest class probability of each prediction, ``[N]``, in [0, 1].
        correct: Whether each prediction is right, ``[N]``, boolean or 0/1.
        n_bins: Number of bins.

    Returns:
        ``n_bins`` bins, or one more if some confidences are exactly 1.

    Example:
        >>> bins = equal_width_bins(torch.tensor([0.6, 0.9, 1.0]), torch.tensor([1, 0, 1]), 2)
        >>> bins.count, bins.accuracy
        ((0, 2, 1), (0.0, 0.5, 1.0))
    """
    edges = torch.linspace(0, 1, n_bins + 1, dtype=confidences.dtype, device=confidences.device)
    index = torch.bucketize(confidences, edges, right=True) - 1  # [N], n_bins for exactly 1
    groups = [(confidences[index == b], correct[index == b]) for b in range(n_bins + 1)]
    lower, upper = edges.tolist(), [*edges[1:].tolist(), 1.0]
    if len(groups[-1][0]) == 0:
        groups, lower, upper = groups[:-1], lower[:-1], upper[:-1]
    return _summarise(groups, lower, upper)


def adaptive_bins(confidences: Tensor, correct: Tensor, n_bins: int = 15) -> ReliabilityBins:
    """Group predictions into bins of equal mass: sizes differ by one at most.

    A confident network leaves most equal-width bins empty; these bins show where its predictions
    are. With fewer predictions than bins every prediction gets its own bin.

    Args:
        confidences: Largest class probability of each prediction, ``[N]``.
        correct: Whether each prediction is right, ``[N]``, boolean or 0/1.
        n_bins: Number of bins.

    Example:
        >>> bins = adaptive_bins(torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([1, 1, 0, 1]), 2)
        >>> bins.count, bins.accuracy
        ((2, 2), (0.5, 1.0))
    """
    ordered, order = confidences.sort(stable=True)
    n_bins = min(n_bins, len(ordered))
    groups = list(
        zip(ordered.tensor_split(n_bins), correct[order].tensor_split(n_bins), strict=True)
    )
    lower = [group.min().item() for group, _ in groups]
    upper = [group.max().item() for group, _ in groups]
    return _summarise(groups, lower, upper)


def _summarise(
    groups: list[tuple[Tensor, Tensor]], lower: list[float], upper: list[float]
) -> ReliabilityBins:
    """Mean confidence, accuracy and count of each group."""

    def mean(values: Tensor) -> float:
        return values.double().mean().item() if len(values) else 0.0

    return ReliabilityBins(
        lower=tuple(lower),
        upper=tuple(upper),
        confidence=tuple(mean(confidences) for confidences, _ in groups),
        accuracy=tuple(mean(correct) for _, correct in groups),
        count=tuple(len(confidences) for confidences, _ in groups),
    )


@dataclass(frozen=True)
class CalibrationReport(ExportedResult):
    """What every report has.

    Attributes:
        n_data: Number of predictions evaluated.
    """

    n_data: int

    def scalars(self) -> dict[str, float]:
        """Return the numbers of the report by name, without bins.

        Example:
            >>> RegressionReport(2, 1.0, 0.3, 0.5, 0.4, {0.9: 1.0}).scalars()
            {'n_data': 2, 'nll': 1.0, 'crps': 0.3, 'rmse': 0.5, 'sharpness': 0.4, ...}
        """
        numbers: dict[str, float] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)):
                numbers[field.name] = value
            elif isinstance(value, Mapping):
                numbers |= {f"{field.name}_{100 * key:g}": value[key] for key in value}
            elif isinstance(value, OODReport):
                numbers |= {f"ood_{name}": number for name, number in asdict(value).items()}
        return numbers

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dictionaries, lists and numbers."""
        return asdict(self)

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """Return the names of :meth:`scalars`, and their values as the only row."""
        numbers = self.scalars()
        return list(numbers), [list(numbers.values())]

    def table(self) -> str:
        """Return one line per number, aligned.

        Example:
            >>> print(RegressionReport(2, 1.0, 0.3, 0.5, 0.4, {0.9: 1.0}).table())
            n_data       2
            nll          1.0000
            crps         0.3000
            rmse         0.5000
            sharpness    0.4000
            coverage_90  1.0000
        """
        numbers = self.scalars()
        width = max(map(len, numbers)) + 2
        texts = {k: f"{v:d}" if isinstance(v, int) else f"{v:.4f}" for k, v in numbers.items()}
        return "\n".join(f"{name:<{width}}{text}" for name, text in texts.items())

    def __str__(self) -> str:
        """Return the table."""
        return self.table()


@dataclass(frozen=True)
class OODReport:
    """How well predictive entropy tells in-distribution from out-of-distribution inputs.

    Attributes:
        auroc: Area under the ROC curve of "entropy is high" as a detector of OOD inputs.
        fpr95: Share of OOD inputs that pass where 95 % of the in-distribution inputs do.
        mean_entropy: Mean predictive entropy on the OOD inputs, in nats.
        n_data: Number of OOD predictions.
    """

    auroc: float
    fpr95: float
    mean_entropy: float
    n_data: int


@dataclass(frozen=True)
class ClassificationReport(CalibrationReport):
    """Quality of class probabilities p, against labels y.

    Attributes:
        n_data: Number of predictions evaluated.
        accuracy: Share of predictions whose most probable class is the label.
        nll: Mean of -log p_y, in nats; infinite if a log p_y is.
        ece: Expected calibration error: torchmetrics' ``MulticlassCalibrationError`` with 15 bins
            and the L1 norm (other bin counts on request).
        adaptive_ece: The same with bins of equal mass.
        classwise_ece: The same of every class's probability, averaged over classes.
        brier: Mean of the sum over classes of (p_c - 1[c = y])^2, between 0 and 2.
        aurc: Area under the risk-coverage curve, of answering the most confident data only.
        mean_entropy: Mean predictive entropy, in nats.
        bins: Equal-width reliability bins; their ``calibration_error`` is the ECE.
        adaptive_bins: Equal-mass reliability bins; their ``calibration_error`` is the adaptive ECE.
        ood: Detection of out-of-distribution inputs, if there were any.
    """

    accuracy: float
    nll: float
    ece: float
    adaptive_ece: float
    classwise_ece: float
    brier: float
    aurc: float
    mean_entropy: float
    bins: ReliabilityBins
    adaptive_bins: ReliabilityBins
    ood: OODReport | None = None


@dataclass(frozen=True)
class RegressionReport(CalibrationReport):
    """Quality of Gaussian predictions.

    Attributes:
        n_data: Number of predictions evaluated.
        nll: Mean negative log density of the targets, jointly over outputs, in nats.
        crps: Mean continuous ranked probability score over data and outputs.
        rmse: Root mean squared error over data and outputs.
        sharpness: Mean predictive standard deviation over data and outputs.
        coverage: For each central interval (0.5, 0.9, 0.95) the share of targets inside it, over
            data and outputs; calibrated predictions cover as much as the interval promises.
    """

    nll: float
    crps: float
    rmse: float
    sharpness: float
    coverage: dict[float, float]
