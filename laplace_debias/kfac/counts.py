"""What a fit costs, and what its factors rest on: passes, seconds by stage, rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["FitCost", "RowCount"]


@dataclass
class FitCost:
    """What a fit cost.

    Attributes:
        forward: Forward passes, one per datum.
        backward: Backward passes, one per datum and vector.
        seconds: Wall-clock time by stage.
    """

    forward: int = 0
    backward: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

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
