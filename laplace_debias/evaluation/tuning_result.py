"""What tuning tried: a grid of prior precisions and temperatures, and a prior per layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_debias.evaluation.sweep_result import SweepResult
from laplace_debias.storage.export import ExportedResult, text_table

__all__ = ["LayerwiseTrial", "TuningResult"]

SAME = 1e-3
"""Values that differ by less, in units of the best or of 1, are as good as each other."""


@dataclass(frozen=True)
class LayerwiseTrial:
    """A prior precision per parameter tensor, found on one half of the data, judged on the other.

    Attributes:
        prior_precisions: One per parameter tensor.
        seen: Objective on the half that chose them: with the scalar prior, and with these.
        held_out: The same on the other half, which decides.
        standard_error: Of the mean improvement on the other half.
        n_data: Number of data of both halves; fewer than were given if they did not fit.
    """

    prior_precisions: tuple[float, ...]
    seen: tuple[float, float]
    held_out: tuple[float, float]
    standard_error: float
    n_data: int

    @property
    def kept(self) -> bool:
        """Whether the other half confirmed it: it improved by more than a standard error.

        Example:
            >>> LayerwiseTrial((1.0, 2.0), (0.5, 0.3), (0.5, 0.49), 0.02, 100).kept
            False
        """
        return self.held_out[0] - self.held_out[1] > self.standard_error


@dataclass(frozen=True)
class TuningResult(ExportedResult):
    """What :func:`~laplace_debias.evaluation.tuning.tune` tried, and what it chose.

    Attributes:
        objective: Name of the metric.
        higher_is_better: Its direction.
        prior_precisions: The k prior precisions of the grid.
        logit_temperatures: Its t temperatures, smallest first.
        values: ``[k][t]``, the objective of every pair.
        plain: ``[t]``, that of the plain network with its logits divided by each temperature.
        n_data: Number of validation data.
        link_approx: The link approximation (``None`` for a regression).
        layerwise: The prior precision per layer that was tried, if one was.
        noise_scales: ``[k]``, by how much the ``sigma_noise`` of a regression is best multiplied
            at each prior precision, if it was tuned.

    Example:
        >>> values = ((0.5, 0.6), (0.3, 0.4), (0.35, 0.5))
        >>> result = TuningResult(
        ...     "nll", False, (0.1, 1.0, 10.0), (0.5, 1.0), values, (0.4, 0.6), 8, "probit"
        ... )
        >>> result.prior_precision.item(), result.logit_temperature, result.best
        (1.0, 0.5, 0.3)
    """

    objective: str
    higher_is_better: bool
    prior_precisions: tuple[float, ...]
    logit_temperatures: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]
    plain: tuple[float, ...]
    n_data: int
    link_approx: str | None
    layerwise: LayerwiseTrial | None = None
    noise_scales: tuple[float, ...] | None = None

    @property
    def best_index(self) -> tuple[int, int]:
        """Which prior precision and which temperature are best; never a pair with NaN.

        Raises:
            ValueError: If the objective is NaN everywhere.
        """
        pairs = [
            (self._loss(value), i, j)
            for i, row in enumerate(self.values)
            for j, value in enumerate(row)
            if not math.isnan(value)
        ]
        if not pairs:
            raise ValueError(
                f"Expected a number at some grid point, got NaN for {self.objective!r} at all of "
                "them. Remedy: check the model's outputs, and the fitted curvature."
            )
        _, i, j = min(pairs)
        return i, j

    @property
    def best(self) -> float:
        """The best value of the objective on the grid."""
        i, j = self.best_index
        return self.values[i][j]

    @property
    def prior_precision(self) -> Tensor:
        """What was chosen: a 0-d tensor, or one per parameter tensor if that was confirmed."""
        if self.layerwise is not None and self.layerwise.kept:
            return torch.tensor(self.layerwise.prior_precisions)
        return torch.tensor(self.prior_precisions[self.best_index[0]])

    @property
    def logit_temperature(self) -> float:
        """The temperature that was chosen."""
        return self.logit_temperatures[self.best_index[1]]

    @property
    def noise_scale(self) -> float:
        """By how much to multiply the ``sigma_noise`` of a regression; 1 if it was not tuned."""
        return 1.0 if self.noise_scales is None else self.noise_scales[self.best_index[0]]

    def with_trial(self, trial: LayerwiseTrial) -> TuningResult:
        """Return the same with a trial of a prior precision per layer."""
        return replace(self, layerwise=trial)

    def sweep(self, logit_temperature: float | None = None) -> SweepResult:
        """Return the sweep over prior precisions at one temperature, by default the best.

        Raises:
            ValueError: If the temperature is not one of the grid.
        """
        T = self.logit_temperature if logit_temperature is None else float(logit_temperature)
        if T not in self.logit_temperatures:
            raise ValueError(
                f"Expected a temperature of the grid, {list(self.logit_temperatures)}, got {T}. "
                "Remedy: choose one of them."
            )
        j = self.logit_temperatures.index(T)
        return SweepResult(
            torch.tensor(self.prior_precisions, dtype=torch.float64),
            {self.objective: tuple(row[j] for row in self.values)},
            {self.objective: self.higher_is_better},
            self.n_data,
            self.link_approx,
        )

    def warnings(self) -> list[str]:
        """What the user should know: a best value on an edge, or a plain network that is better."""
        i, j = self.best_index
        deltas, Ts = self.prior_precisions, self.logit_temperatures
        texts, plain = [], [v for v in self.plain if not math.isnan(v)]
        remedy = "(`prior_precisions=`)"
        top = len(deltas) > 1 and deltas[i] == max(deltas)
        lead = min(map(self._loss, plain), default=math.inf) - self._loss(self.best)
        if top and lead <= SAME * max(1.0, abs(self.best)):
            T = Ts[min(range(len(Ts)), key=lambda t: self._loss(self.plain[t]))]
            advice = f"; its logits are best divided by {T:.3g}"
            if self.link_approx is None:
                advice = (
                    " on such data. Elsewhere the posterior's uncertainty would be lost: take a "
                    "smaller prior precision if you care about inputs that are unlike these"
                )
            elif T < 1 or (T == 1 and len(Ts) == 1):
                advice = "; consider dividing the logits by a temperature below 1"
                advice += f" ({T:.3g} is the best of those tried)" if T < 1 else ""
            than = "better than" if lead <= 0 else "as good as"
            texts.append(
                f"The best {self.objective!r} lies at the largest prior precision, "
                f"{deltas[i]:.6g}: the plain network is {than} any of these posteriors{advice}."
            )
        elif len(deltas) > 1 and deltas[i] in (min(deltas), max(deltas)):
            side = "larger" if top else "smaller"
            texts.append(
                f"The best {self.objective!r} lies on the edge of the grid, at prior precision "
                f"{deltas[i]:.6g}: extend the grid to {side} values {remedy}."
            )
        if len(Ts) > 1 and Ts[j] in (Ts[0], Ts[-1]):
            side = "smaller" if j == 0 else "larger"
            texts.append(
                f"The best {self.objective!r} lies on the edge of the grid, at logit temperature "
                f"{Ts[j]:.3g}: extend the grid to {side} values (`logit_temperatures=`)."
            )
        return texts

    def table(self) -> str:
        """Return the grid as text: a line per prior precision, a column per temperature."""
        rows = [
            [f"{d:.6g}", *row] for d, row in zip(self.prior_precisions, self.values, strict=True)
        ]
        rows.append(["plain", *self.plain])
        head = ["prior_precision", *(f"T={T:.3g}" for T in self.logit_temperatures)]
        if self.noise_scales is not None:
            head = ["prior_precision", self.objective, "sigma_noise times"]
            rows = [[*r, s] for r, s in zip(rows[:-1], self.noise_scales, strict=True)]
            rows.append(["plain", *self.plain, "its best"])
        return text_table(head, rows, len(rows))

    def __str__(self) -> str:
        """Return what was chosen, in words, and the grid at the chosen temperature and at 1."""
        i, j = self.best_index
        words = [f"prior_precision={self.prior_precisions[i]:.6g}"]
        if self.link_approx is not None:
            words.append(f"logit_temperature={self.logit_temperature:.3g}")
        if self.noise_scales is not None:
            words.append(f"sigma_noise multiplied by {self.noise_scale:.4g}")
        trial = self.layerwise
        if trial is not None and trial.kept:
            each = ", ".join(f"{d:.4g}" for d in trial.prior_precisions)
            words[0] = f"a prior_precision per parameter tensor ({each})"
        plain = self.plain[min(range(len(self.plain)), key=lambda t: self._loss(self.plain[t]))]
        lines = [
            f"Chosen: {', '.join(words)}.",
            f"Validation {self.objective} of {self.n_data} data: {self.values[i][j]:.4g} with a "
            f"scalar prior precision; the plain network has {plain:.4g} at its best.",
        ]
        if trial is not None:
            lines.append(
                f"A prior precision per parameter tensor: {trial.held_out[1]:.4g} instead of "
                f"{trial.held_out[0]:.4g} on the half that judged, {'' if trial.kept else 'not '}"
                "taken."
            )
        return "\n".join([*lines, "", self._narrow().table()])

    def _narrow(self) -> TuningResult:
        """The same with the columns T = 1 and the chosen T alone."""
        wanted = {1.0, self.logit_temperature} & set(self.logit_temperatures)
        places = [j for j, T in enumerate(self.logit_temperatures) if T in wanted]

        def pick(row: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(row[j] for j in places)

        return replace(
            self, logit_temperatures=pick(self.logit_temperatures), plain=pick(self.plain),
            values=tuple(map(pick, self.values)),
        )  # fmt: skip

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """Return names of columns, and one row per pair; the plain network has no prior."""
        places = [*self.prior_precisions, None]
        rows = [
            [delta, T, value]
            for delta, row in zip(places, (*self.values, self.plain), strict=True)
            for T, value in zip(self.logit_temperatures, row, strict=True)
        ]
        return ["prior_precision", "logit_temperature", self.objective], rows

    def _loss(self, value: float) -> float:
        """The objective with the sign that makes small values good; NaN is the worst."""
        if math.isnan(value):
            return math.inf
        return -value if self.higher_is_better else value
