"""From the cells of the CIFAR-10 experiment to its tables and figures.

    python -m examples.cifar10.reporting --out OUT     # of all the runs kept beside this file

Needs neither data nor weights. OUT receives the paper's figure for each run in the
paper's terms (``cifar10_RUN.png``: accuracy, NLL and ECE of the test set against the prior
precision), the same for its other sets (``cifar10_RUN_sets.png``: a row for the training images and
for each severity of corruption, with the AUROC), and all runs on one network beside each other
(``cifar10_factors.png``), and the README's figure (``hero.png``). The tables are printed.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

from matplotlib import pyplot as plt

from laplace_debias.comparison import ComparisonResult, ComparisonRow
from laplace_debias.plots import plot_comparison
from laplace_debias.storage import CellStore

HERE = Path(__file__).parent
RUNS = {
    "backpack_label": "11 epochs, BackPACK's, one drawn label",
    "backpack_exact": "11 epochs, BackPACK's, exact",
    "reduce_exact": "11 epochs, reduce, exact",
    "expand_exact": "11 epochs, expand, exact",
    "trained_backpack_label": "trained, BackPACK's, one drawn label",
    "trained_backpack_exact": "trained, BackPACK's, exact",
}
SET_TITLES = {"train": "training images"} | {
    f"c{severity}": f"corrupted test images, severity {severity}" for severity in range(1, 6)
}


def load_cells(folder: Path) -> ComparisonResult:
    """Read every finished cell of a folder; needs neither data nor weights."""
    path = folder / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"Expected {path}, got none. Remedy: run the experiment first.")
    store = CellStore(folder)
    cells = [[ComparisonRow(**row) for row in store[name]] for name in store]
    # a reference may have grown since an earlier run
    references = [cell for cell in cells if cell[0].method in ("full", "large-batch")]
    largest = max((cell[0].budget for cell in references), default=0)
    if sum(cell[0].budget == largest for cell in references) > 1:
        raise ValueError(
            f"Expected one reference of {largest} images in {folder}, got several. Remedy: delete "
            "the outdated file."
        )
    cells = [cell for cell in cells if cell not in references or cell[0].budget == largest]
    rows = [row for cell in cells for row in cell]
    order = {name: i for i, name in enumerate(("plain", "single", "two-batch"))}
    rows.sort(key=lambda row: (order.get(row.method, len(order)), row.budget, row.draw))
    config = store.config["options"]
    return ComparisonResult(tuple(rows), config["n_data"], config)


def set_names(result: ComparisonResult) -> list[str]:
    """Names of the evaluation sets beside the test set."""
    return [name.removesuffix("_nll") for name in result.metrics if name.endswith("_nll")]


def _metrics(prefix: str) -> list[str]:
    """What the paper shows of a set: the AUROC only where there is something to tell apart."""
    return ["accuracy", "nll", "ece", *(["auroc"] if prefix not in ("", "train") else [])]


def report(result: ComparisonResult) -> str:
    """The gap ratios per budget and set, and the test set's gaps, biases and spreads."""
    lines = [f"Reference: {result.reference}, {result.budgets(result.reference)[0]} images.", ""]
    lines += [result.table(["accuracy", "nll", "ece", "brier"]), ""]
    known = ("plain", "single", "full", "large-batch")
    for method in (name for name in result.methods if name not in known):
        lines.append(f"Gap ratio {method} / single (below 1: nearer to the reference)")
        budgets = list(result.gap_ratio("nll", method))
        lines.append("set    metric    " + "".join(f"{budget:>8}" for budget in budgets))
        for prefix in ("", *set_names(result)):
            for metric in _metrics(prefix):
                ratios = result.gap_ratio(f"{prefix}_{metric}" if prefix else metric, method)
                values = "".join(f"{ratios[budget]:>8.2f}" for budget in budgets)
                lines.append(f"{prefix or 'test':<6} {metric:<10}{values}")
        lines.append("")
    return "\n".join(lines)


def draw(result: ComparisonResult, out: Path, name: str = "figure") -> list[Path]:
    """Save the paper's figures: one of the test set, and one with a row for each other set.

    Returns:
        The files, ``name.png`` and, if there are other sets, ``name_sets.png``.
    """
    plt.switch_backend("agg")
    files = [out / f"{name}.png"]
    axes = plot_comparison(result, _metrics(""))
    figure = axes[0, 0].figure
    figure.set_figwidth(max(figure.get_figwidth(), 5.5))  # or the legend is cut
    figure.savefig(files[0], dpi=150)
    plt.close(figure)
    prefixes = set_names(result)
    if prefixes:
        n = _n_budgets(result)
        figure = plt.figure(figsize=(3 * n + 1, 6.5 * len(prefixes)), layout="constrained")
        rows = figure.subfigures(len(prefixes), 1, squeeze=False).ravel()
        for row, prefix in zip(rows, prefixes, strict=True):
            metrics = [f"{prefix}_{m}" for m in _metrics(prefix)]
            panels = row.subplots(len(metrics), n, squeeze=False, sharex=True, sharey="row")
            plot_comparison(result, metrics, panels)
            row.suptitle(SET_TITLES.get(prefix, prefix))
            if row is not rows[-1]:  # one legend for all
                row.legends[0].remove()
        files.append(out / f"{name}_sets.png")
        figure.savefig(files[1], dpi=80)
        plt.close(figure)
    return files


