"""Results in, matplotlib axes out: the paper's figure, reliability diagrams and runtime bars.

Needs the extra ``plots`` (matplotlib); nothing else in the package imports this module. Methods
differ in colour *and* marker, so that the figures survive greyscale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

from laplace_debias.comparison.result import ComparisonResult
from laplace_debias.comparison.rows import FULL, LARGE, PLAIN, SINGLE, TWO_BATCH, Summary
from laplace_debias.evaluation.reports import ClassificationReport, ReliabilityBins

__all__ = ["plot_comparison", "plot_reliability", "plot_runtimes"]

_COLORS = {SINGLE: "tab:orange", TWO_BATCH: "tab:blue", FULL: "tab:green", LARGE: "tab:green"}
_MARKERS = {SINGLE: "s", TWO_BATCH: "o"}
_OTHERS = (("tab:purple", "^"), ("tab:brown", "D"), ("tab:pink", "v"))
_LABELS = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "brier": "Brier", "auroc": "AUROC"}


def _lighten(color: str, amount: float) -> tuple[float, ...]:
    """Mix a colour with white; 0 leaves it, 1 is white."""
    return tuple(np.asarray(to_rgb(color)) * (1 - amount) + amount)


def _label(metric: str) -> str:
    """Name of a metric for an axis; a prefix such as ``ood_`` stays in words."""
    prefix, _, name = metric.rpartition("_")
    known = _LABELS.get(name)
    return metric if known is None else f"{known} ({prefix})" if prefix else known


def _subplots(n: int) -> NDArray[np.object_]:
    """Make n axes side by side."""
    grid = plt.subplots(1, n, figsize=(4.6 * n, 3.6), layout="constrained", squeeze=False)[1]
    return np.asarray(grid[0])


def plot_comparison(
    result: ComparisonResult,
    metrics: Sequence[str] = ("accuracy", "nll", "ece"),
    axes: Sequence[Axes] | None = None,
) -> NDArray[np.object_]:
    """Draw the paper's figure: metrics against the prior precision, per method and budget.

    The horizontal axis is the paper's beta, ``prior_precision / N``. The plain model is a black
    line, the reference green crosses, single mini-batches orange squares, pairs of them blue dots;
    lighter means fewer data. A marker is the mean over draws, its bar reaches from the smallest to
    the largest.

    Args:
        result: What ``compare`` returned.
        metrics: One panel each.
        axes: Where to draw, one per metric; a new figure if not given.

    Returns:
        The axes, ``[len(metrics)]``.

    Example:
        >>> from laplace_debias.comparison.rows import ComparisonRow
        >>> rows = [ComparisonRow("full", 9, 9, 0, d, {"nll": 1 / d}) for d in (1.0, 2.0)]
        >>> axes = plot_comparison(ComparisonResult(tuple(rows), 9, {}), metrics=("nll",))
        >>> axes[0].get_ylabel()
        'NLL'
    """
    panels = _subplots(len(metrics)) if axes is None else np.asarray(axes).ravel()
    if len(panels) != len(metrics):
        raise ValueError(
            f"Expected {len(metrics)} axes, one per metric, got {len(panels)}. "
            "Remedy: pass as many axes as metrics, or none."
        )
    for ax, metric in zip(panels, metrics, strict=True):
        _comparison_panel(ax, result, metric)
    handles, labels = panels[0].get_legend_handles_labels()
    panels[0].figure.legend(
        handles, labels, loc="outside lower center", ncols=min(len(labels), 5), frameon=False
    )
    return panels


def _comparison_panel(ax: Axes, result: ComparisonResult, metric: str) -> None:
    """Draw one metric of every method."""
    curves: dict[tuple[str, int], list[Summary]] = {}
    for point in result.summary(metric):
        curves.setdefault((point.method, point.budget), []).append(point)
    # points of different curves at one prior precision stand side by side
    dodged = [key for key in curves if key[0] not in (PLAIN, FULL, LARGE)]
    offsets = dict(zip(dodged, np.linspace(-0.1, 0.1, max(len(dodged), 1)), strict=False))
    strangers = [m for m in result.methods if m not in (PLAIN, *_COLORS)]
    styles = {m: (_COLORS[m], _MARKERS.get(m, "x")) for m in _COLORS}
    styles |= {m: _OTHERS[i % len(_OTHERS)] for i, m in enumerate(strangers)}
    for (method, budget), points in curves.items():
        if method == PLAIN:
            ax.axhline(points[0].mean, color="black", linewidth=1, label=PLAIN)
            continue
        placed = [(p.prior_precision, p) for p in points if p.prior_precision is not None]
        placed.sort(key=lambda pair: pair[0])
        beta = np.array([delta / result.n_data for delta, _ in placed])
        points = [point for _, point in placed]
        mean = [point.mean for point in points]
        color, marker = styles[method]
        if method in (FULL, LARGE):
            label = method if method == FULL else f"{method} ({budget} data)"
            ax.plot(beta, mean, "x", color=color, ms=7, mew=2, zorder=4, label=label)
            continue
        budgets = result.budgets(method)
        fade = 0.65 * (1 - budgets.index(budget) / max(len(budgets) - 1, 1))
        shade = _lighten(color, fade if len(budgets) > 1 else 0.0)
        x = beta * 10 ** offsets[method, budget]
        low, high = ([getattr(point, end) for point in points] for end in ("min", "max"))
        ax.vlines(x, low, high, color=shade, linewidth=1.5)
        size = result.select(method, budget)[0].batch_size
        label = f"{method}, {size}" if size == budget else f"{method}, {budget // size} x {size}"
        ax.plot(x, mean, marker, color=shade, mec=_lighten(color, 0.0), mew=0.5, ms=5, label=label)
    ax.set(xscale="log", xlabel=r"prior precision $\beta$", ylabel=_label(metric))


def plot_reliability(
    report: ClassificationReport | ReliabilityBins, ax: Axes | None = None
) -> Axes:
    """Draw a reliability diagram: accuracy against confidence, bin by bin.

    Bars are the accuracy of each non-empty bin, dots its mean confidence and accuracy; perfect
    calibration is the dashed diagonal. A bar's shade shows its share of the data.

    Args:
        report: A report (its equal-width bins are drawn) or bins of either kind.
        ax: Where to draw; a new figure if not given.

    Returns:
        The axes.

    Example:
        >>> bins = ReliabilityBins((0.0, 0.5), (0.5, 1.0), (0.4, 0.9), (0.4, 0.7), (1, 3))
        >>> plot_reliability(bins).get_title()
        'ECE 0.150'
    """
    bins = report.bins if isinstance(report, ClassificationReport) else report
    if ax is None:
        ax = plt.subplots(figsize=(3.6, 3.6), layout="constrained")[1]
    total = max(sum(bins.count), 1)
    columns = (bins.lower, bins.upper, bins.confidence, bins.accuracy, bins.count)
    for low, high, confidence, accuracy, count in zip(*columns, strict=True):
        if count == 0:
            continue
        shade = _lighten("tab:blue", 0.75 - 0.65 * count / total)
        ax.bar(
            low, accuracy, max(high - low, 0.01), align="edge", color=shade, edgecolor="tab:blue"
        )
        ax.plot(confidence, accuracy, "o", color="black", ms=3.5)
    ax.plot([0, 1], [0, 1], "--", color="gray", linewidth=1)
    ax.set(xlim=(0, 1.015), ylim=(0, 1.02), xlabel="confidence", ylabel="accuracy")
    ax.set_title(f"ECE {bins.calibration_error:.3f}")
    return ax


def plot_runtimes(
    runtimes: Mapping[str, Mapping[str, Sequence[float]]],
    ax: Axes | None = None,
    log: bool = True,
) -> Axes:
    """Draw runtime bars: for each method its stages and their total.

    Args:
        runtimes: Seconds of every run by method and stage, e.g.
            ``{"two-batch": {"construct": [...], "debias": [...], "sample": [...]}}``.
        ax: Where to draw; a new figure if not given.
        log: Use a logarithmic axis. Bars stand side by side, since stacked ones would mislead.

    Returns:
        The axes. Bars are means over runs, error bars one standard deviation.

    Example:
        >>> plot_runtimes({"single": {"construct": [1.0, 2.0]}}).get_ylabel()
        'seconds'
    """
    if not runtimes:
        raise ValueError(
            "Expected runtimes of at least one method, got none. Remedy: time at least one method."
        )
    if ax is None:
        ax = plt.subplots(figsize=(1.5 + 1.9 * len(runtimes), 3.2), layout="constrained")[1]
    by_length = sorted(runtimes.values(), key=len, reverse=True)  # the most complete sets the order
    stages = list(dict.fromkeys(stage for times in by_length for stage in times))
    columns = [*stages, "total"]
    width = 0.8 / len(columns)
    hatches = ("", "//", "..", "xx", "\\\\")
    for i, column in enumerate(columns):
        xs, means, errors = [], [], []
        for position, times in enumerate(runtimes.values()):
            runs = times.get(column)
            if column == "total":
                runs = [sum(run) for run in zip(*times.values(), strict=True)]
            if runs:
                xs.append(position + (i - (len(columns) - 1) / 2) * width)
                means.append(fmean(runs))
                errors.append(stdev(runs) if len(runs) > 1 else 0.0)
        color = "dimgray" if column == "total" else _lighten("tab:blue", 0.25 * (i % 4))
        ax.bar(
            xs, means, 0.92 * width, yerr=errors, color=color, hatch=hatches[i % len(hatches)],
            edgecolor="white", ecolor="black", capsize=2, label=column,
        )  # fmt: skip
    ax.set_xticks(range(len(runtimes)), list(runtimes))
    ax.set(ylabel="seconds", yscale="log" if log else "linear")
    ax.legend(frameon=False, ncols=2)
    return ax
