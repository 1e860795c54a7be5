"""The metrics known by name, for sweeps, grid searches, evaluations and comparisons alike.

All of them, and whatever a user passes in their place, are updated with a prediction and targets:
``(log-probabilities [n, C], labels [n])`` for classification, ``(mean [n, D], (co)variance, targets
[n, D])`` for regression.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torchmetrics import Metric

from laplace_debias.evaluation.calibration import AdaptiveECE, ClasswiseECE
from laplace_debias.evaluation.metrics import ECE, NLL, Accuracy, Brier, MeanEntropy
from laplace_debias.evaluation.regression import CRPS, MSE, RMSE, Coverage, GaussianNLL, Sharpness
from laplace_debias.evaluation.selective import AURC
from laplace_debias.network.loss import Likelihood

__all__ = ["LEVELS", "Metrics", "UserMetric", "fresh_metrics", "metric_table"]

Metrics = Sequence[str] | Mapping[str, Metric]
LEVELS = (0.5, 0.9, 0.95)
"""Levels of the central intervals whose coverage is measured."""


def metric_table(
    likelihood: Likelihood,
    *,
    n_bins: int = 15,
    sigma_noise: float | Tensor = 0.0,
    levels: Sequence[float] = LEVELS,
) -> dict[str, Callable[[], Metric]]:
    """Return what makes each metric of a likelihood, by name.

    Args:
        likelihood: ``"classification"`` or ``"regression"``.
        n_bins: Number of bins of all kinds of ECE.
        sigma_noise: Standard deviation of a regression's observation noise.
        levels: Levels of a regression's central intervals.

    Returns:
        Constructors of metrics without data.

    Example:
        >>> list(metric_table("classification"))
        ['accuracy', 'nll', 'ece', 'adaptive_ece', 'classwise_ece', 'brier', 'aurc', 'mean_entropy']
        >>> list(metric_table("regression"))
        ['nll', 'crps', 'rmse', 'mse', 'sharpness', 'coverage_50', 'coverage_90', 'coverage_95']
    """
    if likelihood != "regression":
        return {
            "accuracy": Accuracy,
            "nll": NLL,
            "ece": partial(ECE, n_bins),
            "adaptive_ece": partial(AdaptiveECE, n_bins),
            "classwise_ece": partial(ClasswiseECE, n_bins),
            "brier": Brier,
            "aurc": AURC,
            "mean_entropy": MeanEntropy,
        }
    return {
        "nll": partial(GaussianNLL, sigma_noise),
        "crps": partial(CRPS, sigma_noise),
        "rmse": partial(RMSE, sigma_noise),
        "mse": partial(MSE, sigma_noise),
        "sharpness": partial(Sharpness, sigma_noise),
        **{f"coverage_{100 * q:g}": partial(Coverage, q, sigma_noise) for q in levels},
    }


def fresh_metrics(
    metrics: Metrics,
    k: int,
    likelihood: Likelihood,
    *,
    sigma_noise: float | Tensor = 0.0,
    device: torch.device | None = None,
) -> dict[str, list[Metric]]:
    """Return k fresh copies of every metric.

    Args:
        metrics: Names of the table, or a mapping of names to metrics of one's own.
        k: Number of copies.
        likelihood: ``"classification"`` or ``"regression"``.
        sigma_noise: Standard deviation of a regression's observation noise.
        device: Device of the predictions.

    Returns:
        By name, k metrics to be updated with ``(*prediction, targets)``.

    Raises:
        ValueError: For an unknown name, no metric at all, or something that is not a metric.

    Example:
        >>> fresh_metrics(["nll"], 2, "classification")
        {'nll': [NLL(), NLL()]}
    """
    table = metric_table(likelihood, sigma_noise=sigma_noise)
    if isinstance(metrics, str):
        metrics = [metrics]
    if not metrics:
        raise ValueError(
            f"Expected at least one metric, got none. Remedy: choose among {sorted(table)}."
        )
    fresh: dict[str, list[Metric]] = {}
    for name in metrics:
        if isinstance(metrics, Mapping):
            given = metrics[name]
            if not isinstance(given, Metric):
                raise ValueError(
                    f"Expected a torchmetrics.Metric for {name!r}, got {type(given).__name__}. "
                    "Remedy: wrap the function in a torchmetrics.Metric."
                )
            make: Callable[[], Metric] = partial(UserMetric, given)
        elif name in table:
            make = table[name]
        else:
            raise ValueError(
                f"Expected metrics among {sorted(table)} for {likelihood}, got {name!r}. Remedy: "
                "pass a mapping of names to torchmetrics.Metric for your own."
            )
        fresh[name] = [make().to(device) for _ in range(k)]
    return fresh


class UserMetric(Metric):
    """A metric from outside behind the table's interface; NaN where a prediction holds one.

    Classification metrics are handed probabilities ``[n, C]`` and labels; regression metrics the
    mean ``[n, D]``, the covariance of the functions and the targets or, if their ``update`` takes
    two arguments, the mean and the targets.

    Args:
        metric: A metric; a copy of it without data is used.

    Example:
        >>> from torchmetrics.classification import MulticlassAccuracy
        >>> metric = UserMetric(MulticlassAccuracy(2, average="micro"))
        >>> metric.update(torch.tensor([[0.9, 0.1]]).log(), torch.tensor([0]))
        >>> metric.compute().item()
        1.0
    """

    full_state_update = False
    n_nan: Tensor

    def __init__(self, metric: Metric) -> None:
        """Start from no data."""
        super().__init__()
        self.metric = metric.clone()
        self.metric.reset()
        self.add_state("n_nan", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, *arguments: Tensor) -> None:
        """Add data: a prediction and targets."""
        *prediction, targets = arguments
        if any(part.isnan().any() for part in prediction):
            self.n_nan += 1
            return
        if len(prediction) == 1:
            prediction = [prediction[0].exp()]
        elif not _takes_covariance(self.metric):
            prediction = prediction[:1]
        self.metric.update(*prediction, targets)

    def compute(self) -> Tensor:
        """Return the metric of all data added so far."""
        if self.n_nan > 0:
            return torch.tensor(math.nan)
        return torch.as_tensor(self.metric.compute())

    @property  # torchmetrics refuses to set it on an instance
    def higher_is_better(self) -> bool:  # type: ignore[override]
        """Direction of the metric; small is better if it does not say."""
        return bool(self.metric.higher_is_better)

    def reset(self) -> None:
        """Forget all data."""
        super().reset()
        self.metric.reset()


def _takes_covariance(metric: Metric) -> bool:
    """Say whether a regression metric's ``update`` takes ``(mean, covariance, targets)``."""
    parameters = inspect.signature(metric.update).parameters.values()
    positional = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    return len(positional) >= 3 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
