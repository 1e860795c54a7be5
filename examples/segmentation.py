# %% [markdown]
"""Where a segmentation is unsure: a posterior over a U-Net, and a map of its uncertainty.

A tiny U-Net says for every pixel of made pictures whether it shows background, a disc, a square or
a cross. It has seen a dozen of pictures, and is far too sure of itself. A Laplace approximation of
all its weights gives every pixel a probability that knows so, and a map of the uncertainty that few
pictures leave about the weights.

    python -m examples.segmentation            # under a minute; the figure goes to outputs/
    python -m examples.segmentation --small    # some seconds, for a first look
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, evaluate, sweep_prior_precision, uncertainty
from laplace_debias.evaluation.reports import ClassificationReport

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402

# %% [markdown]
# ## Made pictures
# Two shapes of random place, size and brightness on a noisy background. A pixel's label says which
# shape is in front; the outermost pixels of the picture have no label (-100) and do not count.

# %%
CLASSES = ("background", "disc", "square", "cross")
IGNORED = -100


def mask(kind: str, row: Tensor, column: Tensor, size: float) -> Tensor:
    """The pixels of one shape, from their distances to its centre."""
    if kind == "disc":
        return row.square() + column.square() < size**2
    if kind == "square":
        return (row.abs() < 0.9 * size) & (column.abs() < 0.9 * size)
    if kind == "cross":
        arms = (row.abs() < 0.35 * size) | (column.abs() < 0.35 * size)
        return arms & (row.abs() < 1.1 * size) & (column.abs() < 1.1 * size)
    return (row.square() + column.square() - (0.8 * size) ** 2).abs() < 0.4 * size**2  # "ring"


def pictures(
    n: int, pixels: int, seed: int, kinds: tuple[str, ...] = CLASSES[1:]
) -> tuple[Tensor, Tensor]:
    """Pictures ``[n, 1, H, W]`` and labels ``[n, H, W]``; those of a ring are those of no class."""
    g = torch.Generator().manual_seed(seed)
    X = 0.35 * torch.randn(n, 1, pixels, pixels, generator=g)
    y = torch.zeros(n, pixels, pixels, dtype=torch.long)
    for i in range(n):
        for _ in range(2):
            place = pixels * (0.15 + 0.7 * torch.rand(2, 1, 1, generator=g))
            row, column = torch.arange(pixels).view(-1, 1), torch.arange(pixels).view(1, -1)
            size = pixels * (0.12 + 0.1 * torch.rand((), generator=g).item())
            kind = kinds[int(torch.randint(len(kinds), (), generator=g))]
            shape = mask(kind, row - place[0], column - place[1], size)
            X[i, 0][shape] += 0.8 + 0.4 * torch.rand((), generator=g)
            y[i][shape] = CLASSES.index(kind) if kind in CLASSES else len(CLASSES)
    border = torch.ones(pixels, pixels, dtype=torch.bool)
    border[1:-1, 1:-1] = False
    y[:, border] = IGNORED
    return X, y


# %% [markdown]
# ## A tiny U-Net
# Two halvings, two doublings, and the finer activations beside the upsampled ones.


# %%
def double(c_in: int, c_out: int) -> nn.Sequential:
    """Two convolutions, each with a normalisation of its own datum."""
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, 3, padding=1), nn.GroupNorm(2, c_out), nn.ReLU(),
        nn.Conv2d(c_out, c_out, 3, padding=1), nn.GroupNorm(2, c_out), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Pictures ``[n, 1, H, W]`` to logits ``[n, C, H, W]``; sides are multiples of 4."""

    def __init__(self, width: int) -> None:
        """Layers of ``width`` channels and multiples."""
        super().__init__()
        self.fine, self.middle = double(1, width), double(width, 2 * width)
        self.coarse, self.up = double(2 * width, 2 * width), double(4 * width, width)
        self.last, self.head = double(2 * width, width), nn.Conv2d(width, len(CLASSES), 1)
        self.halve, self.twice = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)

    def forward(self, x: Tensor) -> Tensor:
        """Down, and up again."""
        fine = self.fine(x)
        middle = self.middle(self.halve(fine))
        up = self.up(torch.cat([self.twice(self.coarse(self.halve(middle))), middle], dim=1))
        return self.head(self.last(torch.cat([self.twice(up), fine], dim=1)))


def train(net: nn.Module, data: TensorDataset, epochs: int) -> None:
    """Adam on the mean over labelled pixels."""
    optimiser = torch.optim.Adam(net.parameters(), 5e-3)
    loader = DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(1))
    for _ in range(epochs):
        for X, y in loader:
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(X), y).backward()
            optimiser.step()
    net.eval()


# %% [markdown]
# ## The posterior
# `fisher="mc"` passes one random vector per picture back, for all of its pixels at once; all of
# them exactly would take 3 passes per pixel. Samples of the weights give the predictions, for the
# same reason. N is the number of pictures, and each picture's loss the sum over its pixels.


# %%
@dataclass(frozen=True)
class Result:
    """What the example found, and the pictures that the figure shows."""

    seconds: float
    prior_precision: float
    plain: ClassificationReport
    laplace: ClassificationReport
    error_auroc: float
    epistemic: dict[str, float]
    shown: dict[str, Tensor]


def auroc(scores: Tensor, positive: Tensor) -> float:
    """Probability that a positive pixel has the higher score."""
    ranks = scores.double().argsort().argsort().double()
    n, m = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - n * (n - 1) / 2) / (n * m))


