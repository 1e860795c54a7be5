"""Streams of Gaussian predictions and targets into reports, by torchmetrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor
from torchmetrics import MeanSquaredError

from laplace_debias.evaluation.metrics import mean_metric
from laplace_debias.evaluation.reports import RegressionReport

__all__ = ["RegressionMetrics"]


class RegressionMetrics:
    r"""Accumulate Gaussian predictions :math:`N(\mu, \Sigma)` and targets into a report.

    The NLL of a datum with D outputs is
    :math:`\frac12 (y - \mu)^T \Sigma^{-1} (y - \mu) + \frac12 \log\det \Sigma
    + \frac D2 \log 2\pi`; an interval of level q is :math:`\mu_d \pm z_q \sqrt{\Sigma_{dd}}`.

    Args:
        levels: Levels of the central intervals.

    Example:
        >>> metrics = RegressionMetrics()
        >>> metrics.update(torch.zeros(2, 1), torch.ones(2, 1), torch.tensor([[0.5], [1.8]]))
        >>> metrics.compute().coverage
        {0.5: 0.5, 0.9: 0.5, 0.95: 1.0}
    """

    def __init__(self, levels: Sequence[float] = (0.5, 0.9, 0.95)) -> None:
        """Start empty."""
        for level in levels:
            if not 0 < level < 1:
                raise ValueError(f"Expected levels between 0 and 1, got {level}. Remedy: 0.9.")
        self.levels = tuple(levels)
        self.n_data = 0

    def update(self, mean: Tensor, variance: Tensor, targets: Tensor) -> None:
        """Add predictions.

        Args:
            mean: Predictive means, ``[N, D]``.
            variance: Predictive variances ``[N, D]`` or covariances ``[N, D, D]``, observation
                noise included.
            targets: ``[N, D]``.

        Raises:
            ValueError: If shapes differ, a value is not finite or a variance not positive.
        """
        if mean.ndim != 2 or targets.shape != mean.shape:
            raise ValueError(
                f"Expected means and targets of one shape [N, D], got {list(mean.shape)} and "
                f"{list(targets.shape)}. Remedy: `y.unsqueeze(-1)` for a single output."
            )
        mean, variance = mean.detach(), variance.detach()
        targets = targets.to(mean)
        covariance = variance if variance.ndim == 3 else torch.diag_embed(variance)  # [N, D, D]
        if covariance.shape != (*mean.shape, mean.shape[-1]):
            raise ValueError(
                f"Expected variances of shape [N, D] or covariances of shape [N, D, D] for means "
                f"of shape {list(mean.shape)}, got {list(variance.shape)}."
            )
        if len(mean) == 0:
            return
        L, info = torch.linalg.cholesky_ex(covariance)
        finite = all(torch.isfinite(t).all() for t in (mean, targets, covariance))
        if not finite or info.any():
            raise ValueError(
                "Expected finite means, targets and positive definite covariances, got "
                f"{int((info > 0).sum())} of {len(mean)} covariances that are not, or NaN or Inf. "
                "Remedy: check the data, and that the observation noise is positive."
            )
        residual = targets - mean  # [N, D]
        white = torch.linalg.solve_triangular(L, residual.unsqueeze(-1), upper=False).squeeze(-1)
        log_det = 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)  # [N]
        nll = 0.5 * (white.square().sum(-1) + log_det + mean.shape[-1] * math.log(2 * math.pi))
        scores = residual.abs() / covariance.diagonal(dim1=-2, dim2=-1).sqrt()  # [N, D]
        if self.n_data == 0:
            self._nll = mean_metric(mean.device)
            self._rmse = MeanSquaredError(squared=False).to(mean.device).set_dtype(torch.float64)
            self._coverage = {level: mean_metric(mean.device) for level in self.levels}
        self._nll.update(nll)
        self._rmse.update(mean.flatten().double(), targets.flatten().double())
        for level, metric in self._coverage.items():
            z = NormalDist().inv_cdf(0.5 + level / 2)
            metric.update((scores <= z).double())
        self.n_data += len(mean)

    def compute(self) -> RegressionReport:
        """Return the report of everything added so far.

        Raises:
            ValueError: If nothing was added.
        """
        if self.n_data == 0:
            raise ValueError(
                "Expected at least one prediction, got none. Remedy: call `update` first."
            )
        coverage = {level: metric.compute().item() for level, metric in self._coverage.items()}
        nll, rmse = self._nll.compute().item(), self._rmse.compute().item()
        return RegressionReport(n_data=self.n_data, nll=nll, rmse=rmse, coverage=coverage)
