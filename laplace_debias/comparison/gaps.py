r"""How far a method's curves are from the reference's.

Notation: :math:`m_{d,\beta}` is a metric of a method fitted on draw d of its data, at prior
precision :math:`\beta`, and :math:`r_\beta` the same of the reference (the approximation of the
whole training set). Bars over it are means over draws.

- gap: mean over d and :math:`\beta` of :math:`|m_{d,\beta} - r_\beta|`;
- bias: mean over :math:`\beta` of :math:`|\bar m_\beta - r_\beta|`, what no averaging removes;
- spread: mean over :math:`\beta` of the standard deviation of :math:`m_{d,\beta}` over d;
- gap ratio: the gap of a method divided by that of the single mini-batch with as many data.

Debiasing pays where the single mini-batch's bias exceeds its spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

__all__ = ["Gap", "measure_gap"]


@dataclass(frozen=True)
class Gap:
    """Distance of a method from the reference; see the module's docstring.

    Attributes:
        method: Name of the method.
        budget: Its number of data.
        gap: Mean distance.
        bias: Distance of the mean.
        spread: Standard deviation over draws, 0 for one draw.
    """

    method: str
    budget: int
    gap: float
    bias: float
    spread: float


def measure_gap(
    method: str,
    budget: int,
    curves: Mapping[float, Sequence[float]],
    reference: Mapping[float, float],
) -> Gap:
    """Measure gap, bias and spread of one metric; see the module's docstring.

    Args:
        method: Name of the method.
        budget: Its number of data.
        curves: Values over draws, by prior precision.
        reference: The reference's value, by prior precision.

    Raises:
        ValueError: If the reference is missing at a prior precision.

    Example:
        >>> measure_gap("single", 8, {1.0: [2.0, 4.0]}, {1.0: 3.0})
        Gap(method='single', budget=8, gap=1.0, bias=0.0, spread=1.414...)
    """
    missing = sorted(set(curves) - set(reference))
    if missing:
        raise ValueError(
            f"Expected the reference at every prior precision of {method!r}, got none at "
            f"{missing}. Remedy: run both over the same grid."
        )
    distances = [abs(v - reference[d]) for d, values in curves.items() for v in values]
    biases = [abs(fmean(values) - reference[d]) for d, values in curves.items()]
    spreads = [stdev(values) if len(values) > 1 else 0.0 for values in curves.values()]
    return Gap(method, budget, fmean(distances), fmean(biases), fmean(spreads))
