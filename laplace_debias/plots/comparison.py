"""Pictures of comparisons: methods against a reference, against budgets and against costs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
from numpy.typing import NDArray

from laplace_debias.comparison.result import ComparisonResult
from laplace_debias.comparison.rows import FITTED_ONCE, FULL, LARGE, LINES, Summary
from laplace_debias.debias.bias import CurvatureBias
from laplace_debias.debias.expected_bias import ExpectedBias
from laplace_debias.plots.style import COLUMN, decades, label_of, legend_below, style_of

__all__ = ["plot_bias", "plot_calibration_budget", "plot_comparison", "plot_gap_cost"]


def plot_comparison(
    result: ComparisonResult,
    metrics: Sequence[str] = ("accuracy", "nll", "ece"),
    axes: Any = None,
    *,
    baselines: bool = False,
) -> NDArray[np.object_]:
    """Draw metrics against the prior precision: a row per metric, a small panel per budget.

    The horizontal axis is the paper's beta, ``prior_precision / N``. The reference is a black line,
    the plain model a grey one. Every method is a line through the means over draws, in a band from
    the smallest to the largest. Metrics that differ by more than a factor of five have a
    logarithmic axis.

    Args:
        result: What ``compare`` returned.
        metrics: One row each.
        axes: Where to draw, ``[len(metrics), n_budgets]``; a new figure if not given.
        baselines: Whether to draw baselines that have a prior precision, too.

    Returns:
        The axes, ``[len(metrics), n_budgets]``.

    Example:
        >>> from laplace_debias.comparison.rows import ComparisonRow
        >>> rows = [ComparisonRow("full", 9, 9, 0, d, {"nll": 1 / d}) for d in (1.0, 2.0)]
        >>> axes = plot_comparison(ComparisonResult(tuple(rows), 9, {}), metrics=("nll",))
        >>> axes[0, 0].get_ylabel()
        'NLL'
    """
    drawn = [m for m in result.methods if m not in FITTED_ONCE]
    budgets = sorted({b for m in drawn for b in result.budgets(m)}) or [0]
    shape = (len(metrics), len(budgets))
    if axes is None:
        size = (max(COLUMN, 1.75 * shape[1] + 0.5), 1.7 * shape[0] + 0.5)
        axes = plt.subplots(
            *shape, figsize=size, layout="constrained", squeeze=False, sharex=True, sharey="row"
        )[1]
    panels = np.asarray(axes, dtype=object)
    if panels.size != shape[0] * shape[1]:
        raise ValueError(
            f"Expected {shape[0]} x {shape[1]} axes, a row per metric and a panel per budget, got "
            f"{panels.size}. Remedy: pass as many axes, or none."
        )
    panels = panels.reshape(shape)
    for row, metric in zip(panels, metrics, strict=True):
        points = result.summary(metric)
        for ax, budget in zip(row, budgets, strict=True):
            _panel(ax, result, points, budget, baselines)
        row[0].set_ylabel(label_of(metric))
        values = [p.mean for p in points]
        if min(values) > 0 and max(values) > 5 * min(values):
            row[0].set_yscale("log")
            decades(row[0].yaxis)
    for ax, budget in zip(panels[0], budgets, strict=True):
        ax.set_title(f"{budget} data" if budget else "", fontsize=9)
    for ax in panels[-1]:
        ax.set_xlabel(r"$\beta$ = prior precision / N")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    panels[0, 0].figure.legend(
        handles, labels, loc="outside lower center", frameon=False, fontsize=8, columnspacing=1.2,
        ncols=min(len(labels), 3 if shape[1] < 3 else 6), handlelength=2.2,
    )  # fmt: skip
    return panels


def _panel(
    ax: Axes, result: ComparisonResult, points: Sequence[Summary], budget: int, baselines: bool
) -> None:
    """Draw one metric of every method at one budget."""
    ax.set_xscale("log")
    ax.tick_params(labelsize=8)
    for number, method in enumerate(result.methods):
        once = method in FITTED_ONCE
        mine = [p for p in points if p.method == method and (once or p.budget == budget)]
        if not mine or (once and not baselines and method not in (*LINES, FULL, LARGE)):
            continue
        color, marker, line = style_of(method, number)
        if method in LINES:
            ax.axhline(mine[0].mean, color=color, linestyle=line, linewidth=1.2, label=method)
            continue
        mine.sort(key=lambda p: p.prior_precision or 0.0)
        beta = [(p.prior_precision or 0.0) / result.n_data for p in mine]
        label = f"{method} ({mine[0].budget} data)" if method == LARGE else method
        width = 2 if method in (FULL, LARGE) else 1.2
        ax.plot(
            beta, [p.mean for p in mine], line, color=color, linewidth=width, label=label,
            marker="" if method in (FULL, LARGE) else marker, markersize=3.5,
        )  # fmt: skip
        if not once:
            low, high = [p.min for p in mine], [p.max for p in mine]
            ax.fill_between(beta, low, high, color=color, alpha=0.25, linewidth=0)


def plot_calibration_budget(
    result: ComparisonResult, metric: str = "ece", ax: Axes | None = None
) -> Axes:
    """Draw a metric at the validated prior precision against the number of data.

    Args:
        result: What ``compare`` returned, with a ``val_loader``.
        metric: Which metric of the test data.
        ax: Where to draw; a new figure if not given.

    Returns:
        The axes. Means over draws, with bars from the smallest to the largest; what is fitted once
        is a horizontal line.
    """
    ax = plt.subplots(figsize=(COLUMN, 2.5), layout="constrained")[1] if ax is None else ax
    tuned = result.tuned()
    drawn = [m for m in result.methods if m not in FITTED_ONCE]
    for number, method in enumerate(result.methods):
        color, marker, line = style_of(method, number)
        rows = [row for row in tuned if row.method == method]
        if method in FITTED_ONCE:
            ax.axhline(
                rows[0].metrics[metric], color=color, linestyle=line, linewidth=1.2, label=method
            )
            continue
        groups: dict[int, list[float]] = {}
        for row in rows:
            groups.setdefault(row.budget, []).append(row.metrics[metric])
        xs = [b * 1.06 ** (drawn.index(method) - (len(drawn) - 1) / 2) for b in groups]
        means = [fmean(values) for values in groups.values()]
        bars = [
            [m - min(v) for m, v in zip(means, groups.values(), strict=True)],
            [max(v) - m for m, v in zip(means, groups.values(), strict=True)],
        ]
        ax.errorbar(
            xs, means, yerr=bars, color=color, marker=marker, linestyle=line, markersize=4,
            linewidth=1.2, capsize=2, label=method,
        )  # fmt: skip
    ticks = sorted({b for m in drawn for b in result.budgets(m)})
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [str(b) for b in ticks])
    ax.set(xlabel="data behind the curvature", ylabel=label_of(metric))
    legend_below(ax)
    return ax


def plot_gap_cost(
    result: ComparisonResult,
    metric: str = "nll",
    cost: str = "backward",
    ax: Axes | None = None,
) -> Axes:
    """Draw the distance from the reference against what the fits cost.

    Args:
        result: What ``compare`` returned, with a reference.
        metric: Which metric's gap.
        cost: ``"backward"`` (passes) or ``"seconds"``.
        ax: Where to draw; a new figure if not given.

    Returns:
        The axes; the reference's own cost is a vertical line.

    Raises:
        ValueError: If no fit was made here, so that costs are unknown.
    """
    ax = plt.subplots(figsize=(COLUMN, 2.5), layout="constrained")[1] if ax is None else ax
    drawn = [m for m in result.methods if m not in FITTED_ONCE]
    known = 0
    for number, method in enumerate(drawn):
        color, marker, line = style_of(method, number)
        points = []
        for budget in result.budgets(method):
            costs = [row.cost[cost] for row in result.select(method, budget) if row.cost]
            if costs:
                points.append((fmean(costs), result.gap(metric, method, budget).gap))
        known += len(points)
        if points:
            xs, ys = zip(*points, strict=True)
            ax.plot(xs, ys, line, color=color, marker=marker, markersize=5, label=method)
    if not known:
        raise ValueError(
            "Expected rows with costs, got none. Remedy: run `compare` again, in a new folder."
        )
    reference = result.select(result.reference)[0].cost
    if reference:
        ax.axvline(reference[cost], color="black", linewidth=1, linestyle=":", label="reference")
    words = {"backward": "backward passes", "seconds": "seconds"}
    ax.set(xscale="log", yscale="log", xlabel=words[cost], ylabel=f"gap in {label_of(metric)}")
    decades(ax.xaxis)
    decades(ax.yaxis)
    legend_below(ax)
    return ax


def plot_bias(bias: CurvatureBias | ExpectedBias, ax: Axes | None = None) -> Axes:
    """Draw how many times too large a mini-batch finds the top curvature, a bar per layer.

    Args:
        bias: What ``la.curvature_bias()`` measured, or ``la.expected_bias(batch)`` expects.
        ax: Where to draw; a new figure if not given.

    Returns:
        The axes. Of an expected bias a weight has two bars, plain for its output factor and hatched
        for its input factor; a factor of too few rows to foretell anything has none.

    Example:
        >>> from laplace_debias.debias.expected_bias import FactorBias
        >>> factor = FactorBias("0.weight", "B", 8, 4, 6.0, 3.0, 1.5)
        >>> len(plot_bias(ExpectedBias((factor,), 8)).patches)
        1
    """
    bars: list[tuple[str, float, bool]] = []
    if isinstance(bias, CurvatureBias):
        bars = [(layer.name, layer.top_ratio, False) for layer in bias.layers]
    else:
        for f in bias.factors:
            name = f"{f.name} {f.factor}{'' if f.trusted else ' (too few rows)'}"
            bars.append((name, f.overestimation if f.trusted else 1.0, f.factor == "A"))
    height = max(1.6, 0.2 * len(bars) + 0.8)
    ax = plt.subplots(figsize=(COLUMN, height), layout="constrained")[1] if ax is None else ax
    for place, (_, value, hatched) in enumerate(bars):
        ax.barh(
            place, value - 1, left=1, color="#E69F00", edgecolor="black", linewidth=0.5,
            hatch="////" if hatched else None,
        )  # fmt: skip
    ax.axvline(1, color="black", linewidth=1)
    ax.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize=7)
    ax.invert_yaxis()
    if max((value for _, value, _ in bars), default=1) > 5:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("top curvature, mini-batch / other data")
    return ax
