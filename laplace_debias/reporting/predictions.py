"""Predictions of every datum, which curves and histograms need and averages do not keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from laplace.baselaplace import BaseLaplace
from torch import Tensor, nn

from laplace_debias.data.inputs import take
from laplace_debias.data.reading import read
from laplace_debias.evaluation.metrics import most_probable, predictive_entropy
from laplace_debias.evaluation.predictors import laplace_predictor, model_predictor
from laplace_debias.evaluation.reports import ReliabilityBins, equal_width_bins
from laplace_debias.evaluation.selective import RiskCoverage, risk_coverage
from laplace_debias.network.loss import Likelihood
from laplace_debias.network.preserve import evaluation_mode

__all__ = ["Predicted", "halves", "predict"]


@dataclass(frozen=True)
class Predicted:
    """Predictions and targets of n data.

    Attributes:
        values: Log-probabilities ``[n, C]``, or means ``[n, D]``.
        deviation: Predictive standard deviations ``[n, D]`` with noise, for a regression.
        targets: Labels or values; ``None`` if there are none.
    """

    values: Tensor
    deviation: Tensor | None
    targets: Tensor | None

    @property
    def uncertainty(self) -> Tensor:
        """Entropy, or mean standard deviation over outputs, ``[n]``."""
        if self.deviation is None:
            return predictive_entropy(self.values)
        return self.deviation.mean(-1)

    def risk_coverage(self) -> RiskCoverage:
        """Errors, or squared errors, of the most certain data."""
        assert self.targets is not None
        if self.deviation is not None:
            loss = (self.targets.to(self.values) - self.values).square().mean(-1)
            return risk_coverage(-self.deviation.mean(-1), loss)
        confidence, classes = self.values.exp().max(-1)
        return risk_coverage(confidence, (classes != most_probable(self.targets)).double())

    def reliability(self, n_bins: int = 15) -> ReliabilityBins:
        """Accuracy by confidence, for a classification."""
        assert self.targets is not None
        confidence, classes = self.values.exp().clamp(max=1).max(-1)
        return equal_width_bins(confidence, classes == most_probable(self.targets), n_bins)

    def coverage(self, levels: Sequence[float]) -> list[float]:
        """Share of targets inside central intervals, for a regression."""
        assert self.targets is not None and self.deviation is not None
        scores = (self.targets.to(self.values) - self.values).abs() / self.deviation
        return [
            (scores <= NormalDist().inv_cdf(0.5 + level / 2)).double().mean().item()
            for level in levels
        ]


def predict(
    predictor: BaseLaplace | nn.Module,
    loader: Iterable[Any],
    likelihood: Likelihood,
    sigma_noise: float = 1.0,
    key_y: str = "labels",
) -> Predicted:
    """Predict every datum of a loader.

    Args:
        predictor: A fitted Laplace approximation or a plain network.
        loader: Mini-batches, with targets or without.
        likelihood: ``"classification"`` or ``"regression"``.
        sigma_noise: Standard deviation of a regression's noise.
        key_y: Key of the targets in mini-batches that are mappings.

    Returns:
        Predictions of all data.

    Example:
        >>> net = nn.Linear(2, 3)
        >>> predict(net, (torch.ones(4, 2), torch.zeros(4).long()), "classification").values.shape
        torch.Size([4, 3])
    """
    model: nn.Module = predictor.model if isinstance(predictor, BaseLaplace) else predictor
    if isinstance(predictor, BaseLaplace):
        function = laplace_predictor(predictor)
    else:
        function = model_predictor(predictor, likelihood)
    device = next(model.parameters()).device
    values, deviations, targets = [], [], []
    with torch.no_grad(), evaluation_mode(model):
        for X, y in read(loader, device, key_y, labelled=False):
            mean, *rest = function(X)
            values.append(mean.detach())
            for variance in rest:
                own = variance.diagonal(dim1=1, dim2=2) if variance.ndim == 3 else variance
                deviations.append((own + sigma_noise**2).sqrt().detach())
            targets += [] if y is None else [y]
    return Predicted(
        torch.cat(values),
        torch.cat(deviations) if deviations else None,
        torch.cat(targets) if targets else None,
    )


def halves(
    loader: Iterable[Any], device: torch.device, key_y: str = "labels"
) -> tuple[list[Any], list[Any]]:
    """Split labelled data into those with even and with odd numbers, mini-batch by mini-batch.

    Args:
        loader: Mini-batches ``(X, y)`` or mappings.
        device: Device of the model.
        key_y: Key of the targets in mini-batches that are mappings.

    Returns:
        Two lists of mini-batches ``(X, y)``.

    Raises:
        ValueError: If there are fewer than two data.

    Example:
        >>> first, second = halves((torch.arange(3.0), torch.arange(3)), torch.device("cpu"))
        >>> first[0][1].tolist(), second[0][1].tolist()
        ([0, 2], [1])
    """
    even: list[Any] = []
    odd: list[Any] = []
    for X, y in read(loader, device, key_y):
        for part, start in ((even, 0), (odd, 1)):
            if len(y[start::2]):
                rows = take(X, torch.arange(start, len(y), 2))
                # a mapping holds its own targets
                part.append((rows, y[start::2]) if isinstance(rows, Tensor) else rows)
    if not odd:
        raise ValueError(
            "Expected at least two data in one mini-batch of `test_loader`, to choose a prior "
            "precision on one half and measure on the other, got single ones. Remedy: pass a "
            "`val_loader`, or a larger `batch_size`."
        )
    return even, odd
