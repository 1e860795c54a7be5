r"""How far a mini-batch over-estimates its own top curvature, told before any second mini-batch.

A factor is a sum over independent data, :math:`E = \sum_i E_i`, of positive semi-definite matrices
with the rows of each datum (:mod:`laplace_debias.kfac.row_counts`). Weight each eigenvector of E by
its own curvature: the top ones dominate. The share of all curvature that they seem to have is, on
the data that chose them and on other data with the factor :math:`E^*`,

.. math::
    \varphi = \frac{\sum_j \lambda_j \lambda_j}{(\operatorname{tr} E)^2}
            = \frac{\operatorname{tr} E^2}{(\operatorname{tr} E)^2}, \qquad
    \varphi^* = \frac{\sum_j \lambda_j \, q_j^\top E^* q_j}
                     {\operatorname{tr} E \operatorname{tr} E^*}
              = \frac{\operatorname{tr} E E^*}{\operatorname{tr} E \operatorname{tr} E^*} .

The first is too large because each datum meets itself in :math:`\operatorname{tr} E^2 = \sum_{ij}
\operatorname{tr} E_i E_j`. Without the terms i = j, numerator and denominator are sums over pairs
of different data. Up to a common factor they have the expectations of the second's numerator and
denominator, for any number of data, whatever their distribution, and however the rows of one datum
depend on each other:

.. math::
    \tilde\varphi = \frac{\sum_{i \ne j} \operatorname{tr} E_i E_j}
                         {\sum_{i \ne j} \operatorname{tr} E_i \operatorname{tr} E_j}
                  = \frac{1 / D - 1 / m}{1 - 1 / m'} .

Here :math:`D = 1 / \varphi` is the effective dimension of the factor,
:math:`m = (\sum_i \operatorname{tr} E_i)^2 / \sum_i \lVert E_i \rVert_F^2` its effective number of
rows and :math:`m' = (\sum_i \operatorname{tr} E_i)^2 / \sum_i (\operatorname{tr} E_i)^2` its
effective number of data; for one row per datum both are :math:`(\sum |r|^2)^2 / \sum |r|^4`. The
expected over-estimation is :math:`\varphi / \tilde\varphi`, which for one row per datum is

.. math:: \frac{1 - 1/m}{1 - D / m} .

Many more effective rows than effective dimensions: no bias. As many: nothing is known but bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from laplace_debias.data.inputs import Batch, Keys, take
from laplace_debias.kfac.counts import RowCount
from laplace_debias.kfac.factors import Factors
from laplace_debias.kfac.interface import EngineInterface
from laplace_debias.storage.results import SavedResult

__all__ = [
    "MIN_EFFECTIVE_ROWS",
    "ExpectedBias",
    "FactorBias",
    "effective_dimension",
    "expected_bias",
    "expected_bias_of",
    "expected_overestimation",
]

# Fewer effective rows than this, and the rule was up to 2.3 times too high (docs/methods.md).
MIN_EFFECTIVE_ROWS = 5.0

# Data whose rows are held at once: counting takes a Gram matrix for each of them.
_AT_ONCE = 16


@dataclass(frozen=True)
class FactorBias(SavedResult):
    """What stands behind one Kronecker factor, and the over-estimation to expect.

    Attributes:
        name: Parameter name.
        factor: ``"B"`` (output gradients) or ``"A"`` (layer inputs).
        n_rows: Number of rows behind the factor.
        dimension: Its dimension d.
        effective_rows: Effective number m of rows.
        effective_dimension: Effective dimension D.
        overestimation: How many times too large the share of the top directions is expected to be.
            To be trusted only where ``trusted`` is true.
    """

    name: str
    factor: str
    n_rows: int
    dimension: int
    effective_rows: float
    effective_dimension: float
    overestimation: float

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """Return names of columns, and the one row."""
        names = [*(field.name for field in fields(self)), "trusted"]
        return names, [[getattr(self, name) for name in names]]

    @property
    def trusted(self) -> bool:
        """Whether there are rows enough (``MIN_EFFECTIVE_ROWS``) to foretell anything."""
        return self.effective_rows >= MIN_EFFECTIVE_ROWS


@dataclass(frozen=True)
class ExpectedBias(SavedResult):
    """The over-estimation of top curvature to expect from one mini-batch, factor by factor.

    Attributes:
        factors: One entry per factor; a bias has one, a weight two.
        n_data: Number of data in the mini-batch.
    """

    factors: tuple[FactorBias, ...]
    n_data: int

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """Return names of columns, and one row per factor."""
        names = [*(field.name for field in fields(FactorBias)), "trusted"]
        return names, [factor.rows()[1][0] for factor in self.factors]

    def __str__(self) -> str:
        """A table with one line per factor."""
        width = max([len(factor.name) for factor in self.factors] + [5])
        lines = [
            f"Top curvature to expect from {self.n_data} data, as a multiple of that on other data "
            "(shares of the factor's trace)",
            f"{'layer':<{width}} {'factor':>6} {'rows':>9} {'dimension':>9} "
            f"{'effective: rows':>15} {'dimension':>9} {'over-estimation':>15}",
        ]
        for f in self.factors:
            factor = f"{f.overestimation:.3g}" if f.trusted else "too few rows"
            lines.append(
                f"{f.name:<{width}} {f.factor:>6} {f.n_rows:>9} {f.dimension:>9} "
                f"{f.effective_rows:>15.4g} {f.effective_dimension:>9.4g} {factor:>15}"
            )
        return "\n".join(lines)


def effective_dimension(M: Tensor) -> float:
    r"""Number of equal eigenvalues that a spectrum is worth.

    .. math:: D = (\operatorname{tr} M)^2 / \lVert M \rVert_F^2

    Args:
        M: Symmetric positive semi-definite matrix ``[d, d]``.

    Returns:
        D, between 1 and d; 0 for a matrix of zeros.

    Example:
        >>> effective_dimension(torch.eye(3)), effective_dimension(torch.ones(3, 3))
        (3.0, 1.0)
    """
    scaled = M.double() / M.abs().max().clamp(min=torch.finfo(M.dtype).tiny)
    squares = float(scaled.square().sum())
    return float(scaled.trace()) ** 2 / squares if squares != 0 else 0.0


def expected_overestimation(
    effective_dimension: float, effective_rows: float, effective_data: float, dimension: int
) -> float:
    r"""Over-estimation of the share of top directions by the data that chose them.

    .. math:: \frac{1 / D}{\max\{(1/D - 1/m) / (1 - 1/m'), \; 1 / d\}}

    The top directions of d have at least the share 1 / d of the curvature on other data.

    Args:
        effective_dimension: D of the sample's factor.
        effective_rows: m, at least D up to rounding.
        effective_data: m', at most m.
        dimension: d.

    Returns:
        The factor, at least 1; 1 for a factor of zeros.

    Example:
        >>> round(expected_overestimation(4.0, 16.0, 16.0, 64), 3)  # (1 - 1/16) / (1 - 4/16)
        1.25
    """
    if effective_dimension <= 0:
        return 1.0
    share, floor = 1 / effective_dimension, 1 / dimension
    others = 1 - 1 / effective_data
    # a single datum has no other one to be compared with
    held_out = (share - 1 / effective_rows) / others if others > 0 else floor
    return max(1.0, share / max(held_out, floor))


def expected_bias(factors: Factors) -> ExpectedBias:
    """The over-estimation of top curvature to expect from a mini-batch's own factors.

    Args:
        factors: Factors of at least two data whose rows were counted,
            ``engine.factors(X, y, count_rows=True)``.

    Returns:
        One entry per factor; ``print`` shows a table.

    Raises:
        ValueError: If the rows were not counted, or there are fewer than two data.

    Example:
        >>> from laplace_debias.kfac.engine import kfac_factors
        >>> X = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> factors = kfac_factors(layer, X, likelihood="regression", count_rows=True)
        >>> A = expected_bias(factors).factors[1]
        >>> round(A.overestimation, 6)  # the share 10 / 16, against 6 / 12 without i = j
        1.25
    """
    if not factors.row_counts:
        raise ValueError(
            "Expected factors whose rows were counted, got some without. Remedy: "
            "`engine.factors(X, y, count_rows=True)`."
        )
    if factors.n < 2:
        raise ValueError(
            f"Expected factors of at least two data, got {factors.n}. Remedy: use a larger "
            "mini-batch."
        )
    entries = []
    for i, name in enumerate(factors.names):
        for kind, M, count in zip(
            "BA", (factors.B[i], factors.A[i]), factors.row_counts[i], strict=True
        ):
            if M is not None and count is not None:
                entries.append(_factor_bias(name, kind, M, count))
    return ExpectedBias(tuple(entries), factors.n)


def expected_bias_of(
    engine: EngineInterface, batches: Iterable[Batch], key_x: Keys = "input_ids"
) -> ExpectedBias:
    """The same for data that still have to pass through the network.

    Args:
        engine: Makes factors and counts their rows.
        batches: Mini-batches ``(X, y)``, which count as one.
        key_x: Key of the inputs in mini-batches that are mappings.

    Returns:
        One entry per factor.

    Raises:
        ValueError: If there are fewer than two data.

    Example:
        >>> from laplace_debias.kfac.engine import Engine
        >>> engine = Engine(torch.nn.Linear(2, 3), "classification")
        >>> batch = (torch.randn(8, 2), torch.arange(8) % 3)
        >>> [(f.factor, f.n_rows) for f in expected_bias_of(engine, [batch]).factors]
        [('B', 16), ('A', 8), ('B', 16)]
    """
    parts = [
        engine.factors(take(X, rows, key_x), y[rows], count_rows=True)
        for X, y in batches
        for rows in torch.arange(len(y), device=y.device).split(_AT_ONCE)
    ]
    if not parts:
        raise ValueError(
            "Expected at least two data, got no mini-batch. Remedy: pass one, `(X, y)`."
        )
    return expected_bias(reduce(add, parts))


def _factor_bias(name: str, kind: str, M: Tensor, count: RowCount) -> FactorBias:
    """The entry of one factor."""
    D = effective_dimension(M)
    m, data = count.effective_rows, count.effective_data
    if not (math.isfinite(D) and math.isfinite(m)):
        raise ValueError(
            f"Expected finite rows behind factor {kind} of '{name}', got NaN or Inf. Remedy: look "
            "for them in the network's weights and activations up to this layer."
        )
    rho = expected_overestimation(D, m, data, len(M)) if m > 0 else 1.0
    return FactorBias(name, kind, count.n_rows, len(M), m, D, rho)
