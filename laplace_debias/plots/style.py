"""One colour, marker and line per method, told apart in greyscale; names of metrics."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.colors import to_rgb
from matplotlib.ticker import LogLocator, NullFormatter

from laplace_debias.comparison.rows import (
    AUTO,
    CROSSFIT,
    DIAGONAL,
    FULL,
    LARGE,
    LAST_LAYER,
    PLAIN,
    PRIOR_ONLY,
    SINGLE,
    TEMPERATURE,
    TWO_BATCH,
)

__all__ = ["COLUMN", "decades", "label_of", "legend_below", "lighten", "style_of"]

COLUMN = 3.4
"""Width of a column of text, in inches."""
_STYLES = {
    SINGLE: ("#E69F00", "s", "--"),
    TWO_BATCH: ("#0072B2", "o", "-"),
    CROSSFIT: ("#009E73", "^", "-."),
    AUTO: ("#D55E00", "D", ":"),
    FULL: ("black", "x", "-"),
    LARGE: ("black", "x", "-"),
    PLAIN: ("0.45", "", "--"),
    TEMPERATURE: ("0.45", "", ":"),
    LAST_LAYER: ("#56B4E9", "v", "-."),
    DIAGONAL: ("#CC79A7", "P", ":"),
    PRIOR_ONLY: ("#8c6d31", "X", "--"),
}
_OTHERS = (("#a6611a", "h", "-"), ("#5e3c99", "v", "--"), ("#4d4d4d", "P", ":"))
_LABELS = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "adaptive_ece": "adaptive ECE",
    "classwise_ece": "class-wise ECE",
    "brier": "Brier",
    "auroc": "AUROC",
    "fpr95": "FPR95",
    "aurc": "AURC",
    "crps": "CRPS",
    "rmse": "RMSE",
}


def style_of(method: str, number: int = 0) -> tuple[str, str, str]:
    """Colour, marker and line style of a method; others get one by their number.

    Example:
        >>> style_of("two-batch")
        ('#0072B2', 'o', '-')
    """
    return _STYLES.get(method, _OTHERS[number % len(_OTHERS)])


def label_of(metric: str) -> str:
    """Name of a metric for an axis; a prefix such as ``ood_`` stays in words.

    Example:
        >>> label_of("nll"), label_of("ood_auroc"), label_of("val_adaptive_ece")
        ('NLL', 'AUROC (ood)', 'adaptive ECE (val)')
    """
    for name in sorted(_LABELS, key=len, reverse=True):
        if metric == name:
            return _LABELS[name]
        if metric.endswith(f"_{name}"):
            return f"{_LABELS[name]} ({metric[: -len(name) - 1]})"
    return metric


def lighten(color: str, amount: float) -> tuple[float, ...]:
    """Mix a colour with white; 0 leaves it, 1 is white.

    Example:
        >>> [float(part) for part in lighten("black", 0.5)]
        [0.5, 0.5, 0.5]
    """
    return tuple(np.asarray(to_rgb(color)) * (1 - amount) + amount)


def legend_below(ax: Axes, ncols: int = 3) -> None:
    """Put the legend under the axes, where it covers no curve.

    Example:
        >>> import matplotlib.pyplot as plt
        >>> ax = plt.subplots()[1]
        >>> _ = ax.plot([1, 2], label="line")
        >>> legend_below(ax)
        >>> ax.get_legend().get_texts()[0].get_text()
        'line'
    """
    ax.legend(
        frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=ncols,
        columnspacing=1.2, handlelength=2.2,
    )  # fmt: skip


def decades(axis: Axis) -> None:
    """Label a logarithmic axis at 1, 2 and 5 of every decade where it spans few, in plain numbers.

    Labels of a horizontal axis stand side by side and need more room: 1 and 3 of a decade there,
    unless it spans less than one.

    Example:
        >>> import matplotlib.pyplot as plt
        >>> ax = plt.subplots()[1]
        >>> ax.set_xscale("log")
        >>> decades(ax.xaxis)
    """
    low, high = sorted(axis.get_view_interval())
    few = low > 0 and high / low < 200
    subs = (1, 3) if isinstance(axis, XAxis) and high > 9 * low else (1, 2, 5)
    axis.set_major_locator(LogLocator(subs=subs if few else (1,)))
    axis.set_minor_formatter(NullFormatter())
    if few:
        axis.set_major_formatter("{x:g}")
