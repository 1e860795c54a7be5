r"""Answering only where one is confident: risk against coverage.

With the data in the order of their confidence, largest first, the risk at coverage k / n is the
share of errors among the first k. The area under the curve, AURC, is its mean over k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_debias.evaluation.metrics import ECE

__all__ = ["AURC", "RiskCoverage", "risk_coverage"]


@dataclass(frozen=True)
class RiskCoverage:
    """A risk-coverage curve.

    Attributes:
        coverage: k / n for k = 1 to n, ``[n]``.
        risk: Mean loss of the k most confident data, ``[n]``.
    """

    coverage: Tensor
    risk: Tensor

    @property
    def area(self) -> float:
        """The area under the curve.

        Example:
            >>> risk_coverage(torch.tensor([0.9, 0.6]), torch.tensor([0.0, 1.0])).area
            0.25
        """
        return self.risk.mean().item()

    def at(self, coverage: float) -> float:
        """Return the risk where this share of the data is answered.

        Example:
            >>> risk_coverage(torch.tensor([0.9, 0.6]), torch.tensor([0.0, 1.0])).at(0.5)
            0.0
        """
        n = len(self.risk)
        return self.risk[max(math.ceil(coverage * n - 1e-9), 1) - 1].item()


def risk_coverage(confidences: Tensor, losses: Tensor) -> RiskCoverage:
    """Risk of the most confident data, for every coverage.

    Data of the same confidence share their mean loss, so that their order does not matter.

    Args:
        confidences: ``[n]``; for a regression, minus the predictive standard deviation.
        losses: One per datum, ``[n]``: 1 for an error and 0 otherwise, or squared errors.

    Returns:
        The curve.

    Example:
        >>> risk_coverage(torch.tensor([0.9, 0.5, 0.7]), torch.tensor([0.0, 1.0, 0.0])).risk
        tensor([0.0000, 0.0000, 0.3333], dtype=torch.float64)
    """
    values, group = torch.unique(-confidences, return_inverse=True)  # ascending
    losses = losses.double()
    sizes = torch.zeros(len(values), dtype=torch.float64, device=losses.device)
    sums = sizes.index_add(0, group, losses)
    sizes = sizes.index_add(0, group, torch.ones_like(losses))
    ordered = (sums / sizes)[group.sort(stable=True).values]
    k = torch.arange(1, len(losses) + 1, dtype=torch.float64, device=losses.device)
    return RiskCoverage(k / len(losses), ordered.cumsum(0) / k)


class AURC(ECE):
    """Area under the risk-coverage curve: mean error rate over all shares of answered data.

    Example:
        >>> metric = AURC()
        >>> metric.update(torch.tensor([[0.9, 0.1], [0.4, 0.6]]).log(), torch.tensor([0, 0]))
        >>> metric.compute().item()
        0.25
    """

    def compute(self) -> Tensor:
        """Return the area for all data added so far."""
        confidences, correct = self.top_label()
        if confidences.isnan().any():
            return torch.tensor(math.nan)
        return torch.tensor(risk_coverage(confidences, 1 - correct).area)