def run(small: bool) -> Result:
    """Train, fit, choose the prior precision on validation pictures, and test."""
    torch.manual_seed(0)
    pixels, width = (24, 4) if small else (32, 8)
    sizes = (8, 12, 20) if small else (12, 16, 40)
    training, validation, test = (pictures(n, pixels, i) for i, n in enumerate(sizes))
    rings = pictures(sizes[2], pixels, 3, ("ring",))
    net = UNet(width)
    train(net, TensorDataset(*training), 300)

    start = time.perf_counter()
    la = Laplace(net, "classification", "all", "kron", debias=True, fisher="mc")
    la.predictive_method = "samples"
    half = sizes[0] // 2
    data = TensorDataset(*training)
    la.fit(DataLoader(data, half, shuffle=True, generator=torch.Generator().manual_seed(0)))
    grid = torch.logspace(1, 5, 9)
    sweep = sweep_prior_precision(
        la, validation, grid, n_samples=20, generator=torch.Generator().manual_seed(0)
    )
    la.prior_precision = sweep.best("nll")
    seconds = time.perf_counter() - start

    X, y = test
    known = uncertainty(la, X, n_samples=40)
    unsure = {
        "known shapes": known.epistemic,
        "rings": uncertainty(la, rings[0], n_samples=40).epistemic,
    }
    counts = y != IGNORED
    wrong = net(X).argmax(1) != y
    on_rings = rings[1] == len(CLASSES)
    epistemic = {
        "background": float(unsure["known shapes"][y == 0].mean()),
        "known shapes": float(unsure["known shapes"][y > 0].mean()),
        "rings": float(unsure["rings"][on_rings].mean()),
    }
    shown = {"image": X[:3, 0], "labels": y[:3], "unsure": unsure["known shapes"][:3]}
    shown = {
        "image": torch.cat([shown["image"], rings[0][:1, 0]]),
        "labels": torch.cat([shown["labels"], torch.where(on_rings[:1], IGNORED, rings[1][:1])]),
        "unsure": torch.cat([shown["unsure"], unsure["rings"][:1]]),
    }
    shown["prediction"] = net(shown["image"].unsqueeze(1)).argmax(1)
    return Result(
        seconds,
        float(la.prior_precision),
        evaluate(net, test),
        evaluate(la, test, n_samples=40, generator=torch.Generator().manual_seed(0)),
        auroc(known.total[counts], wrong[counts]),
        epistemic,
        {name: value.detach() for name, value in shown.items()},
    )


# %% [markdown]
# The map is bright on shapes that the network tells apart by guessing, and dark on the background,
# of which twelve pictures have shown enough. The ring of the last row belongs to no class that the
# network knows: it is brighter than background, but not brighter than other shapes. The outermost
# pixels, which never had a label, are bright too.


# %%
def figure(result: Result) -> plt.Figure:
    """Pictures, labels, predictions and the uncertainty of the weights."""
    names = {
        "image": "picture", "labels": "labels (white: not counted)", "prediction": "prediction",
        "unsure": "uncertainty of the weights (nats)",
    }  # fmt: skip
    rows = len(result.shown["image"])
    fig, axes = plt.subplots(rows, 4, figsize=(7.4, 1.75 * rows), layout="constrained")
    colours = plt.get_cmap("viridis", len(CLASSES)).with_extremes(under="white")
    for line, i in zip(axes, range(rows), strict=True):
        for ax, name in zip(line, names, strict=True):
            options = {"cmap": "gray"}
            if name in ("labels", "prediction"):
                options = {"cmap": colours, "vmin": -0.5, "vmax": len(CLASSES) - 0.5}
            if name == "unsure":
                options = {"cmap": "magma", "vmin": 0, "vmax": float(result.shown[name].max())}
            drawn = ax.imshow(result.shown[name][i], interpolation="nearest", **options)
            ax.set_xticks([])
            ax.set_yticks([])
            if i == 0:
                ax.set_title(names[name], fontsize=9)
            if name == "unsure":
                unsure = drawn
            if name == "prediction":
                classes = drawn
        line[0].set_ylabel("a ring" if i + 1 == rows else "", fontsize=9)
    fig.colorbar(unsure, ax=axes[:, 3], shrink=0.6)
    bar = fig.colorbar(classes, ax=axes[:, :3], shrink=0.5, location="bottom", aspect=40)
    bar.set_ticks(range(len(CLASSES)), labels=CLASSES, fontsize=8)
    return fig


def main(argv: list[str] | None = None) -> Result:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="some seconds, for a first look")
    parser.add_argument("--out", type=Path, default=Path("outputs"))
    args = parser.parse_args(argv)
    result = run(args.small)
    args.out.mkdir(parents=True, exist_ok=True)
    figure(result).savefig(args.out / "segmentation.png", dpi=150)
    print(f"fit and sweep took {result.seconds:.1f} s; prior precision {result.prior_precision:g}")
    for name, report in (("plain", result.plain), ("posterior", result.laplace)):
        print(
            f"{name:<10} pixels {report.n_data}: accuracy {report.accuracy:.3f}, "
            f"NLL {report.nll:.3f}, ECE {report.ece:.3f}"
        )
    print(f"the entropy of a pixel's prediction finds wrong ones: AUROC {result.error_auroc:.3f}")
    print(
        "mean uncertainty of the weights, in nats:",
        ", ".join(f"{k} {v:.3f}" for k, v in result.epistemic.items()),
    )
    assert result.plain.accuracy > 0.8, "the network has learnt the shapes"
    assert result.laplace.nll < result.plain.nll
    assert args.small or result.laplace.ece < result.plain.ece / 2
    assert result.error_auroc > 0.9
    for name in ("known shapes", "rings"):
        assert result.epistemic["background"] < result.epistemic[name]
    return result


if __name__ == "__main__":
    main()