def draw_hero(result: ComparisonResult, path: Path) -> None:
    """Save the NLL of one run in a row of panels, with words beside the curves."""
    plt.switch_backend("agg")
    axes = plot_comparison(result, ["nll"])[0]
    figure = axes[0].figure
    figure.set_size_inches(7.2, 2.9)
    for ax, budget in zip(axes, result.budgets("single"), strict=True):
        ax.set_title(f"{budget} images", fontsize=9)
    for text, place in (
        ("one mini-batch\nbreaks down", (0.2, 0.78)),
        ("two of half the size,\ndebiased, do not", (0.42, 0.27)),
    ):
        axes[0].text(*place, text, transform=axes[0].transAxes, fontsize=7.5)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_beside(results: Mapping[str, ComparisonResult], path: Path, metric: str = "nll") -> None:
    """Save one metric of several runs, each in a panel of its own with its title."""
    plt.switch_backend("agg")
    widths = [_n_budgets(result) for result in results.values()]
    figure = plt.figure(figsize=(2.2 * sum(widths) + 1, 3.8), layout="constrained")
    parts = figure.subfigures(1, len(results), squeeze=False, width_ratios=widths).ravel()
    for part, width, (title, result) in zip(parts, widths, results.items(), strict=True):
        plot_comparison(result, [metric], part.subplots(1, width, squeeze=False, sharey=True))
        size = result.budgets(result.reference)[0]
        part.suptitle(f"{title}\n{result.reference}: {size} images", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _n_budgets(result: ComparisonResult) -> int:
    """How many panels a metric takes."""
    methods = [m for m in result.methods if m not in ("plain", "full", "large-batch")]
    return len({budget for m in methods for budget in result.budgets(m)})


def gap_table(results: Mapping[str, ComparisonResult], metric: str = "nll") -> str:
    """Return gaps of both methods and their ratio as a Markdown table, a line per run and budget.

    Args:
        results: Runs by name.
        metric: Of the test set.
    """
    lines = [
        f"| test {metric}: distance to the reference | budget | draws | single: gap (bias, spread) "
        "| two-batch: gap (bias, spread) | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, result in results.items():
        for budget, ratio in result.gap_ratio(metric).items():
            gaps = [result.gap(metric, method, budget) for method in ("single", "two-batch")]
            n_draws = len({row.draw for row in result.select("two-batch", budget)})
            cells = [f"{g.gap:.4f} ({g.bias:.4f}, {g.spread:.4f})" for g in gaps]
            lines.append(f"| {name} | {budget} | {n_draws} | {' | '.join(cells)} | {ratio:.3f} |")
    return "\n".join(lines)


def curve_table(result: ComparisonResult, metric: str = "nll", every: int = 3) -> str:
    """Return means over draws against beta as a Markdown table, a line per method and budget.

    Args:
        result: A run.
        metric: One of its metrics.
        every: Which grid points: each ``every``-th from the smallest, and the largest.
    """
    curves: dict[tuple[str, int], dict[float, float]] = {}
    for point in result.summary(metric):
        if point.prior_precision is not None:
            beta = point.prior_precision / result.n_data
            curves.setdefault((point.method, point.budget), {})[beta] = point.mean
    grid = sorted({beta for curve in curves.values() for beta in curve})
    grid = sorted({*grid[::every], grid[-1]})
    lines = [f"| {metric} by beta | " + " | ".join(f"{beta:.2g}" for beta in grid) + " |"]
    lines.append("| --- " * (len(grid) + 1) + "|")
    for (method, budget), curve in curves.items():
        values = " | ".join(f"{curve[beta]:.3f}" for beta in grid)
        lines.append(f"| {method}, {budget} | {values} |")
    return "\n".join(lines)


def reported_runs() -> dict[str, ComparisonResult]:
    """Read the runs that are kept beside this file, by name."""
    folders = {name: HERE / f"reported_{name}" / "cells" for name in RUNS}
    return {name: load_cells(folder) for name, folder in folders.items() if folder.exists()}


def main(argv: list[str] | None = None) -> dict[str, ComparisonResult]:
    """Draw all runs that are kept, and print their tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures")
    args = parser.parse_args(argv)
    runs = reported_runs()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, result in runs.items():
        if "backpack" in name:  # in the paper's own terms
            draw(result, args.out, f"cifar10_{name}")
        (HERE / f"reported_{name}" / "table.txt").write_text(report(result))
    same = {RUNS[name]: run for name, run in runs.items() if not name.startswith("trained")}
    if "trained_backpack_label" in runs:
        draw_hero(runs["trained_backpack_label"], args.out / "hero.png")
    draw_beside(same, args.out / "cifar10_factors.png")
    named = {RUNS[name]: run for name, run in runs.items()}
    for metric in ("nll", "ece", "accuracy"):
        print(gap_table(named, metric), end="\n\n")
    for name, result in named.items():
        reference = f"{result.reference}, {result.budgets(result.reference)[0]} images"
        print(f"{name} ({reference})", curve_table(result), sep="\n\n", end="\n\n")
    return runs


if __name__ == "__main__":
    main()
