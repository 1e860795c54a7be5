"""The paper's Laplace experiment on CIFAR-10: how close do two mini-batches come to all the data?

    python -m examples.cifar10.laplace_experiment --data DATA --weights WEIGHTS --out OUT
    python -m examples.cifar10.laplace_experiment ... --reference-size 8000     # 'large-batch'
    python -m examples.cifar10.laplace_experiment --out OUT --redraw            # from OUT's cells

A trained network (``train.py``) gets K-FAC Laplace approximations from single mini-batches of 64,
256 and 1024 images, from two of half the size (two-batch), and from all 40,000 training images, at
14 prior precisions and for five draws. Each is evaluated on test images, on training images and on
corrupted test images of five severities. Weights are uncertain, biases are not; factors and their
decomposition are in float64, predictions in float32.

OUT receives one small JSON file per finished posterior, the figures and the table. The same command
goes on after an interruption. Several processes may share the work: start some with
``--draws 0 1`` and ``--draws 2 3 4``, and the command without it when they are done. CACHE (by
default OUT/cache) receives what is large: the factors of the reference, and the corrupted images.

The paper computed its factors with BackPACK, whose blocks of convolutions are on another scale than
K-FAC-expand: ``--kfac-approx backpack`` with ``--fisher mc`` (its ``KFAC``: one label per image,
drawn from the softmax) or ``--fisher exact`` (its ``KFLR``) are its own terms, and the beta axes of
different factors are not comparable. Predictions are those of the linearised network, whose samples
(``--link mc``) use common random numbers.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from examples.cifar10.corruptions import SEVERITIES, make_corrupted, read_published
from examples.cifar10.data import Cifar, Split, load_cifar
from examples.cifar10.draws import NestedDraws
from examples.cifar10.reference import Curvature, reference_factors
from examples.cifar10.reporting import draw, load_cells, report
from examples.cifar10.train import save_atomically
from examples.networks import make_model, weights_and_biases
from laplace_debias.comparison import (
    ComparisonResult,
    CustomMethod,
    Prediction,
    Reference,
    Work,
    compare,
)
from laplace_debias.comparison.options import Fit
from laplace_debias.kfac.few_rows import KFAC_APPROXES
from laplace_debias.network.vectors import SAMPLERS
from laplace_debias.posterior.from_factors import fit_from_factors
from laplace_debias.posterior.kron import DebiasedKronLaplace, Laplace

DTYPES = {"float64": torch.float64, "float32": torch.float32}
CROSSFIT = "crossfit-curvature"


def load_model(name: str, weights: Path, n_classes: int) -> nn.Module:
    """Build a network, load its weights (a state dict, or a checkpoint), freeze its biases."""
    model = make_model(name, n_classes)
    state = torch.load(weights, weights_only=True)
    model.load_state_dict(state.get("model", state))
    for bias in weights_and_biases(model)[1]:
        bias.requires_grad_(False)
    return model.eval()


def corrupted_splits(cifar: Cifar, args: argparse.Namespace, cache: Path) -> dict[str, Split]:
    """Corrupted test images by name, ``c1`` to ``c5``; what the library made is kept in a file."""
    splits = {}
    for severity in args.severities if args.n_corrupted else ():
        name = f"c{severity}"
        if args.cifar10c is not None:
            splits[name] = read_published(args.cifar10c, args.n_corrupted, severity, args.seed)
            continue
        path = cache / f"corrupted_{name}_{args.n_corrupted}_seed{args.seed}.pt"
        if not path.exists():
            split = make_corrupted(cifar.test.first(args.n_corrupted), severity, args.seed)
            cache.mkdir(parents=True, exist_ok=True)
            save_atomically({"images": split.images, "labels": split.labels}, path)
        splits[name] = Split(**torch.load(path, weights_only=True))
    return splits


def reference_posterior(
    model: nn.Module, cifar: Cifar, args: argparse.Namespace, cache: Path
) -> DebiasedKronLaplace | None:
    """Fit the reference, as far as its file goes; ``None`` if it is not complete yet."""
    N = len(cifar.train)
    kind = [args.factor_dtype, *args.curvature.settings.values()]
    factors = reference_factors(
        model,
        cifar.train,
        args.reference_size or N,
        cache / f"reference_{'_'.join(kind)}_seed{args.seed}.pt",
        dtype=DTYPES[args.factor_dtype],
        seed=args.seed,
        chunk=args.chunk,
        max_images=args.max_images,
        progress_bar=args.progress_bar,
        curvature=args.curvature,
    )
    if factors.n < (args.reference_size or N):
        print(f"{factors.n} images of the reference are done; the same command goes on.")
        return None
    la = Laplace(model, "classification", "all", "kron", debias="single")
    fit_from_factors(la, factors, N)
    return la


def crossfit(model: nn.Module, train_loader: DataLoader, seed: int) -> Fit:
    """Our own method: M images by their curvature, from a random pool scored by forward passes."""

    def fit(budget: int, draw: int) -> DebiasedKronLaplace:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + draw + 1)
        pool = DataLoader(
            train_loader.dataset, train_loader.batch_size, shuffle=True, generator=generator
        )
        la = Laplace(
            model,
            "classification",
            "all",
            "kron",
            debias="crossfit",
            sampling="curvature",
            n_curvature=budget,
            generator=generator,
        )
        la.fit(pool, n_data=len(pool.dataset))
        return la

    return fit


def run(args: argparse.Namespace) -> ComparisonResult | None:
    """Compute what is missing; return all of it, or ``None`` if the reference is not complete."""
    cache = args.cache or args.out / "cache"
    cifar = load_cifar(args.data, args.dataset, args.validation_size)
    if args.reference_size == len(cifar.train):
        args.reference_size = None  # all of them: the full batch
    model = load_model(args.model, args.weights, cifar.n_classes)
    corrupted = corrupted_splits(cifar, args, cache)
    reference = None if args.draws else reference_posterior(model, cifar, args, cache)
    if reference is None and not args.draws:
        return None
    others = {"train": cifar.train.first(args.n_train)} if args.n_train else {}
    loaders = {
        name: DataLoader(split.to_dataset(), args.chunk)
        for name, split in ({"test": cifar.test.first(args.n_test)} | others | corrupted).items()
    }
    train_loader = DataLoader(cifar.train.to_dataset(), args.chunk)
    dtype = DTYPES[args.factor_dtype]
    draws = NestedDraws(
        model, cifar.train, args.budgets, dtype, args.seed, args.chunk, args.curvature
    )
    fits = draws.fits
    if args.crossfit:
        fits[CROSSFIT] = crossfit(model, train_loader, args.seed)
    settings = {"factor_dtype": args.factor_dtype, **args.curvature.settings}
    custom = [CustomMethod(name, fit, settings) for name, fit in fits.items()]
    return compare(
        model,
        train_loader,
        loaders.pop("test"),
        ood_loader=loaders or None,
        budgets=args.budgets,
        n_draws=args.n_draws,
        methods=[*(("plain",) if args.draws else ("plain", "full")), *custom],
        prediction=Prediction(link_approx=args.link, n_samples=args.n_samples),
        reference=Reference(posterior=reference, size=args.reference_size),
        seed=args.seed,
        folder=args.out / "cells",
        work=Work(draws=args.draws, n_shared=args.n_shared),
        progress_bar=args.progress_bar,
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the defaults are the paper's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of this run's cells and figures")
    add("--redraw", action="store_true", help="only draw what OUT holds")
    add("--data", type=Path, help="folder with the data set")
    add("--weights", type=Path, help="state dict of the trained network")
    add("--model", default="allcnnc", help="allcnnc or convnet-d-w")
    add("--dataset", choices=("cifar10", "cifar100"), default="cifar10")
    add("--validation-size", type=int, default=10_000)
    add("--cache", type=Path, help="folder for large files, OUT/cache by default")
    add("--cifar10c", type=Path, help="folder of the published CIFAR-10-C files")
    add("--budgets", type=int, nargs="+", default=[64, 256, 1024])
    add("--n-draws", type=int, default=5)
    add("--draws", type=int, nargs="+", help="only these, without the reference; see above")
    add("--n-test", type=int, default=1000)
    add("--n-train", type=int, default=1000, help="0 leaves the training images out")
    add("--n-corrupted", type=int, default=300, help="per severity; 0 leaves them out")
    add("--severities", type=int, nargs="+", default=list(SEVERITIES))
    add("--reference-size", type=int, help="fewer than all images: 'large-batch'")
    add("--max-images", type=int, help="stop the reference after so many more; go on later")
    add("--factor-dtype", choices=sorted(DTYPES), default="float64")
    add("--kfac-approx", choices=KFAC_APPROXES, default="expand", help="the paper: backpack")
    add("--fisher", choices=("exact", "mc"), default="exact", help="mc: one vector per image")
    add("--sampler", choices=SAMPLERS, default="label", help="for --fisher mc")
    add("--link", choices=("probit", "mc"), default="probit")
    add("--n-samples", type=int, default=40, help="for --link mc")
    add("--crossfit", action="store_true", help="add the cross-fitted method")
    add("--n-shared", type=int, default=6, help="posteriors that share the evaluation's passes")
    add("--chunk", type=int, default=64, help="images per pass")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if not args.redraw and (args.data is None or args.weights is None):
        parser.error("expected --data and --weights (or --redraw)")
    args.progress_bar = sys.stderr.isatty()
    args.curvature = Curvature(args.kfac_approx, args.fisher, args.sampler, args.seed)
    return args


def main(argv: list[str] | None = None) -> ComparisonResult | None:
    """Run the command line."""
    args = parse(argv)
    result = load_cells(args.out / "cells") if args.redraw else run(args)
    if result is not None and not args.draws:
        text = report(result)
        print(text)
        (args.out / "table.txt").write_text(text)
        draw(result, args.out)
    return result


if __name__ == "__main__":
    main()
