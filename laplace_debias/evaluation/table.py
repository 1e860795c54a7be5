"""The metrics a sweep knows by name, all of them torchmetrics.

Classification metrics are updated with ``(probabilities [n, C], labels [n])``, regression metrics
with ``(mean [n, C], covariance [n, C, C], targets [n, C])`` or, if they take two arguments, with
``(mean, targets)``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torchmetrics
from laplace.baselaplace import KronLaplace
from laplace.utils.enums import Likelihood
from laplace.utils.metrics import RunningNLLMetric
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError

Metrics = Sequence[str] | Mapping[str, torchmetrics.Metric]


class GaussianNLL(torchmetrics.Metric):
    r"""Mean negative log density of the targets under the Gaussian predictive.

    :math:`-\log N(y \mid \mu, \Sigma + \sigma^2 I)`, averaged over data; :math:`\sigma` is the
    observation noise, which laplace-torch's covariances do not contain.

    Args:
        sigma_noise: Standard deviation of the observation noise.

    Example:
        >>> metric = GaussianNLL(sigma_noise=1.0)
        >>> metric.update(torch.zeros(1, 1), torch.zeros(1, 1, 1), torch.zeros(1, 1))
        >>> round(metric.compute().item(), 4)
        0.9189
    """

    higher_is_better = False
    is_differentiable = True
    full_state_update = False

    def __init__(self, sigma_noise: float | Tensor = 1.0) -> None:
        """Start from no data."""
        super().__init__()
        self.noise_variance = float(sigma_noise) ** 2
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, mean: Tensor, covariance: Tensor, target: Tensor) -> None:
        """Add data: ``mean [n, C]``, ``covariance [n, C, C]``, ``target [n, C]``."""
        n, C = mean.shape
        noise = self.noise_variance * torch.eye(C, dtype=mean.dtype, device=mean.device)
        L, info = torch.linalg.cholesky_ex(covariance + noise)
        residual = (target.reshape(n, C).to(mean.dtype) - mean).unsqueeze(-1)
        z = torch.linalg.solve_triangular(L, residual, upper=False).squeeze(-1)
        log_det = 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        nll = 0.5 * (z.square().sum(-1) + log_det + C * math.log(2 * math.pi))
        nll = nll.masked_fill(info > 0, math.nan)  # not positive definite: no density
        self.total += nll.double().sum()
        self.count += n

    def compute(self) -> Tensor:
        """Return the mean over all data."""
        return self.total / self.count


def metric_table(la: KronLaplace) -> dict[str, Callable[[], torchmetrics.Metric]]:
    """Return the metrics known by name for the likelihood of ``la``."""
    if la.likelihood == Likelihood.REGRESSION:
        return {
            "nll": lambda: GaussianNLL(la.sigma_noise),
            "mse": lambda: torchmetrics.MeanSquaredError(),
        }
    C = max(2, la.n_outputs)
    return {
        "nll": RunningNLLMetric,
        "accuracy": lambda: MulticlassAccuracy(C, average="micro", validate_args=False),
        "ece": lambda: MulticlassCalibrationError(C, n_bins=15, validate_args=False),
    }


def fresh_metrics(
    la: KronLaplace, metrics: Metrics, k: int
) -> dict[str, list[torchmetrics.Metric]]:
    """Return k fresh copies of every metric, on the model's device.

    Raises:
        ValueError: For an unknown name, no metric at all, or something that is not a metric.
    """
    table = metric_table(la)
    if isinstance(metrics, str):
        metrics = [metrics]
    if not metrics:
        raise ValueError(f"Expected at least one metric, got none. Known: {sorted(table)}.")
    fresh: dict[str, list[torchmetrics.Metric]] = {}
    for name in metrics:
        given = metrics[name] if isinstance(metrics, Mapping) else None
        if given is None and name not in table:
            raise ValueError(
                f"Expected metrics among {sorted(table)} for {la.likelihood}, got {name!r}. "
                "Pass a mapping of names to torchmetrics.Metric for your own."
            )
        if given is not None and not isinstance(given, torchmetrics.Metric):
            raise ValueError(
                f"Expected a torchmetrics.Metric for {name!r}, got {type(given).__name__}. "
                "Wrap the function in a torchmetrics.Metric."
            )
        fresh[name] = []
        for _ in range(k):
            metric = table[name]() if given is None else given.clone()
            metric.reset()
            fresh[name].append(metric.to(la._device))
    return fresh


def takes_covariance(metric: torchmetrics.Metric) -> bool:
    """Say whether a regression metric's ``update`` takes ``(mean, covariance, target)``."""
    parameters = inspect.signature(metric.update).parameters.values()
    positional = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    return len(positional) >= 3 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
