"""Pictures of the studies: results in, matplotlib figures out. Needs matplotlib.

One marker and colour per role, told apart without colour too: orange discs for the data that chose
the directions (biased), small blue dots for other data, black crosses for all data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullFormatter

from laplace_debias.quadratics.bias import DirectionalBias
from laplace_debias.quadratics.overlaps import EigenspaceOverlaps
from laplace_debias.quadratics.restriction import RestrictedQuadratic
from laplace_debias.quadratics.trajectory import TrajectoryMetrics

BIASED, OTHER, EXACT = "#E69F00", "#0072B2", "#000000"
LABELS = {
    "slopes": "directional slope",
    "curvatures": "directional curvature",
    "magnitudes": r"update magnitude $\tau_p$",
}


def plot_planes(
    minibatch: Sequence[RestrictedQuadratic],
    full: Sequence[RestrictedQuadratic],
    *,
    levels: int = 6,
) -> Figure:
    """Draw mini-batch quadratics and the full-batch one in each mini-batch's top plane.

    Args:
        minibatch: Quadratics restricted to their own top two eigenvectors.
        full: The full-batch quadratic restricted to the same planes.
        levels: Number of contour lines.

    Returns:
        A figure with one panel per plane; lines of both quadratics are at the same heights above
        their values at ``theta_0``.
    """
    figure, axes = plt.subplots(
        1,
        len(minibatch),
        figsize=(2.3 * len(minibatch), 2.7),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    top = max(float(q.curvatures().max()) for q in minibatch)
    height = 0.5 * top
    weakest = min(max(float(q.curvatures().min()), 0.05 * top) for q in full)
    extent = min(1.15 * (2 * height / weakest) ** 0.5, 4.0)
    grid = torch.linspace(-extent, extent, 161).to(minibatch[0].matrix)
    tau = torch.stack(torch.meshgrid(grid, grid, indexing="xy"), -1)
    lines = np.linspace(0, 1, levels + 1)[1:] ** 2 * height
    xy = grid.numpy()
    for m, (one, everything, axis) in enumerate(zip(minibatch, full, axes[0], strict=True)):
        for q, color, style in ((everything, EXACT, "dashed"), (one, BIASED, "solid")):
            z = 0.5 * torch.einsum("...i,ij,...j->...", tau, q.matrix, tau) + tau @ q.gradient
            axis.contour(xy, xy, z.numpy(), lines, colors=color, linestyles=style, linewidths=1.1)
        axis.plot(0, 0, "o", color="black", markersize=4)
        axis.set_title(f"mini-batch {m}", fontsize=9)
        axis.set_xlabel(r"$\tau_1$ along $u_1$")
        axis.set_aspect("equal")
    axes[0, 0].set_ylabel(r"$\tau_2$ along $u_2$")
    handles = [
        Line2D([], [], color=BIASED, label="the mini-batch's quadratic"),
        Line2D([], [], color=EXACT, linestyle="dashed", label="full-batch quadratic"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def plot_directional_bias(
    bias: DirectionalBias,
    kinds: Sequence[str] = ("slopes", "curvatures"),
    *,
    first: int | None = None,
    title: str | None = None,
    whole: str | None = None,
) -> Figure:
    """Draw values on the same, all other and all data: a column per mini-batch, a row per kind.

    Slopes along eigenvectors are sorted, with the sign of the direction chosen so that those of the
    same mini-batch are positive (an eigenvector has no sign of its own).

    Args:
        bias: The study.
        kinds: Among ``"slopes"``, ``"curvatures"`` and ``"magnitudes"``.
        first: Draw the first directions only.
        title: Title of the figure.
        whole: What the average of the mini-batches is called; ``None``: all data.
    """
    columns = len(bias.chosen)
    figure, axes = plt.subplots(
        len(kinds),
        columns,
        figsize=(2.8 * columns + 0.4, 2.2 * len(kinds) + 0.5),
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for row, kind in zip(axes, kinds, strict=True):
        for column, axis in enumerate(row):
            draw_roles(axis, bias, kind, column, first, whole)
        row[0].set_ylabel(LABELS[kind])
    for s, axis in zip(bias.chosen, axes[0], strict=True):
        axis.set_title(f"directions from mini-batch {s}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("direction $p$")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def draw_roles(
    axis: Axes,
    bias: DirectionalBias,
    kind: str,
    column: int,
    first: int | None,
    whole: str | None = None,
) -> None:
    """Draw one mini-batch's values on the same, other and all data into an axis."""
    same, others, full = (
        value[column].double()[..., :first]
        for value in (bias.same(kind), bias.others(kind), bias.full(kind))
    )
    if kind == "slopes" and bias.directions == "eigenvectors":
        sign, order = same.sign(), same.abs().argsort(descending=True)
        same, others, full = ((sign * value)[..., order] for value in (same, others, full))
    p = np.arange(1, same.shape[-1] + 1)
    axis.plot(
        np.tile(p, len(others)),
        others.flatten().numpy(),
        ".",
        color=OTHER,
        markersize=2.5,
        alpha=0.35,
        label="other mini-batches",
        rasterized=True,
    )
    axis.plot(
        p,
        same.numpy(),
        "o",
        color=BIASED,
        markersize=4,
        markeredgecolor="black",
        markeredgewidth=0.3,
        label="same mini-batch",
    )
    if whole is None:
        whole = "average of all mini-batches" if bias.curvature == "kfac" else "all data"
    axis.plot(p, full.numpy(), "x", color=EXACT, markersize=4, label=whole)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if kind == "curvatures" and bool((torch.cat([same, full]) > 0).all()):
        axis.set_yscale("log")
        axis.set_ylim(bottom=0.2 * float(torch.cat([same, full]).min()))
    else:
        axis.axhline(0, color="grey", linewidth=0.6)
        sizes = same[torch.isfinite(same)].abs()
        size = max(float(sizes.median()), 1e-12) if len(sizes) else 1.0
        threshold = 10.0 ** np.ceil(np.log10(size))  # a power of ten keeps the ticks apart
        axis.set_yscale("symlog", linthresh=threshold)


