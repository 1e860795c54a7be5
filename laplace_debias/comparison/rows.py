"""What a comparison calls its methods, and the rows and summaries that it is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ComparisonRow", "Summary"]

SINGLE, TWO_BATCH, CROSSFIT, AUTO = "single", "two-batch", "crossfit", "auto"
PLAIN, FULL, LARGE = "plain", "full", "large-batch"
TEMPERATURE, LAST_LAYER, PRIOR_ONLY, DIAGONAL = (
    "temperature",
    "last-layer",
    "prior-only",
    "diagonal",
)
LINES = (PLAIN, TEMPERATURE)
"""Methods without a prior precision."""
FITTED_ONCE = (PLAIN, FULL, LARGE, TEMPERATURE, LAST_LAYER, PRIOR_ONLY, DIAGONAL)
"""Methods that take no draws of the data."""


@dataclass(frozen=True)
class ComparisonRow:
    """Every metric of one method, fitted on one draw, at one prior precision.

    Attributes:
        method: ``"plain"``, ``"single"``, ``"two-batch"``, ``"crossfit"``, ``"full"``,
            ``"large-batch"``, a baseline's name, or the name of a method of one's own.
        budget: Number of data the curvature was computed from, over all roles; 0 for ``"plain"``.
        batch_size: Number of data per role: half the budget for two roles.
        draw: Which draw of the data; 0 where there is only one.
        prior_precision: In laplace-torch's units; ``None`` for ``"plain"``, which has none.
        metrics: Values by name.
        cost: What the fit took, if it was made here: passes ``"forward"`` and ``"backward"``, and
            ``"seconds"``. Rows are equal whatever it is.
    """

    method: str
    budget: int
    batch_size: int
    draw: int
    prior_precision: float | None
    metrics: dict[str, float]
    cost: dict[str, float] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Summary:
    """One metric of one method at one prior precision, over draws."""

    method: str
    budget: int
    prior_precision: float | None
    mean: float
    min: float
    max: float
    n_draws: int
