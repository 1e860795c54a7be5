# %% [markdown]
"""What a posterior buys, what a mini-batch does to it, and what to do about it, in a minute.

A small CNN is trained on scikit-learn's digits (they come with scikit-learn; nothing is downloaded)
until it fits its training data, with Adam and no tricks, as people have them: so it is
over-confident. The setting was fixed before any posterior was computed; what three other networks
give is in the documentation (``docs/results/demo.md``).

    python -m examples.demo                  # a minute; table, figure and report go to outputs/
    python -m examples.demo --small          # a few seconds, for a first look
    python -m examples.demo --network mlp    # or resnet, tokens
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib
import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from examples.classifiers import flat_digits_mlp
from examples.networks import DigitsTransformer, digits_cnn, resnet
from laplace_debias.comparison import ComparisonResult, ComparisonRow, compare
from laplace_debias.reporting import report

matplotlib.use("agg")
PAPER = {"kfac_approx": "backpack", "fisher": "mc", "sampler": "label"}
METRICS = ("nll", "ece", "shifted_nll", "shifted_ece", "shifted_auroc")
NETWORKS: dict[str, tuple[Callable[[], nn.Module], float]] = {  # and learning rates
    "cnn": (partial(digits_cnn, 64), 1e-3),
    "mlp": (flat_digits_mlp, 1e-3),
    "resnet": (partial(resnet, 1, (8, 16, 32)), 3e-3),
    "tokens": (DigitsTransformer, 3e-3),
}


# %% [markdown]
# Data: 997 digits for training, 300 to choose priors and temperatures on, 500 to measure on, and
# these 500 rotated by 30 degrees and noisy.


# %%
def shifted(X: Tensor, degrees: float = 30.0, noise: float = 0.1) -> Tensor:
    """Rotate images ``[n, 1, 8, 8]`` and add noise."""
    angle = torch.tensor(degrees).deg2rad()
    rotation = torch.tensor([[angle.cos(), -angle.sin(), 0.0], [angle.sin(), angle.cos(), 0.0]])
    grid = F.affine_grid(rotation.expand(len(X), 2, 3), list(X.shape), align_corners=False)
    X = F.grid_sample(X, grid, align_corners=False)
    return X + noise * torch.randn(X.shape, generator=torch.Generator().manual_seed(2))


def digits() -> dict[str, TensorDataset]:
    """Training, validation, test and shifted test images with labels."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    X = (torch.tensor(data.images).float()[:, None] / 16)[order]
    y = torch.tensor(data.target)[order]
    parts = {"train": slice(0, 997), "val": slice(997, 1297), "test": slice(1297, None)}
    found = {name: TensorDataset(X[rows], y[rows]) for name, rows in parts.items()}
    return found | {"shifted": TensorDataset(shifted(X[1297:]), y[1297:])}


def train_network(data: TensorDataset, epochs: int, network: str = "cnn") -> nn.Module:
    """Train a small network until it fits its data; BatchNorm is frozen then."""
    torch.manual_seed(0)
    build, lr = NETWORKS[network]
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr)
    for _ in range(epochs):
        for X, y in DataLoader(data, 64, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(X), y).backward()
            optimizer.step()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return model.eval()


# %% [markdown]
# Tables: each method at the prior precision (or temperature) that is best on the validation data,
# as mean and standard error over draws of mini-batches.


# %%
def mean_and_error(rows: list[ComparisonRow], metric: str) -> tuple[float, float]:
    """Mean over draws and its standard error (0 for one draw)."""
    values = [row.metrics[metric] for row in rows]
    return fmean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def tuned_table(results: Mapping[str, ComparisonResult]) -> str:
    """Every method's metrics at its validated prior, with its backward passes and seconds."""
    head = ["method", "data", "backward", "seconds", *METRICS]
    lines = [head]
    for title, result in results.items():
        groups: dict[tuple[str, int], list[ComparisonRow]] = {}
        for row in result.tuned():
            groups.setdefault((row.method, row.budget), []).append(row)
        for (method, budget), rows in groups.items():
            backward, seconds = (
                fmean((row.cost or {}).get(name, 0.0) for row in rows)
                for name in ("backward", "seconds")
            )
            line = [f"{title}{method}", str(budget or ""), f"{backward:,.0f}", f"{seconds:.2f}"]
            for metric in METRICS:
                mean, error = mean_and_error(rows, metric)
                line.append(f"{mean:.3f}" + (f" ± {error:.3f}" if error else ""))
            lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)) for line in lines
    )


# %% [markdown]
# The figure: panel 1, what a posterior buys (test and shifted NLL, tuned); panel 2, what a
# mini-batch does to it (NLL against the prior precision with the paper's factors); panel 3, what
# the library does about it (distance of the NLL curve to the full batch against backward passes).