def plot_overlaps(result: EigenspaceOverlaps) -> Figure:
    """Draw eigenspace overlaps as grey images: black for 1e-8 and below, white for 1."""
    S = len(result.overlaps)
    figure, axes = plt.subplots(
        S,
        S,
        figsize=(1.7 * S + 1.2, 1.7 * S + 0.3),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    K = result.overlaps.shape[-1]
    for i, row in enumerate(axes):
        for j, axis in enumerate(row):
            image = result.overlaps[i, j].double().clamp(min=1e-8).log10().numpy()
            extent = (0.5, K + 0.5, K + 0.5, 0.5)
            drawn = axis.imshow(image, cmap="gray", vmin=-8, vmax=0, extent=extent)
            axis.set_title(f"$m = {i}$, $m' = {j}$", fontsize=8)
            axis.locator_params(nbins=4, integer=True)
    figure.supxlabel(r"eigenvector $p$ of mini-batch $m'$", fontsize=9)
    figure.supylabel(r"eigenvector $i$ of mini-batch $m$", fontsize=9)
    figure.colorbar(drawn, ax=axes, label=r"$\log_{10}\, \Omega_{i,p}$", shrink=0.8)
    return figure


def plot_cg_runs(
    runs: Mapping[str, Sequence[tuple[TrajectoryMetrics, TrajectoryMetrics]]],
    *,
    title: str | None = None,
    axes: Sequence[Axes] | None = None,
) -> Figure:
    """Draw training and test loss and accuracy along CG runs, with a mark where each is best.

    Args:
        runs: For each name (drawn in its own colour and line style) the runs, each a pair of
            training and test metrics.
        title: Title over the four panels.
        axes: Four axes to draw into; ``None`` makes a figure.
    """
    if axes is None:
        axes = plt.subplots(1, 4, figsize=(11, 2.6), layout="constrained")[1]
    figure: Figure = axes[0].figure.figure  # a sub-figure's own figure is the whole one
    styles = ((BIASED, "-", "D"), (OTHER, "--", "o"), (EXACT, ":", "s"), ("#CC79A7", "-.", "^"))
    panels = [(s, m) for s in (0, 1) for m in ("loss", "accuracy")]
    for axis, (split, metric) in zip(axes, panels, strict=True):
        for (name, pairs), (color, style, marker) in zip(runs.items(), styles, strict=False):
            for number, pair in enumerate(pairs):
                values = getattr(pair[split], metric).double()
                best = pair[split].best() if metric == "loss" else values.nan_to_num(-1).argmax()
                axis.plot(
                    values.numpy(),
                    style,
                    color=color,
                    linewidth=1.1,
                    alpha=0.85,
                    label=name if number == 0 else None,
                )
                axis.plot(
                    int(best),
                    float(values[best]),
                    marker,
                    color=color,
                    markersize=5,
                    markeredgecolor="black",
                    markeredgewidth=0.4,
                )
        axis.set_xlabel("CG iteration")
        axis.set_title(f"{('training', 'test')[split]} {metric}", fontsize=9)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        low, high = axis.get_ylim()
        if metric == "loss" and max(low, 0) * 5 < high:
            axis.set_yscale("log")
            axis.yaxis.set_minor_formatter(NullFormatter())
    axes[1].legend(frameon=False, fontsize=8, loc="lower left")
    if title:
        axes[0].set_ylabel(title, fontsize=9)
    return figure
