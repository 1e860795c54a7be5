"""The result of a comparison: tidy rows, summaries over draws, and distances from the reference."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from laplace_debias.comparison.gaps import Gap, measure_gap
from laplace_debias.comparison.rows import (
    FITTED_ONCE,
    FULL,
    LARGE,
    SINGLE,
    TWO_BATCH,
    ComparisonRow,
    Summary,
)
from laplace_debias.storage.export import (
    number_from_json,
    rows_to_csv,
    rows_to_dataframe,
    text_table,
    to_json_text,
    write_text,
)

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["ComparisonResult", "ComparisonRow", "Summary"]

_KEYS = ("method", "budget", "batch_size", "draw", "prior_precision")


@dataclass(frozen=True)
class ComparisonResult:
    """What :func:`~laplace_debias.comparison.compare.compare` found.

    Attributes:
        rows: One per method, budget, draw and prior precision.
        n_data: Number N of training data. ``prior_precision / n_data`` is the paper's beta.
        config: The settings that decide the numbers.

    Example:
        >>> def row(method, draw, nll):
        ...     return ComparisonRow(method, 8, 8, draw, 1.0, {"nll": nll})
        >>> rows = [row("full", 0, 1.0), row("single", 0, 2.0), row("single", 1, 1.5)]
        >>> rows += [row("two-batch", 0, 1.1), row("two-batch", 1, 0.8)]
        >>> result = ComparisonResult(tuple(rows), n_data=100, config={})
        >>> {budget: round(ratio, 6) for budget, ratio in result.gap_ratio("nll").items()}
        {8: 0.2}
    """

    rows: tuple[ComparisonRow, ...]
    n_data: int
    config: dict[str, Any]

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics."""
        return tuple(self.rows[0].metrics) if self.rows else ()

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods, in order of appearance."""
        return tuple(dict.fromkeys(row.method for row in self.rows))

    @property
    def reference(self) -> str:
        """Name of the reference: ``"full"``, or ``"large-batch"`` if it saw part of the data."""
        for name in (FULL, LARGE):
            if name in self.methods:
                return name
        raise ValueError(
            f"Expected a reference ('{FULL}' or '{LARGE}') among the methods, got {self.methods}. "
            f"Remedy: run the comparison with the method '{FULL}'."
        )

    def budgets(self, method: str) -> tuple[int, ...]:
        """Return the budgets of a method, smallest first."""
        return tuple(sorted({row.budget for row in self.rows if row.method == method}))

    def select(self, method: str, budget: int | None = None) -> tuple[ComparisonRow, ...]:
        """Return the rows of a method, of one budget if given."""
        return tuple(
            row
            for row in self.rows
            if row.method == method and (budget is None or row.budget == budget)
        )

    def summary(self, metric: str) -> tuple[Summary, ...]:
        """Return mean, minimum and maximum over draws of one metric, for every curve's points.

        Args:
            metric: One of ``metrics``.
        """
        groups: dict[tuple[str, int, float | None], list[float]] = {}
        for row in self.rows:
            key = (row.method, row.budget, row.prior_precision)
            groups.setdefault(key, []).append(self._value(row, metric))
        return tuple(
            Summary(*key, fmean(values), min(values), max(values), len(values))
            for key, values in groups.items()
        )

    def gap(self, metric: str, method: str, budget: int) -> Gap:
        """Return the distance of a method from the reference; see the module ``gaps``.

        Args:
            metric: One of ``metrics``.
            method: One of ``methods``.
            budget: One of ``budgets(method)``.
        """
        reference = {
            row.prior_precision: self._value(row, metric)
            for row in self.select(self.reference)
            if row.prior_precision is not None
        }
        curves: dict[float, list[float]] = {}
        for row in self.select(method, budget):
            delta = row.prior_precision  # None for the plain model, a horizontal line
            for place in reference if delta is None else (delta,):
                curves.setdefault(place, []).append(self._value(row, metric))
        if not curves:
            raise ValueError(
                f"Expected a method and one of its budgets, got {method!r} and {budget}. Remedy: "
                f"choose from { {name: self.budgets(name) for name in self.methods} }."
            )
        return measure_gap(method, budget, curves, reference)

    def gap_ratio(
        self, metric: str = "nll", method: str = TWO_BATCH, baseline: str = SINGLE
    ) -> dict[int, float]:
        """Return the gap of a method divided by that of a baseline, per common budget.

        Below 1 the method is nearer to the reference than the baseline with as many data.

        Args:
            metric: One of ``metrics``.
            method: Numerator.
            baseline: Denominator.

        Returns:
            Ratios by budget; ``nan`` where the baseline has no gap.
        """
        for name in (method, baseline):
            if name not in self.methods:
                raise ValueError(
                    f"Expected a method of this comparison, {list(self.methods)}, got {name!r}. "
                    "Remedy: correct the name, or run `compare` with it among `methods`."
                )
        ratios = {}
        for budget in self.budgets(method):
            if budget in self.budgets(baseline):
                below = self.gap(metric, baseline, budget).gap
                above = self.gap(metric, method, budget).gap
                ratios[budget] = above / below if below > 0 else math.nan
        return ratios

    def tuned(self, metric: str = "nll") -> tuple[ComparisonRow, ...]:
        """Return each fit's row at the prior precision that is best on the validation data.

        Args:
            metric: Small values of ``val_<metric>`` are good.

        Raises:
            ValueError: If the comparison had no ``val_loader``.
        """
        best: dict[tuple[str, int, int], ComparisonRow] = {}
        for row in self.rows:
            key, value = (row.method, row.budget, row.draw), self._value(row, f"val_{metric}")
            if key not in best or value < self._value(best[key], f"val_{metric}"):
                best[key] = row
        return tuple(best.values())

    def table(self, metrics: Sequence[str] | None = None) -> str:
        """Return gaps, biases, spreads and gap ratios as text, one line per metric and budget.

        Args:
            metrics: Which metrics; all if not given.
        """
        others = [m for m in self.methods if m not in (SINGLE, *FITTED_ONCE)]
        names = [name for name in (SINGLE, *others) if name in self.methods]
        head = ["metric", "budget"]
        head += [f"{name} {part}" for name in names for part in ("gap", "bias", "spread")]
        ratios_of = [name for name in others if SINGLE in self.methods]
        head += [f"{name}/{SINGLE}" for name in ratios_of]
        lines = []
        for metric in metrics or self.metrics:
            ratios = {name: self.gap_ratio(metric, name) for name in ratios_of}
            for budget in sorted({b for name in names for b in self.budgets(name)}):
                line = [metric, str(budget)]
                for name in names:
                    known = budget in self.budgets(name)
                    gap = self.gap(metric, name, budget) if known else None
                    parts = (gap.gap, gap.bias, gap.spread) if gap else (math.nan,) * 3
                    line += [f"{value:.4f}" for value in parts]
                line += [f"{ratios[name].get(budget, math.nan):.2f}" for name in ratios_of]
                lines.append(line)
        return text_table(head, lines, limit=len(lines))

    def __str__(self) -> str:
        """Return the gaps as a table, or the means over draws if there is nothing to compare to."""
        if {FULL, LARGE} & set(self.methods) and set(self.methods) - set(FITTED_ONCE):
            return self.table()
        head, lines = [*_KEYS[:2], _KEYS[4], *self.metrics], []
        means = zip(*(self.summary(metric) for metric in self.metrics), strict=True)
        for values in means:
            point, delta = values[0], values[0].prior_precision
            line = [point.method, str(point.budget), "" if delta is None else f"{delta:.4g}"]
            lines.append(line + [f"{value.mean:.4f}" for value in values])
        return text_table(head, lines)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return everything as JSON, for :meth:`from_json`; write it if there is a path.

        Args:
            path: The file. See :func:`~laplace_debias.storage.export.to_json_text` for NaN.
        """
        return write_text(to_json_text(self), path)

    @classmethod
    def from_json(cls, text: str) -> ComparisonResult:
        """Read what :meth:`to_json` returned.

        Args:
            text: The JSON.
        """
        content = json.loads(text)
        rows = []
        for row in content["rows"]:
            metrics = {name: number_from_json(value) for name, value in row["metrics"].items()}
            rows.append(ComparisonRow(**(row | {"metrics": metrics})))
        return cls(tuple(rows), content["n_data"], content["config"])

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return the rows as CSV with a header, one column per metric; write it if there is a path.

        Args:
            path: The file.
        """
        return rows_to_csv((*_KEYS, *self.metrics), self._tidy(), path)

    def to_dataframe(self) -> DataFrame:
        """Return the rows as a pandas data frame, one column per metric.

        Raises:
            ImportError: If pandas is not installed.
        """
        return rows_to_dataframe((*_KEYS, *self.metrics), self._tidy())

    def _tidy(self) -> list[list[Any]]:
        """The values of every row, in the order of the columns."""
        return [
            [*(getattr(row, key) for key in _KEYS)]
            + [self._value(row, metric) for metric in self.metrics]
            for row in self.rows
        ]

    def _value(self, row: ComparisonRow, metric: str) -> float:
        """Return one metric of a row, or say which there are."""
        if metric not in row.metrics:
            raise ValueError(
                f"Expected a metric among {tuple(row.metrics)}, got {metric!r}. Remedy: choose one "
                "of them, or run the comparison with the data it needs."
            )
        return row.metrics[metric]
