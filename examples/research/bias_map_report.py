"""What the map of biases says, in numbers and in one figure; see ``bias_map``."""

# %% Imports
from __future__ import annotations

import math
from pathlib import Path
from statistics import median

import torch

from laplace_debias.debias.expected_bias import MIN_EFFECTIVE_ROWS

CHOSEN, HELD_OUT, LAST = "used to choose the rule", "held out", "held out from its limit, too"
OTHER = "other data and architectures"
METHODS = ("single", "two-batch", "crossfit", "auto")
WITHIN = 1.5


# %% Numbers
def mean(row: dict, key: str) -> float:
    """Mean over the draws."""
    return sum(draw[key] for draw in row["draws"]) / len(row["draws"])


def ratio(row: dict) -> float:
    """Effective rows over effective dimension, the harmonic mean over the draws."""
    return len(row["draws"]) / sum(draw["D"] / draw["rows"] for draw in row["draws"])


def overestimation(row: dict, which: str) -> float:
    """Ratio of mean shares.

    Of the top direction (``top``), or of all by their curvature (``all``).
    """
    return mean(row, which) / mean(row, f"{which}, others")


def prediction(row: dict, key: str = "predicted", share: str = "all") -> float:
    """The same from each mini-batch alone: its share over its predicted share, means of both."""
    predicted = [draw[share] / draw[key] for draw in row["draws"]]
    return mean(row, share) * len(predicted) / sum(predicted)


def verdict(rows: list[dict], which: str, key: str = "predicted") -> tuple[float, float, float]:
    """Share of factors predicted within a factor 1.5, and the smallest and largest quotient."""
    share = "top" if key == "random-matrix" else "all"
    known = [row for row in rows if all(key in draw for draw in row["draws"])]
    quotients = [prediction(row, key, share) / overestimation(row, which) for row in known]
    return judged(quotients)


def single_draws(rows: list[dict], which: str, limit: float = 0.0) -> tuple[float, float, float]:
    """The same for predictions of single mini-batches, with so many effective rows or more.

    Measured against the mean over-estimation, because that of a single one is noise for the most
    part.
    """
    quotients = [
        draw["predicted"] / overestimation(row, which)
        for row in rows
        for draw in row["draws"]
        if draw["rows"] >= limit
    ]
    return judged(quotients)


def judged(quotients: list[float]) -> tuple[float, float, float]:
    """Share within a factor 1.5, the smallest and the largest."""
    if not quotients:
        return (math.nan,) * 3
    good = sum(1 / WITHIN <= q <= WITHIN for q in quotients) / len(quotients)
    return good, min(quotients), max(quotients)


def enough(row: dict) -> bool:
    """Whether a factor has rows enough, in the mean over its mini-batches."""
    return mean(row, "rows") >= MIN_EFFECTIVE_ROWS


def table(factors: list[dict], posteriors: list[dict]) -> str:
    """What was found, in numbers."""
    lines = [
        "Predicted over measured over-estimation: share within a factor 1.5 (smallest, largest)",
        f"{'':32}{'factors':>8}{'curvature-weighted':>24}{'top direction':>24}"
        f"{'one mini-batch':>24}{'random-matrix, top':>24}",
    ]

    def add_line(name: str, rows: list[dict], limit: float = 0.0) -> None:
        if not rows:
            return
        cells = [
            verdict(rows, "all"),
            verdict(rows, "top"),
            single_draws(rows, "all", limit),
            verdict(rows, "top", "random-matrix"),
        ]
        texts = (f"{good:.1%} ({low:.2f}, {high:.2f})" for good, low, high in cells)
        lines.append(f"{name:32}{len(rows):>8}" + "".join(f"{text:>24}" for text in texts))

    for title in (CHOSEN, HELD_OUT, LAST, OTHER):
        rows = [row for row in factors if row["use"] == title]
        add_line(title, rows)
        biased = [row for row in rows if overestimation(row, "all") > 1.2]
        add_line("  over-estimated by > 20 %", biased)
        for name, some in (("  enough rows", rows), ("    and over-estimated", biased)):
            add_line(name, [row for row in some if enough(row)], MIN_EFFECTIVE_ROWS)
        for fisher in dict.fromkeys(row["fisher"] for row in rows):
            add_line(f"  {fisher}", [row for row in rows if row["fisher"] == fisher])
    for network in dict.fromkeys(row["network"] for row in factors):
        rows = [row for row in factors if row["network"] == network]
        add_line(network, rows)
        add_line("  enough rows", [row for row in rows if enough(row)], MIN_EFFECTIVE_ROWS)
    lines.append("")
    lines.append(
        "Median distance to the full batch, mean |log ratio of predictive standard deviations|, by "
        "effective rows over effective dimension of the weakest factor"
    )
    lines.append(f"{'ratio':>12}{'posteriors':>11}" + "".join(f"{name:>11}" for name in METHODS))
    for low, high in ((1, 1.5), (1.5, 3), (3, 10), (10, math.inf)):
        there = [row for row in posteriors if low <= row["ratio"] < high]
        if there:
            known = ([row[name] for row in there if name in row] or [math.nan] for name in METHODS)
            medians = "".join(f"{median(found):>11.3f}" for found in known)
            lines.append(f"{f'{low} to {high}':>12}{len(there):>11}{medians}")
    return "\n".join(lines)


