r"""Metrics of Gaussian predictions :math:`N(\mu, \Sigma + \sigma^2 I)` for D outputs.

:math:`\mu` and :math:`\Sigma` are those of the functions, as laplace-torch returns them;
:math:`\sigma` is the observation noise, which they do not contain. A NaN in a prediction, or a
covariance that is not positive definite, makes a metric NaN.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from laplace_debias.evaluation.metrics import MeanOverData

__all__ = [
    "CRPS",
    "MSE",
    "RMSE",
    "Coverage",
    "GaussianMetric",
    "GaussianNLL",
    "ScaledResiduals",
    "Sharpness",
    "gaussian_nll",
    "scaled_nll",
    "with_noise",
]


def with_noise(variance: Tensor, sigma_noise: float | Tensor) -> Tensor:
    r"""Add the variance :math:`\sigma^2` of the observation noise to (co)variances of functions.

    Args:
        variance: Variances ``[n, D]`` or covariances ``[n, D, D]``.
        sigma_noise: Standard deviation of the noise, one number or one per output ``[D]``.

    Returns:
        Covariances of the targets, ``[n, D, D]``.

    Example:
        >>> with_noise(torch.ones(1, 1), 2.0)
        tensor([[[5.]]])
    """
    covariance = torch.diag_embed(variance) if variance.ndim == 2 else variance
    sigma = torch.as_tensor(sigma_noise, dtype=covariance.dtype, device=covariance.device)
    return covariance + torch.diag(sigma.detach().square().expand(covariance.shape[-1]))


def gaussian_nll(mean: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
    r"""Negative log density :math:`-\log N(y \mid \mu, \Sigma)` of each datum.

    :math:`\frac12 (y - \mu)^\top \Sigma^{-1} (y - \mu) + \frac12 \log\det \Sigma
    + \frac D2 \log 2\pi`.

    Args:
        mean: ``[n, D]``.
        covariance: ``[n, D, D]``.
        targets: ``[n, D]``.

    Returns:
        ``[n]``, in nats; NaN where a covariance is not positive definite.

    Example:
        >>> round(gaussian_nll(torch.zeros(1, 1), torch.ones(1, 1, 1), torch.zeros(1, 1)).item(), 4)
        0.9189
    """
    L, info = torch.linalg.cholesky_ex(covariance)
    residual = (targets - mean).unsqueeze(-1)
    white = torch.linalg.solve_triangular(L, residual, upper=False).squeeze(-1)  # [n, D]
    log_det = 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)  # [n]
    nll: Tensor = 0.5 * (white.square().sum(-1) + log_det + mean.shape[-1] * math.log(2 * math.pi))
    return nll.masked_fill(info > 0, math.nan)


def scaled_nll(nll: float, square: float, n_outputs: int) -> float:
    r"""NLL after covariances were multiplied by what fits best.

    With :math:`s^2` the mean of :math:`r^\top \Sigma^{-1} r / D`, the NLL of covariances
    :math:`s^2 \Sigma` is that of :math:`\Sigma` plus :math:`\frac D2 (1 - s^2 + \log s^2)`.

    Args:
        nll: Mean NLL with covariances :math:`\Sigma`.
        square: :math:`s^2`.
        n_outputs: D.

    Example:
        >>> round(scaled_nll(1.0, 1.0, 3), 6)
        1.0
    """
    if not square > 0:
        return math.nan
    return nll + 0.5 * n_outputs * (1 - square + math.log(square))


class GaussianMetric(MeanOverData):
    """What the metrics of Gaussian predictions share.

    Args:
        sigma_noise: Standard deviation of the observation noise, one number or ``[D]``; 0 if the
            covariances contain it.
    """

    def __init__(self, sigma_noise: float | Tensor = 0.0) -> None:
        """Start from no data."""
        super().__init__()
        self.sigma_noise = sigma_noise

    def update(self, mean: Tensor, variance: Tensor, targets: Tensor) -> None:
        """Add data: ``mean [n, D]``, ``variance [n, D]`` or ``[n, D, D]``, ``targets [n, D]``."""
        covariance = with_noise(variance, self.sigma_noise)
        self.add(self.values(mean, covariance, targets.to(mean)), [mean, variance])

    def values(self, mean: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """Return one value per datum, ``[n]``."""
        raise NotImplementedError


class GaussianNLL(GaussianMetric):
    r"""Mean negative log density of the targets, jointly over outputs; see :func:`gaussian_nll`.

    Example:
        >>> metric = GaussianNLL(sigma_noise=1.0)
        >>> metric.update(torch.zeros(1, 1), torch.zeros(1, 1, 1), torch.zeros(1, 1))
        >>> round(metric.compute().item(), 4)
        0.9189
    """

    higher_is_better = False

    def values(self, mean: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """Return negative log densities, ``[n]``."""
        return gaussian_nll(mean, covariance, targets)


class ScaledResiduals(GaussianMetric):
    r"""Squared residuals in units of the predicted covariance, per output; 1 if that is right.

    The mean of :math:`(y - \mu)^\top \Sigma^{-1} (y - \mu) / D`: the factor by which all
    covariances would have to be multiplied for the lowest NLL.

    Example:
        >>> metric = ScaledResiduals(sigma_noise=1.0)
        >>> metric.update(torch.zeros(1, 1), torch.zeros(1, 1, 1), torch.tensor([[0.5]]))
        >>> metric.compute().item()
        0.25
    """

    def values(self, mean: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """Return squared, whitened residuals averaged over outputs, ``[n]``."""
        L, info = torch.linalg.cholesky_ex(covariance)
        residual = (targets - mean).unsqueeze(-1)
        white = torch.linalg.solve_triangular(L, residual, upper=False).squeeze(-1)  # [n, D]
        squares: Tensor = white.square().mean(-1).masked_fill(info > 0, math.nan)
        return squares


class MSE(GaussianMetric):
    """Squared error of the mean, averaged over data and outputs.

    Example:
        >>> metric = MSE()
        >>> metric.update(torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[1.0, 2.0]]))
        >>> metric.compute().item()
        2.5
    """

    higher_is_better = False

    def values(self, mean: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """Return squared errors averaged over outputs, ``[n]``."""
        return (targets.double() - mean.double()).square().mean(-1)


class RMSE(MSE):
    """Root of :class:`MSE`.

    Example:
        >>> metric = RMSE()
        >>> metric.update(torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([[3.0]]))
        >>> metric.compute().item()
        3.0
    """

    def compute(self) -> Tensor:
        """Return the root of the mean over all data added so far."""
        return super().compute().sqrt()


class Coverage(GaussianMetric):
    r"""Share of targets in the central interval :math:`\mu_d \pm z_q \sqrt{\Sigma_{dd}}`.

    Calibrated predictions cover as much as the interval promises, q; neither more nor less is
    better.

    Args:
        level: The level q of the interval.
        sigma_noise: See :class:`GaussianMetric`.

    Raises:
        ValueError: If the level is not between 0 and 1.

    Example:
        >>> metric = Coverage(0.9)
        >>> metric.update(torch.zeros(2, 1), torch.ones(2, 1), torch.tensor([[0.5], [1.8]]))
        >>> metric.compute().item()
        0.5
    """

    higher_is_better = None

    def __init__(self, level: float, sigma_noise: float | Tensor = 0.0) -> None:
        """Start from no data."""
        super().__init__(sigma_noise)
        if not 0 < level < 1:
            raise ValueError(f"Expected a level between 0 and 1, got {level}. Remedy: e.g. 0.9.")
        self.level = level

    def values(self, mean: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """Return the share of outputs inside, ``[n]``."""
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        scores = (targets - mean).abs() / variance.sqrt()  # [n, D]
        z = NormalDist().inv_cdf(0.5 + self.level / 2)
        return (scores <= z).double().masked_fill(scores.isnan(), math.nan).mean(-1)


class CRPS(GaussianMetric):
    r"""Continuous ranked probability score, averaged over data and outputs.

    :math:`\int (F(t) - 1[t \ge y])^2 dt`, for a Gaussian with :math:`z = (y - \mu) / \sigma`
    :math:`\sigma \, (z (2 \Phi(z) - 1) + 2 \varphi(z) - 1 / \sqrt\pi)`; in the units of the
    targets. (torchmetrics knows that of samples only.)

    Example:
        >>> metric = CRPS()
        >>> metric.update(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1, 1))
        >>> round(metric.compute().item(), 4)
        0.2337
    """

    higher_is_better = False

    def values(self, mean: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """Return scores averaged over outputs, ``[n]``."""
        sigma = covariance.diagonal(dim1=-2, dim2=-1).double().sqrt()
        z = (targets.double() - mean.double()) / sigma
        density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
        scores = z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi)
        return (sigma * scores).mean(-1)


class Sharpness(GaussianMetric):
    r"""Mean predictive standard deviation over data and outputs, observation noise included.

    The central interval of level q is :math:`2 z_q` times as wide. Small is good among predictions
    that cover what they promise, so it has no direction of its own.

    Example:
        >>> metric = Sharpness()
        >>> metric.update(torch.zeros(1, 2), torch.tensor([[1.0, 9.0]]), torch.zeros(1, 2))
        >>> metric.compute().item()
        2.0
    """

    higher_is_better = None

    def values(self, mean: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        """Return standard deviations averaged over outputs, ``[n]``."""
        return covariance.diagonal(dim1=-2, dim2=-1).double().sqrt().mean(-1)
