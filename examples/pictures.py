# %% [markdown]
"""Every plot of the library, from one comparison on scikit-learn's digits and one regression.

    python -m examples.pictures --out pictures    # some minutes
    python -m examples.pictures --small           # for a first look

The documentation's gallery shows what this made.
"""

import argparse
from pathlib import Path

import matplotlib
import torch
from matplotlib import pyplot as plt
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from examples.demo import digits, train_network
from laplace_debias import Laplace, compare, sweep_prior_precision
from laplace_debias.plots import (
    plot_band,
    plot_bias,
    plot_calibration_budget,
    plot_comparison,
    plot_gap_cost,
    plot_ood,
    plot_reliability,
    plot_risk_coverage,
    plot_sweep,
)
from laplace_debias.reporting import predict

matplotlib.use("agg")


# %%
def save(figure: plt.Figure, out: Path, name: str) -> None:
    """Write a figure one column wide, and close it."""
    figure.savefig(out / f"plot_{name}.png", dpi=200, bbox_inches="tight")
    plt.close(figure)


# %% [markdown]
# A classification: the demo's network, its comparison, one posterior of it at the prior precision
# that validation data choose, and the plain network beside it.


# %%
def classification(out: Path, small: bool) -> None:
    """Draw everything that needs a classifier."""
    data = digits()
    if small:
        data |= {n: TensorDataset(*(t[:60] for t in data[n].tensors)) for n in data if n != "train"}
    _, model = train_network(data["train"], 5 if small else 60)
    train, val, test, shifted = (
        DataLoader(data[name], 64 if name == "train" else 250)
        for name in ("train", "val", "test", "shifted")
    )
    result = compare(
        model, train, test, methods=("plain", "single", "two-batch", "auto", "full"),
        baselines=("temperature",), val_loader=val, budgets=(16, 32) if small else (32, 128, 512),
        n_draws=2 if small else 3,
    )  # fmt: skip
    save(plot_comparison(result, ("nll", "ece"))[0, 0].figure, out, "comparison")
    save(plot_calibration_budget(result).figure, out, "calibration_budget")
    for cost in ("backward", "seconds"):
        save(plot_gap_cost(result, cost=cost).figure, out, f"gap_{cost}")
    la = Laplace(model, "classification", "all", "kron", debias=True)
    la.fit(train)
    save(plot_bias(la.curvature_bias()).figure, out, "bias")
    save(plot_bias(la.expected_bias(next(iter(train)))).figure, out, "expected_bias")
    sweep = sweep_prior_precision(la, val)
    save(plot_sweep(sweep).figure, out, "sweep")
    la.prior_precision = sweep.best("nll")
    seen = {name: predict(p, test, "classification") for name, p in _both(model, la)}
    far = predict(la, shifted, "classification")
    save(plot_reliability(seen["two-batch"].reliability()).figure, out, "reliability")
    curves = {name: found.risk_coverage() for name, found in seen.items()}
    save(plot_risk_coverage(curves).figure, out, "risk_coverage")
    save(plot_ood(seen["two-batch"].uncertainty, far.uncertainty).figure, out, "ood")


def _both(model: nn.Module, la: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """The plain network and its posterior, by name."""
    return ("plain", model), ("two-batch", la)


# %% [markdown]
# A regression in one dimension, with a hole in its data.


# %%
def regression(out: Path, small: bool) -> None:
    """Draw the band of a regression."""
    torch.manual_seed(0)
    X = torch.cat([torch.linspace(-2, -0.6, 60), torch.linspace(0.6, 2, 60)])[:, None]
    Y = torch.sin(2 * X) + 0.1 * torch.randn(X.shape)
    net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 1))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(100 if small else 1500):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(X), Y).backward()
        optimizer.step()
    la = Laplace(net, "regression", "all", "kron", debias="single", sigma_noise=0.1)
    la.fit(DataLoader(TensorDataset(X, Y), 40))
    x = torch.linspace(-3, 3, 200)[:, None]
    mean, variance = la(x)
    save(plot_band(x, mean, variance, noise=0.1, data=(X, Y)).figure, out, "band")


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a few seconds, for a first look")
    parser.add_argument("--out", type=Path, default=Path("outputs"))
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    classification(args.out, args.small)
    regression(args.out, args.small)


# %%
if __name__ == "__main__":
    main()
