"""The picture of the laboratory: distance to the full batch against seconds, all methods."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from laplace_debias.plots import decades, style_of

NAMED = {
    "single": "single",
    "two-batch": "two-batch",
    "crossfit": "crossfit",
    "crossfit + curvature": "crossfit, curvature sampling",
    "crossfit + curvature, one vector": "the same, one vector per datum",
    "auto": "auto",
}
"""Methods of the library, and what they are called; all others lost, and are grey."""


def draw_seconds(
    title: str,
    rows: list[dict],
    path: Path | None = None,
    bar: tuple[str, int] = ("two-batch", 2304),
) -> Figure:
    """Distance on test and far inputs against seconds of the fits, a point per number of passes.

    Args:
        title: Name of the problem.
        rows: Cells with ``method``, ``P``, ``seconds``, ``test`` and ``far``.
        path: Where the picture goes.
        bar: Method and passes whose seconds are marked, if there are such cells.
    """
    figure, axes = plt.subplots(1, 2, figsize=(8, 4.6), sharey=True, layout="constrained")
    methods = dict.fromkeys(r["method"] for r in rows)
    lost = [name for name in methods if name not in NAMED]
    for ax, key in zip(axes, ("test", "far"), strict=True):
        for number, name in enumerate([*lost, *(name for name in NAMED if name in methods)]):
            own = [r for r in rows if r["method"] == name]
            points = []
            for P in dict.fromkeys(r["P"] for r in own):
                found = [r for r in own if r["P"] == P]
                points.append([mean(r[k] for r in found) for k in ("seconds", key)])
            x, y = zip(*points, strict=True)
            if name in lost:
                label = "not in the library" if name == lost[0] else None
                ax.plot(x, y, color="0.8", marker=".", markersize=3, lw=0.9, label=label)
                continue
            color, marker, line = style_of(name, number)
            width = 2.2 if name == "auto" else 1.2
            ax.plot(x, y, line, color=color, marker=marker, ms=5, lw=width, label=NAMED[name])
        marked = [r["seconds"] for r in rows if (r["method"], r["P"]) == bar]
        if marked:
            ax.axvline(mean(marked), color="0.4", lw=0.8, ls=(0, (1, 2)))
        ax.set(
            xscale="log", yscale="log", xlabel="seconds of a fit", title=f"{title}, {key} inputs"
        )
        decades(ax.yaxis)
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.grid(alpha=0.2)
    axes[0].set_ylabel("distance to the full batch")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    if path is not None:
        figure.savefig(path, dpi=130)
        plt.close(figure)
    return figure
