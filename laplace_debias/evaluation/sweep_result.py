"""What a prior-precision sweep returns: a grid, a value per metric and point, and the best."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from laplace_debias.storage.export import ExportedResult, text_table

__all__ = ["SweepResult"]

_FLAT = 0.01
"""Relative change of a metric that tells a curve which has come to its end."""


@dataclass(frozen=True)
class SweepResult(ExportedResult):
    """Metrics over a grid of prior precisions.

    Attributes:
        prior_precisions: The grid, ``[k]``, or ``[k, n_blocks]`` if layer-wise.
        values: One value per grid point for every metric.
        higher_is_better: The direction of every metric; ``None`` where there is none, as for an
            entropy.
        n_data: Number of data that the values are computed from.
        link_approx: The link approximation used (``None`` for regression).

    Example:
        >>> import torch
        >>> grid = torch.tensor([0.1, 1.0, 10.0])
        >>> nll = (0.5, 0.3, float("nan"))
        >>> result = SweepResult(grid, {"nll": nll}, {"nll": False}, 8, "probit")
        >>> result.best("nll").item(), result.nan_points("nll")
        (1.0, (2,))
    """

    prior_precisions: Tensor
    values: dict[str, tuple[float, ...]]
    higher_is_better: dict[str, bool | None]
    n_data: int
    link_approx: str | None

    def nan_points(self, metric: str) -> tuple[int, ...]:
        """Return the grid points whose value is NaN; :meth:`best` never chooses them."""
        return tuple(i for i, v in enumerate(self._of(metric)) if math.isnan(v))

    def best_index(self, metric: str = "nll") -> int:
        """Return the grid point with the best value.

        Warns when NaN points were left out, and when the best of scalar prior precisions is the
        smallest or the largest of them.

        Raises:
            ValueError: If the metric is unknown, has no direction, or is NaN everywhere.
        """
        values = self._of(metric)
        if self.higher_is_better[metric] is None:
            raise ValueError(
                f"Expected a metric that says whether large or small values are better, got "
                f"{metric!r}. Remedy: choose by another, such as 'nll'."
            )
        sign = -1 if self.higher_is_better[metric] else 1
        finite = [i for i, v in enumerate(values) if not math.isnan(v)]
        if not finite:
            raise ValueError(
                f"Expected a number at some grid point, got NaN for {metric!r} at all "
                f"{len(values)}. Remedy: check the model's outputs, and the fitted curvature."
            )
        if len(finite) < len(values):
            warnings.warn(
                f"{metric!r} is NaN at grid points {self.nan_points(metric)}, which are left out.",
                stacklevel=2,
            )
        best = min(finite, key=lambda i: sign * values[i])
        grid = self.prior_precisions
        if grid.ndim == 1 and len(grid) > 1 and grid[best] in (grid.min(), grid.max()):
            advice = "extend the grid to smaller values"
            if grid[best] == grid.max():
                advice = self._beyond(values, best)
            warnings.warn(
                f"The best {metric!r} lies on the edge of the grid, at prior precision "
                f"{grid[best].item():.6g}: {advice}.",
                stacklevel=2,
            )
        return best

    def _beyond(self, values: tuple[float, ...], best: int) -> str:
        """What to do if the largest prior precision is the best.

        A posterior can only soften: with a growing prior precision, predictions become those of the
        plain network. Where the last step changes little they are these already.
        """
        if self.link_approx is None:
            return "extend the grid to larger values"
        plain = (
            "the plain network is better than any of these posteriors: consider dividing the "
            "logits by a temperature below 1 (`la.logit_temperature`, which `la.tune` chooses)"
        )
        before = values[int(self.prior_precisions.argsort()[-2])]
        if abs(before - values[best]) <= _FLAT * abs(values[best]):
            return plain
        return f"extend the grid to larger values; if that does not help, {plain}"

    def best(self, metric: str = "nll") -> Tensor:
        """Return the best prior precision: a 0-d tensor, or ``[n_blocks]`` if layer-wise.

        Warns and raises as :meth:`best_index` does.
        """
        return self.prior_precisions[self.best_index(metric)]

    def table(self) -> str:
        """Return the grid and all values as text, one line per grid point."""
        values = zip(*self.values.values(), strict=True)
        rows = [[label, *row] for label, row in zip(self._labels(), values, strict=True)]
        return text_table(["prior_precision", *self.values], rows, len(rows))

    def __str__(self) -> str:
        """Return :meth:`table`."""
        return self.table()

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """Return names of columns, and one row per grid point."""
        grid = self.prior_precisions.reshape(len(self.prior_precisions), -1).tolist()
        heads = [f"prior_precision_{j}" for j in range(len(grid[0]))]
        heads = ["prior_precision"] if len(heads) == 1 else heads
        columns = zip(*self.values.values(), strict=True)
        rows = [[*point, *row] for point, row in zip(grid, columns, strict=True)]
        return [*heads, *self.values], rows

    def _of(self, metric: str) -> tuple[float, ...]:
        """Return a metric's values, or say which there are."""
        if metric not in self.values:
            raise ValueError(
                f"Expected a metric of this sweep, {list(self.values)}, got {metric!r}. "
                "Remedy: name it in sweep_prior_precision(..., metrics=...)."
            )
        return self.values[metric]

    def _labels(self) -> list[str]:
        """Return a short text for every grid point."""
        if self.prior_precisions.ndim == 1:
            return [f"{value:.6g}" for value in self.prior_precisions.tolist()]
        return [f"layer-wise {i}" for i in range(len(self.prior_precisions))]
