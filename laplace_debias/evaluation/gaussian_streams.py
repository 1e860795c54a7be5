"""Streams of Gaussian predictions and targets, mini-batch by mini-batch, into reports.

Predictions that are none (NaN, no variance) are refused; earlier ones stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laplace_debias.data.processes import total
from laplace_debias.evaluation.metrics import MeanOverData
from laplace_debias.evaluation.regression import with_noise
from laplace_debias.evaluation.reports import RegressionReport
from laplace_debias.evaluation.table import LEVELS, metric_table

__all__ = ["RegressionMetrics"]


class RegressionMetrics:
    r"""Accumulate Gaussian predictions and targets into a report.

    Args:
        levels: Levels of the central intervals.
        sigma_noise: Standard deviation of the observation noise, one number or one per output; 0
            if the variances contain it.

    Attributes:
        n_data: Number of predictions added.

    Raises:
        ValueError: If a level is not between 0 and 1.

    Example:
        >>> metrics = RegressionMetrics()
        >>> metrics.update(torch.zeros(2, 1), torch.ones(2, 1), torch.tensor([[0.5], [1.8]]))
        >>> metrics.compute().coverage
        {0.5: 0.5, 0.9: 0.5, 0.95: 1.0}
    """

    def __init__(self, levels: Sequence[float] = LEVELS, sigma_noise: float | Tensor = 0.0) -> None:
        """Start empty."""
        table = metric_table("regression", sigma_noise=sigma_noise, levels=levels)
        self._metrics = {name: make() for name, make in table.items()}
        self.levels, self.sigma_noise = tuple(levels), sigma_noise
        self.n_data = 0

    def update(self, mean: Tensor, variance: Tensor, targets: Tensor) -> None:
        """Add predictions.

        Args:
            mean: Predictive means, ``[N, D]``.
            variance: Predictive variances ``[N, D]`` or covariances ``[N, D, D]``.
            targets: ``[N, D]``.

        Raises:
            ValueError: If shapes differ, a value is not finite or a variance with observation
                noise not positive. Nothing was added then.
        """
        if mean.ndim != 2 or targets.shape != mean.shape:
            raise ValueError(
                f"Expected means and targets of one shape [N, D], got {list(mean.shape)} and "
                f"{list(targets.shape)}. Remedy: `y.unsqueeze(-1)` for a single output."
            )
        if variance.shape not in (mean.shape, (*mean.shape, mean.shape[-1])):
            raise ValueError(
                f"Expected variances of shape [N, D] or covariances of shape [N, D, D] for means "
                f"of shape {list(mean.shape)}, got {list(variance.shape)}. Remedy: "
                "`variance.unsqueeze(-1)` for a single output."
            )
        if len(mean) == 0:
            return
        mean, variance, targets = mean.detach(), variance.detach(), targets.detach().to(mean)
        covariance = with_noise(variance, self.sigma_noise)
        definite = torch.linalg.cholesky_ex(covariance).info == 0  # [N]
        for part in (mean, targets, covariance):
            definite &= torch.isfinite(part).flatten(1).all(-1)
        if not definite.all():
            raise ValueError(
                "Expected finite means, targets and positive definite covariances, got others in "
                f"{int((~definite).sum())} of {len(mean)} predictions. Remedy: check the data for "
                "NaN and Inf, and that the observation noise is positive."
            )
        if self.n_data == 0:
            for metric in self._metrics.values():
                metric.to(mean.device)
        for metric in self._metrics.values():
            metric.update(mean, variance, targets)
        self.n_data += len(mean)

    def compute(self) -> RegressionReport:
        """Return the report of everything added so far.

        Raises:
            ValueError: If nothing was added.
        """
        if total(self.n_data) == 0:
            raise ValueError(
                "Expected at least one prediction, got none. Remedy: call `update` first."
            )
        values = {name: metric.compute().item() for name, metric in self._metrics.items()}
        nll = self._metrics["nll"]
        assert isinstance(nll, MeanOverData)
        return RegressionReport(
            n_data=nll.n_data,
            **{name: values[name] for name in ("nll", "crps", "rmse", "sharpness")},
            coverage={level: values[f"coverage_{100 * level:g}"] for level in self.levels},
        )
