"""Pictures of how the biases depend on the batch size, on training and on the model's size."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure

from laplace_debias.plots.quadratics import BIASED, EXACT, LABELS, OTHER, draw_roles
from laplace_debias.quadratics.batch_sizes import BatchSizeBias
from laplace_debias.quadratics.report import CurvatureBiasReport
from laplace_debias.quadratics.studies import BiasSeries


def plot_batch_sizes(study: BatchSizeBias, kind: str = "curvatures") -> Figure:
    """Draw values on the same, all other and all data, a panel per batch size."""
    columns = len(study.results)
    figure, axes = plt.subplots(
        1,
        columns,
        figsize=(2.5 * columns + 0.4, 2.9),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, size, bias in zip(axes[0], study.batch_sizes, study.results, strict=True):
        draw_roles(axis, bias, kind, 0, None)
        axis.set_title(f"batch size {size}", fontsize=9)
        axis.set_xlabel("direction $p$")
    bottoms = [
        float(torch.cat([bias.same(kind)[0], bias.full(kind)[0]]).min()) for bias in study.results
    ]
    if min(bottoms) > 0:
        axes[0, 0].set_ylim(bottom=0.2 * min(bottoms))
    axes[0, 0].set_ylabel(LABELS[kind])
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def plot_series(series: BiasSeries, kinds: Sequence[str] = ("slopes", "curvatures")) -> Figure:
    """Draw medians and quartiles of the relative biases over a series, one mark per draw."""
    figure, axes = plt.subplots(
        1, len(kinds), figsize=(3.5 * len(kinds), 2.8), squeeze=False, layout="constrained"
    )
    x = series.positions.double().numpy()
    for axis, kind in zip(axes[0], kinds, strict=True):
        low, middle, high = np.moveaxis(series.percentiles(kind).numpy(), -1, 0)  # [S, draws] each
        draws = middle.shape[1]
        for draw, shift in enumerate(np.linspace(-0.06, 0.06, draws) if draws > 1 else [0.0]):
            error = np.stack([middle[:, draw] - low[:, draw], high[:, draw] - middle[:, draw]])
            axis.errorbar(
                x * 10**shift,
                middle[:, draw],
                yerr=error,
                fmt="o",
                color=OTHER,
                markersize=3.5,
                linewidth=1,
                label=None if draw else "median and quartiles, a mark per draw",
            )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel(series.name)
        axis.set_title(LABELS[kind], fontsize=9)
        if len(x) <= 10:
            axis.set_xticks(x, _series_ticks(series), fontsize=8)
            axis.tick_params(axis="x", which="minor", bottom=False)
    axes[0, 0].set_ylabel("relative error, same / all data")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=9)
    return figure


def _series_ticks(series: BiasSeries) -> list[str]:
    """Name every member by its position, and by its label where that says more."""
    positions = [f"{position:,.0f}" for position in series.positions.tolist()]
    return [
        tick if tick == label else f"{tick}\n({label})"
        for tick, label in zip(positions, series.labels, strict=True)
    ]


def plot_report(report: CurvatureBiasReport) -> Figure:
    """Draw how far one mini-batch, and two, over-estimate the top curvatures, by batch size."""
    figure, axis = plt.subplots(figsize=(4.6, 3.1), layout="constrained")
    k = report.same.shape[-1]
    for estimate, color, name in (("same", BIASED, "one mini-batch"), ("other", OTHER, "debiased")):
        for top, style, marker in ((1, "-", "o"), (None, "--", "s")):
            axis.plot(
                report.batch_sizes,
                report.overestimation(estimate, top=top).numpy(),
                style,
                color=color,
                marker=marker,
                markersize=5,
                label=f"{name}, top {top or k}",
            )
    axis.axhspan(1 - report.tolerance, 1 + report.tolerance, color="0.9", label="tolerance")
    axis.axhline(1, color=EXACT, linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(report.batch_sizes, [str(size) for size in report.batch_sizes])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("batch size")
    axis.set_ylabel("estimated / true curvature")
    axis.legend(frameon=False, fontsize=8)
    return figure