# %%
def draw(ours: ComparisonResult, paper: ComparisonResult, path: Path) -> None:
    """Save the three panels."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    rows = {
        row.method: row for row in ours.tuned() if row.method in ("plain", "temperature", "full")
    }
    for i, (metric, label) in enumerate((("nll", "test"), ("shifted_nll", "shifted"))):
        values = [row.metrics[metric] for row in rows.values()]
        positions = [j + 0.38 * i - 0.19 for j in range(len(rows))]
        axes[0].bar(
            positions, values, 0.36, label=label, color=("0.35", "white")[i], edgecolor="black",
            hatch=("", "///")[i],
        )  # fmt: skip
    names = {"full": "Laplace,\ntuned prior", "temperature": "temperature\nscaling"}
    axes[0].set_xticks(range(len(rows)), [names.get(name, name) for name in rows])
    axes[0].set(ylabel="NLL", yscale="log", title="What a posterior buys")
    axes[0].legend(frameon=False, fontsize=8)
    styles: dict[str, dict[str, Any]] = {
        "full": {"color": "black", "linestyle": "-"},
        "single": {"color": "tab:orange", "linestyle": "--", "marker": "s"},
        "two-batch": {"color": "tab:blue", "linestyle": "-.", "marker": "o"},
        "auto": {"color": "tab:green", "linestyle": ":", "marker": "^"},
    }
    least = min(paper.budgets("single"))
    for method in ("full", "single", "two-batch"):
        points = [
            p for p in paper.summary("nll")
            if p.method == method and (method == "full" or p.budget == least)
        ]  # fmt: skip
        x, y = [p.prior_precision for p in points], [p.mean for p in points]
        bars = [[p.mean - p.min for p in points], [p.max - p.mean for p in points]]
        axes[1].errorbar(x, y, bars, label=method, markersize=4, capsize=2, **styles[method])
    title = f"What a mini-batch does ({least} data)"
    axes[1].set(xscale="log", yscale="log", xlabel="prior precision", ylabel="NLL", title=title)
    axes[1].legend(frameon=False, fontsize=8)
    for method in ("single", "two-batch", "auto"):
        budgets = ours.budgets(method)
        passes = [
            fmean((r.cost or {})["backward"] for r in ours.select(method) if r.budget == b)
            for b in budgets
        ]
        gaps = [ours.gap("nll", method, b) for b in budgets]
        axes[2].errorbar(
            passes, [g.gap for g in gaps], [g.spread for g in gaps], label=method, markersize=4,
            capsize=2, **styles[method],
        )  # fmt: skip
    axes[2].set(xscale="log", yscale="log", xlabel="backward passes", title="What to do about it")
    axes[2].set_ylabel("distance of NLL to the full batch")
    axes[2].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


# %%
def run(
    small: bool, out: Path, network: str = "cnn", progress_bar: bool | None = None
) -> dict[str, ComparisonResult]:
    """Train, compare, print, draw, and write the report."""
    data = digits()
    if small:
        data |= {n: TensorDataset(*(t[:60] for t in data[n].tensors)) for n in data if n != "train"}
    model = train_network(data["train"], 5 if small else 60, network)
    loaders = {
        name: DataLoader(part, 64 if name == "train" else 250) for name, part in data.items()
    }
    options: dict[str, Any] = {
        "budgets": (32,) if small else (32, 128),
        "n_draws": 2 if small else 5,
        "val_loader": loaders["val"],
        "ood_loader": {"shifted": loaders["shifted"]},
        "progress_bar": progress_bar,
    }
    sets = (model, loaders["train"], loaders["test"])
    methods = ("plain", "single", "two-batch", "auto", "full")
    ours = compare(*sets, methods=methods, baselines=("temperature",), **options)
    paper = compare(*sets, methods=("single", "two-batch", "full"), laplace=PAPER, **options)
    print("Each at its validated prior or temperature; ± is a standard error over draws.")
    print(tuned_table({"": ours}))
    rows = {row.method: row.metrics for row in ours.tuned()}
    plain, scaled, full = (rows[name] for name in ("plain", "temperature", "full"))
    words = "\n1. What a posterior buys (plain -> Laplace; temperature scaling):"
    for metric, name in (("nll", "NLL"), ("shifted_nll", "shifted"), ("shifted_auroc", "AUROC")):
        words += f" {name} {plain[metric]:.3f} -> {full[metric]:.3f}; {scaled[metric]:.3f}."
    as_good = [m for m in ("nll", "shifted_nll") if scaled[m] <= full[m]]
    if as_good:
        words += f" Temperature scaling is at least as good in {' and '.join(as_good)} here."
    print(words)
    for budget in options["budgets"]:
        gap = {m: paper.gap("nll", m, budget).gap for m in ("single", "two-batch")}
        print(
            f"2. What a mini-batch does ({budget} data, the paper's factors): NLL off by "
            f"{gap['single']:.3f} on average over priors; debiased pairs by {gap['two-batch']:.3f}."
        )
    for budget in options["budgets"]:
        gaps = {m: ours.gap("nll", m, budget).gap for m in ("single", "two-batch", "auto")}
        text = ", ".join(f"{name} {gap:.4f}" for name, gap in gaps.items())
        print(f"3. What to do about it (exact factors, passes of {budget} data): {text}.")
    seconds = {
        m: fmean((r.cost or {})["seconds"] for r in ours.select(m)) for m in ("auto", "full")
    }
    print(
        f"   Seconds to fit: auto {seconds['auto']:.2f}, all data {seconds['full']:.2f}. "
        "(On a problem this small all data are quick; their passes are what grows.)"
    )
    out.mkdir(parents=True, exist_ok=True)
    draw(ours, paper, out / "demo.png")
    page = report(
        *sets, ood_loader=loaders["shifted"], val_loader=loaders["val"], methods=methods[1:],
        budgets=options["budgets"][:1], n_draws=1 if small else 2, path=out / "report.html",
        progress_bar=progress_bar,
    )  # fmt: skip
    print(f"\nFigure: {out}/demo.png. A page about this model: {page.path}")
    return {"ours": ours, "paper": paper}


def main(argv: list[str] | None = None) -> dict[str, ComparisonResult]:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a few seconds, for a first look")
    parser.add_argument("--network", choices=list(NETWORKS), default="cnn")
    parser.add_argument("--out", type=Path, default=Path("outputs"))
    args = parser.parse_args(argv)
    return run(args.small, args.out, args.network)


# %%
if __name__ == "__main__":
    main()
