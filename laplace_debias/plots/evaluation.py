"""Results in, matplotlib axes out: reliability, sweeps, selective risk, entropies, bands.

Needs the extra ``plots`` (matplotlib); nothing else in the package imports this module. What is
compared differs in lines, markers or hatches as well as in colour, to survive greyscale.
"""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from laplace_debias.evaluation.reports import ClassificationReport, ReliabilityBins
from laplace_debias.evaluation.selective import RiskCoverage
from laplace_debias.evaluation.sweep_result import SweepResult
from laplace_debias.evaluation.tuning_result import TuningResult
from laplace_debias.plots.style import (
    COLUMN,
    decades,
    label_of,
    legend_below,
    lighten,
    style_of,
)

__all__ = [
    "plot_band",
    "plot_ood",
    "plot_reliability",
    "plot_risk_coverage",
    "plot_sweep",
]


def _axes(ax: Axes | None, height: float = 2.5) -> Axes:
    """The given axes, or those of a new figure, one column wide."""
    return plt.subplots(figsize=(COLUMN, height), layout="constrained")[1] if ax is None else ax


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
    ax = _axes(ax, COLUMN)
    total = max(sum(bins.count), 1)
    columns = (bins.lower, bins.upper, bins.confidence, bins.accuracy, bins.count)
    for low, high, confidence, accuracy, count in zip(*columns, strict=True):
        if count == 0:
            continue
        shade = lighten("tab:blue", 0.75 - 0.65 * count / total)
        ax.bar(
            low, accuracy, max(high - low, 0.01), align="edge", color=shade, edgecolor="tab:blue"
        )
        ax.plot(confidence, accuracy, "o", color="black", ms=3.5)
    ax.plot([0, 1], [0, 1], "--", color="gray", linewidth=1)
    ax.set(xlim=(0, 1.015), ylim=(0, 1.02), xlabel="confidence", ylabel="accuracy")
    ax.set_title(f"ECE {bins.calibration_error:.3f}", fontsize=9)
    return ax


def plot_sweep(
    result: SweepResult | TuningResult, metric: str = "nll", ax: Axes | None = None
) -> Axes:
    """Draw a metric against the prior precision, with the chosen point.

    A tuning result has a solid curve at the best temperature, a dotted one at 1, and the plain
    network at the best temperature as a grey line.

    Args:
        result: A sweep over scalar prior precisions, or what ``la.tune`` returned.
        metric: Which metric of a sweep; a tuning result has its own.
        ax: Where to draw; a new figure if not given.

    Returns:
        The axes.

    Example:
        >>> import torch
        >>> grid = torch.tensor([0.1, 1.0, 10.0])
        >>> sweep = SweepResult(grid, {"nll": (0.5, 0.3, 0.4)}, {"nll": False}, 8, "probit")
        >>> plot_sweep(sweep).get_xlabel()
        'prior precision'
    """
    ax = _axes(ax)
    if isinstance(result, TuningResult):
        metric, (i, j) = result.objective, result.best_index
        Ts, deltas = result.logit_temperatures, result.prior_precisions
        shown = {j, min(range(len(Ts)), key=lambda t: abs(Ts[t] - 1))}
        for t in sorted(shown):
            values = [row[t] for row in result.values]
            style = "-" if t == j else ":"
            label = f"$T$ = {Ts[t]:.3g}" if len(Ts) > 1 else "posterior"
            ax.plot(deltas, values, style, marker=".", color="#0072B2", label=label)
        name = "plain" if len(Ts) == 1 else f"plain, $T$ = {Ts[j]:.3g}"
        ax.axhline(result.plain[j], color="0.45", linestyle="--", linewidth=1, label=name)
        chosen = (deltas[i], result.best)
        logs = [value for t in shown for value in (row[t] for row in result.values)]
    else:
        best = result.best_index(metric)
        deltas = tuple(result.prior_precisions.tolist())
        logs = list(result.values[metric])
        ax.plot(deltas, logs, "-", marker=".", color="#0072B2", label=label_of(metric))
        chosen = (deltas[best], logs[best])
    ax.plot(*chosen, "D", color="#D55E00", mec="black", ms=7, zorder=5, label="chosen")
    if min(logs) > 0 and max(logs) > 5 * min(logs):
        ax.set_yscale("log")
        decades(ax.yaxis)
    ax.set(xscale="log", xlabel="prior precision", ylabel=label_of(metric))
    legend_below(ax, 2)
    return ax