# %% Figure
def figure(factors: list[dict], posteriors: list[dict], path: Path) -> None:
    """The map: by rows, by effective rows, the rule against measurements, and posteriors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(2, 2, figsize=(7.2, 6.4), constrained_layout=True)
    (by_rows, by_effective), (rule, distances) = axes
    draw_factors(factors, by_rows, by_effective)
    draw_rule([row for row in factors if row["use"] != CHOSEN and enough(row)], rule)
    draw_posteriors(posteriors, distances)
    for letter, ax in zip("abcd", axes.flat, strict=True):
        ax.set_title(letter, loc="left", fontsize=9, fontweight="bold")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.tick_params(labelsize=7)
        ax.xaxis.label.set_size(8)
        ax.yaxis.label.set_size(8)
    for ax in (by_rows, by_effective, rule):
        ax.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        ax.yaxis.minorticks_off()
    for ax in (rule, distances):
        ax.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        ax.xaxis.minorticks_off()
    fig.savefig(path, dpi=160)
    plt.close(fig)


def draw_factors(factors: list[dict], by_rows, by_effective) -> None:
    """Over-estimation against rows per dimension, and against effective ones."""
    shapes = {"MLP": "o", "CNN": "s", "ResNet": "^", "tokens": "D"}
    for network, shape in shapes.items():
        rows = [row for row in factors if row["network"].split(",")[0] == network]
        measured = [overestimation(row, "all") for row in rows]
        fills = ["0.35" if row["factor"] == "B" else "white" for row in rows]
        style = {"marker": shape, "s": 11, "c": fills, "edgecolors": "0.2", "linewidths": 0.4}
        by_rows.scatter([r["n_rows"] / r["dimension"] for r in rows], measured, **style)
        by_effective.scatter([ratio(row) for row in rows], measured, **style)
        by_effective.scatter([], [], marker=shape, s=14, c="0.35", label=network)
    by_effective.scatter([], [], marker="o", s=14, c="white", edgecolors="0.2", label="inputs (A)")
    x = torch.logspace(math.log10(1.08), 3, 200)
    by_effective.plot(x, 1 / (1 - 1 / x), "k-", lw=1, label=r"many data: $1/(1 - D/m)$")
    by_effective.legend(fontsize=7, frameon=False)
    by_rows.set_xlabel("rows / dimension")
    by_effective.set_xlabel("effective rows $m$ / effective dimension $D$")
    for ax in (by_rows, by_effective):
        ax.set_ylabel("over-estimation of top curvature")


def draw_rule(rows: list[dict], ax) -> None:
    """Foretold against measured over-estimation, on networks that did not choose the rule."""
    looks = {"digits": ("o", "0.6"), "other data and architectures": ("^", "tab:red")}
    for name, (marker, colour) in looks.items():
        some = [row for row in rows if (row["use"] == OTHER) == (name == OTHER)]
        found = [(overestimation(row, "all"), prediction(row)) for row in some]
        if found:
            style = {"marker": marker, "s": 9, "c": colour, "lw": 0, "alpha": 0.7}
            ax.scatter(*zip(*found, strict=True), label=f"{name}, {len(found)} factors", **style)
    ends = torch.tensor([0.9, 9.0])
    ax.plot(ends, ends, "k-", lw=0.8)
    for factor in (WITHIN, 1 / WITHIN):
        ax.plot(ends, factor * ends, "k:", lw=0.8, label=None if factor < 1 else "factor 1.5")
    ax.set_xlabel("measured over-estimation (held out; means of 10 draws)")
    ax.set_ylabel("foretold from the mini-batch alone")
    ax.legend(fontsize=7, frameon=False)


def draw_posteriors(posteriors: list[dict], ax) -> None:
    """Distances of the methods to the full batch, with medians of fifths."""
    looks = {
        "single": ("x", "0.0", "-"),
        "two-batch": ("o", "tab:orange", "--"),
        "crossfit": ("^", "tab:blue", ":"),
        "auto": ("s", "tab:green", "-."),
    }
    for method, (marker, colour, style) in looks.items():
        found = sorted((row["ratio"], row[method]) for row in posteriors if method in row)
        if not found:
            continue
        ax.scatter(*zip(*found, strict=True), marker=marker, s=7, c=colour, lw=0.5, alpha=0.35)
        ends = [found[i * len(found) // 5 : (i + 1) * len(found) // 5] for i in range(5)]
        middle = [[median(column) for column in zip(*part, strict=True)] for part in ends if part]
        ax.plot(*zip(*middle, strict=True), style, marker=marker, ms=5, c=colour, label=method)
    ax.set_xlabel("$m / D$ of the posterior's weakest factor")
    ax.set_ylabel("distance to the full batch")
    if posteriors:
        ax.legend(fontsize=7, frameon=False)
