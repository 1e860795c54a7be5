"""What a fit costs, and what its factors rest on: passes, seconds by stage, rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["FitCost", "FitReport", "RowCount", "report_of"]


@dataclass
class FitCost:
    """What a fit cost.

    Attributes:
        forward: Forward passes, one per datum.
        backward: Backward passes, one per datum and vector.
        seconds: Wall-clock time by stage.
        watched: Called on the way with the number of data whose backward passes were made, parts of
            a datum for some of its vectors; a progress bar.
    """

    forward: int = 0
    backward: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    watched: Callable[[float], None] | None = field(default=None, repr=False, compare=False)

    def tick(self, n_data: float) -> None:
        """Tell who watches that these many data were passed backward.

        Args:
            n_data: Their number, over the number of backward vectors for one of these.

        Example:
            >>> seen = []
            >>> FitCost(watched=seen.append).tick(0.5)
            >>> seen
            [0.5]
        """
        if self.watched is not None:
            self.watched(n_data)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to a stage.

        Example:
            >>> cost = FitCost()
            >>> with cost.stage("passes"):
            ...     pass
            >>> list(cost.seconds)
            ['passes']
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class RowCount:
    """What the rows behind one factor are, summed over data.

    Attributes:
        n_data: Number n of data.
        n_rows: Number of rows of all data.
        trace: Sum over data of ``tr E_i``.
        trace_squares: Sum over data of ``(tr E_i)^2``.
        squares: Sum over data of the squared Frobenius norm of ``E_i``; the same for one row each.
    """

    n_data: int
    n_rows: int
    trace: float
    trace_squares: float
    squares: float

    @property
    def effective_rows(self) -> float:
        """Effective number of rows, ``trace^2 / squares``; 0 where all rows are zero."""
        return self.trace**2 / self.squares if self.squares != 0 else 0.0

    @property
    def effective_data(self) -> float:
        """Effective number of data, ``trace^2 / trace_squares``; 0 where all rows are zero."""
        return self.trace**2 / self.trace_squares if self.trace_squares != 0 else 0.0

    def __add__(self, other: RowCount) -> RowCount:
        """Rows of the data of both.

        Example:
            >>> RowCount(1, 1, 2.0, 4.0, 4.0) + RowCount(1, 2, 2.0, 4.0, 2.0)
            RowCount(n_data=2, n_rows=3, trace=4.0, trace_squares=8.0, squares=6.0)
        """
        return RowCount(
            self.n_data + other.n_data,
            self.n_rows + other.n_rows,
            self.trace + other.trace,
            self.trace_squares + other.trace_squares,
            self.squares + other.squares,
        )


@dataclass(frozen=True)
class FitReport:
    """What a fit did, what it cost, and how far it is from the full batch.

    Attributes:
        method: The word for the method.
        n_passes: Backward passes of the fit, one per datum and vector.
        n_forward: Forward passes of the fit, one per datum.
        n_probes: Passes of the probes behind the distance, forward and backward each.
        n_data: Number N of training data that the fit stands for.
        n_pool: Number of data seen by forward passes, 0 where there was no pool.
        seconds: Wall-clock time by stage.
        distance: Estimated distance to the full-batch posterior, ``None`` if it was not estimated.
        standard_error: How far the true distance may be from it, as a standard deviation.
        reason: Why the fit ended.
        prior_precision: The prior precision during the fit, at which the distance is; ``None``
            stands for one per block.

    Example:
        >>> known = ({"passes": 0.5}, 0.031, 0.01, "done", 1.0)
        >>> print(FitReport("auto", 64, 500, 32, 1000, 500, *known))
        auto: 64 backward and 500 forward passes for 1,000 training data, 0.5 s
        At prior precision 1 predictive standard deviations are 3.1 % off a full batch's (+- 1.0 %).
        It stopped here: done.
    """

    method: str
    n_passes: int
    n_forward: int
    n_probes: int
    n_data: int
    n_pool: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    distance: float | None = None
    standard_error: float | None = None
    reason: str = "it used the data that it was given"
    prior_precision: float | None = None

    def __str__(self) -> str:
        """Three lines that anybody understands."""
        far = "How far it is from a full-batch fit was not estimated."
        if self.distance is not None and self.standard_error is not None:
            prior = "the fit's prior precision"
            if self.prior_precision is not None:
                prior = f"prior precision {self.prior_precision:g}"
            far = (
                f"At {prior} predictive standard deviations are {100 * self.distance:.1f} % off a "
                f"full batch's (+- {100 * self.standard_error:.1f} %)."
            )
        return (
            f"{self.method}: {self.n_passes:,} backward and {self.n_forward:,} forward passes for "
            f"{self.n_data:,} training data, {sum(self.seconds.values()):.1f} s\n"
            f"{far}\nIt stopped here: {self.reason}."
        )


def report_of(
    method: str, cost: Any, n_data: int, prior: Any, made: FitReport | None = None
) -> FitReport:
    """The report of a fit, with the prior precision that it was made at.

    Args:
        method: Its word.
        cost: Passes and seconds.
        n_data: Number N of training data.
        prior: Prior precision, a number or a tensor of one or several.
        made: What the method has reported, if it estimates its distance.

    Returns:
        That, or a report without a distance.
    """
    counts = (cost.backward, cost.forward, 0, n_data, 0, dict(cost.seconds))
    report = made or FitReport(method, *counts)
    several = getattr(prior, "numel", lambda: 1)() > 1
    return replace(report, prior_precision=None if several else float(prior))
