"""Results in, matplotlib axes out; needs the extra ``plots``."""

from laplace_debias.plots.evaluation import plot_comparison, plot_reliability, plot_runtimes
from laplace_debias.plots.quadratics import (
    plot_cg_runs,
    plot_directional_bias,
    plot_overlaps,
    plot_planes,
)
from laplace_debias.plots.series import plot_batch_sizes, plot_report, plot_series

__all__ = [
    "plot_batch_sizes",
    "plot_cg_runs",
    "plot_comparison",
    "plot_directional_bias",
    "plot_overlaps",
    "plot_planes",
    "plot_reliability",
    "plot_report",
    "plot_runtimes",
    "plot_series",
]