def plot_risk_coverage(
    curves: Mapping[str, RiskCoverage], ax: Axes | None = None, risk: str = "error rate"
) -> Axes:
    """Draw the risk of the most confident data against the share of data answered.

    Args:
        curves: What :func:`~laplace_debias.evaluation.selective.risk_coverage` returned, by name.
        ax: Where to draw; a new figure if not given.
        risk: What the risk is.

    Returns:
        The axes; the legend tells the area under each curve.

    Example:
        >>> import torch
        >>> curve = RiskCoverage(torch.tensor([0.5, 1.0]), torch.tensor([0.0, 0.5]))
        >>> plot_risk_coverage({"plain": curve}).get_legend().get_texts()[0].get_text()
        'plain (AURC 0.25)'
    """
    ax = _axes(ax)
    for number, (name, curve) in enumerate(curves.items()):
        color, _, line = style_of(name, number)
        label = f"{name} (AURC {curve.area:.3g})"
        x, y = curve.coverage.cpu().numpy(), curve.risk.cpu().numpy()
        ax.plot(x, y, color=color, linestyle=line, linewidth=1.5, label=label)
    ax.set(xlim=(0, 1), xlabel="share of data answered", ylabel=risk)
    ax.set_ylim(bottom=0)
    legend_below(ax, 1)
    return ax


def plot_ood(
    id_entropies: Tensor,
    ood_entropies: Tensor,
    ax: Axes | None = None,
    *,
    n_bins: int = 25,
    title: str | None = None,
) -> Axes:
    """Draw histograms of predictive entropy in and out of distribution.

    Args:
        id_entropies: Of in-distribution data, ``[N]``, in nats.
        ood_entropies: Of data out of distribution, ``[M]``.
        ax: Where to draw; a new figure if not given.
        n_bins: Number of bins.
        title: Title of the panel.

    Returns:
        The axes. In-distribution data are filled, the others hatched with a black outline.

    Example:
        >>> import torch
        >>> ax = plot_ood(torch.rand(50), 1 + torch.rand(20))
        >>> ax.get_xlabel()
        'predictive entropy (nats)'
    """
    ax = _axes(ax)
    inside, outside = (e.detach().double().cpu().numpy() for e in (id_entropies, ood_entropies))
    edges = np.linspace(0, max(inside.max(), outside.max(), 1e-9), n_bins + 1).tolist()
    shares = [np.full(len(values), 1 / len(values)) for values in (inside, outside)]
    ax.hist(inside, edges, weights=shares[0], color="#9ecae1", label="in distribution")
    ax.hist(
        outside, edges, weights=shares[1], histtype="step", color="black", hatch="////",
        linewidth=1, label="out of distribution",
    )  # fmt: skip
    ax.set(xlabel="predictive entropy (nats)", ylabel="share of data")
    legend_below(ax, 2)
    if title:
        ax.set_title(title, fontsize=9)
    return ax


def plot_band(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    noise: float = 0.0,
    data: tuple[Tensor, Tensor] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw a regression in one dimension with two standard deviations.

    Args:
        x: Inputs, ``[n]`` or ``[n, 1]``, in any order.
        mean: Predictive means, ``[n]`` or ``[n, 1]``.
        variance: Variances of the functions, with as many elements.
        noise: Standard deviation of the observation noise.
        data: Training inputs and targets to draw as dots.
        ax: Where to draw; a new figure if not given.

    Returns:
        The axes: the mean as a line, the model's uncertainty as a dark band, noise included as a
        light one.

    Example:
        >>> import torch
        >>> x = torch.linspace(0, 1, 5)
        >>> len(plot_band(x, x, torch.ones(5), noise=0.5).collections)
        2
    """
    ax = _axes(ax)
    parts = (part.detach().double().cpu().flatten() for part in (x, mean, variance))
    places, middle, spread = (part.numpy() for part in parts)
    order = places.argsort()
    places, middle, spread = places[order], middle[order], spread[order]
    if noise:
        wide = 2 * np.sqrt(spread + noise**2)
        ax.fill_between(places, middle - wide, middle + wide, color="0.88", label="with noise")
    wide = 2 * np.sqrt(spread)
    ax.fill_between(places, middle - wide, middle + wide, color="0.68", label="model")
    ax.plot(places, middle, color="#0072B2", linewidth=1.5, label="mean")
    if data is not None:
        X, y = (part.detach().cpu().flatten().numpy() for part in data)
        ax.plot(X, y, ".", color="black", ms=3, label="data")
    ax.set(xlabel="$x$", ylabel="$y$")
    legend_below(ax, 2)
    return ax
