"""Results in, matplotlib axes out; needs the extra ``plots``."""

from importlib.util import find_spec

if find_spec("matplotlib") is None:
    raise ModuleNotFoundError(
        "Expected matplotlib for plots and reports, got an environment without it. Remedy: "
        "`pip install matplotlib` (or this package with its extra `plots`).",
        name="matplotlib",
    )

from laplace_debias.plots.comparison import (
    plot_bias,
    plot_calibration_budget,
    plot_comparison,
    plot_gap_cost,
)
from laplace_debias.plots.evaluation import (
    plot_band,
    plot_ood,
    plot_reliability,
    plot_risk_coverage,
    plot_sweep,
)
from laplace_debias.plots.quadratics import (
    plot_cg_runs,
    plot_directional_bias,
    plot_overlaps,
    plot_planes,
)
from laplace_debias.plots.runtimes import plot_runtimes
from laplace_debias.plots.series import plot_batch_sizes, plot_report, plot_series
from laplace_debias.plots.style import decades, style_of

__all__ = [
    "decades",
    "plot_band",
    "plot_batch_sizes",
    "plot_bias",
    "plot_calibration_budget",
    "plot_cg_runs",
    "plot_comparison",
    "plot_directional_bias",
    "plot_gap_cost",
    "plot_ood",
    "plot_overlaps",
    "plot_planes",
    "plot_reliability",
    "plot_report",
    "plot_risk_coverage",
    "plot_runtimes",
    "plot_series",
    "plot_sweep",
    "style_of",
]
