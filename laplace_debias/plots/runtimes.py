"""Bars of seconds, by method and stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from laplace_debias.plots.style import lighten

__all__ = ["plot_runtimes"]


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
        color = "dimgray" if column == "total" else lighten("tab:blue", 0.25 * (i % 4))
        ax.bar(
            xs, means, 0.92 * width, yerr=errors, color=color, hatch=hatches[i % len(hatches)],
            edgecolor="white", ecolor="black", capsize=2, label=column,
        )  # fmt: skip
    ax.set_xticks(range(len(runtimes)), list(runtimes))
    ax.set(ylabel="seconds", yscale="log" if log else "linear")
    ax.legend(frameon=False, ncols=2)
    return ax
