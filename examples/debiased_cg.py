# %% [markdown]
# # Debiased conjugate gradients
#
# Conjugate gradients (CG) on a mini-batch measure each step on the data that chose its direction,
# so the steps are wrong, often in sign. Debiased CG keeps the directions and measures the steps on
# a second mini-batch. At equal cost (one mini-batch of M data, or two of M/2) it does not diverge.
r"""Loss and accuracy along 30 CG iterations, single-batch against debiased, at equal cost.

    python -m examples.debiased_cg      # digits
    python -m examples.debiased_cg --data cifar10 --root DATA --checkpoint STATE.pt \
        --batch-sizes 512 1024 2048     # All-CNN-C
    ... --batch-sizes 512 --draws 3 --eval-images 2048 --chunk-size 64 --progress-bar  # a few hours

Runs that are done and the picture are kept in ``outputs/``; the products of a run that is not done
are kept too, and it goes on from them. With ``--eval-images`` the loss is that of so many training
and test images, drawn at random once, and there is no run on all data.
"""

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path

import matplotlib
import torch
from torch import nn
from tqdm import tqdm

from examples.quadratic_problems import add_problem_flags, load_problem
from laplace_debias.quadratics import Quadratic, RecordedProducts, cg, debiased_cg, partition
from laplace_debias.quadratics.trajectory import TrajectoryMetrics, evaluate_trajectory
from laplace_debias.storage import CellStore

LOSS = nn.CrossEntropyLoss()


# %% [markdown]
# ## One run
# The loss is the *regularised* one, on all training and on all test data.
def performance(problem, solution, options):
    """Evaluate a CG solution's iterates on training and test data."""
    regulariser = {name: options[name] for name in ("l2", "regularize_biases", "chunk_size")}
    return tuple(
        evaluate_trajectory(problem.model, LOSS, data, solution.iterates, **regulariser)
        for data in (problem.evaluation or problem.train, problem.test)
    )


def single_run(problem, batch, iterations, options, folder):
    """Plain CG on one mini-batch; the folder keeps its products until the run is done."""
    H = RecordedProducts(Quadratic(problem.model, LOSS, batch, **options), folder)
    solution = cg(H, max_iter=iterations, rtol=0.0)
    assert solution.n_products >= H.n_products
    return finished(problem, solution, options, H)


def debiased_run(problem, batch, iterations, options, folder):
    """Directions from the first half of the mini-batch, magnitudes from the second."""
    halves = partition(batch, len(batch[1]) // 2)
    H, H_tilde = (
        RecordedProducts(Quadratic(problem.model, LOSS, half, **options), folder / name)
        for half, name in zip(halves, ("directions", "magnitudes"), strict=True)
    )
    solution = debiased_cg(H, H_tilde, max_iter=iterations, rtol=0.0)
    assert solution.n_products >= H.n_products + H_tilde.n_products
    return finished(problem, solution, options, H, H_tilde)


def finished(problem, solution, options, *products):
    """Evaluate a run, and only then delete its products."""
    metrics = performance(problem, solution, options)
    for part in products:
        part.clear()
    return metrics


# %% [markdown]
# ## All runs
# Five draws at every batch size, and once with all data: plain, and debiased by halves.
def all_runs(problem, args, path, options):
    """Return the runs by batch size and method; finished ones are kept in a folder."""
    settings = {"iterations": args.iterations, **options}
    data = {"train": problem.train, "test": problem.test}
    if problem.evaluation is not None:
        data["evaluation"] = problem.evaluation
    study = CellStore.for_run(path / "runs", problem.model, data, loss=LOSS, options=settings)
    methods = {"single": single_run, "debiased": debiased_run}
    n_data = len(problem.train[1])
    draws = {size: range(args.draws) for size in args.batch_sizes}
    if problem.evaluation is None:
        draws[n_data] = range(1)
    todo = [(draw, size) for size in draws for draw in draws[size]]
    runs = {size: {name: [] for name in methods} for size in draws}
    for draw, size in tqdm(sorted(todo), disable=not args.progress_bar, desc="draws"):
        generator = torch.Generator().manual_seed(draw)
        batch = partition(problem.train, size, generator=generator, n_batches=1)[0]
        for name, method in methods.items():
            label = f"{name} {size} {draw}"
            folder = path / "products" / label
            measure = partial(method, problem, batch, args.iterations, options, folder)
            pair = study.get(label, lambda run=measure: list(map(asdict, run())))
            runs[size][name].append(tuple(TrajectoryMetrics(**metrics) for metrics in pair))
    return runs


def final_losses(pairs):
    """Return the last training loss of each run; a run that has blown up counts as infinite."""
    return torch.stack([train.loss[-1] for train, _ in pairs]).nan_to_num(float("inf"))


# %% [markdown]
# ## Will the first step help?
# CG's first step goes along the mini-batch's gradient g, by slope over curvature. On other data it
# lowers the quadratic only if their slope along g is more than half of g's own times the ratio of
# the curvatures. Where training has come to rest, the full gradient is nearly zero, g is noise, and
# no mini-batch's step can help.
def first_step(problem, size, draws, options):
    """Slope and curvature along a mini-batch's gradient: evaluation data over its own, ``[2]``."""
    others = Quadratic(problem.model, LOSS, problem.evaluation or problem.train, **options)
    ratios = []
    for draw in range(draws):
        generator = torch.Generator().manual_seed(draw)
        batch = partition(problem.train, size, generator=generator, n_batches=1)[0]
        own = Quadratic(problem.model, LOSS, batch, **options)
        g = own.gradient
        ratios.append([others.gradient @ g / (g @ g), g @ (others @ g) / (g @ (own @ g))])
    return torch.tensor(ratios).mean(0)


def main(argv: list[str] | None = None) -> None:
    """Run everything and save the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_problem_flags(parser, label_noise=0.0)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--eval-images", type=int, help="so many random images stand for all")
    parser.add_argument("--chunk-size", type=int, default=512, help="images per pass")
    parser.add_argument("--first-step", action="store_true", help="say whether it can help")
    parser.add_argument("--progress-bar", action="store_true")
    args = parser.parse_args(argv)
    problem = load_problem(args)
    if args.eval_images is not None:
        problem = problem.evaluated_on(args.eval_images)
    path: Path = args.out / f"debiased_cg-{problem.folder}"
    options = {"l2": problem.l2, "regularize_biases": False, "chunk_size": args.chunk_size}
    runs = all_runs(problem, args, path, options)

    print(f"{problem.name}: training loss after {args.iterations} iterations, mean over draws")
    for size, methods in runs.items():
        single, debiased = (final_losses(methods[name]) for name in ("single", "debiased"))
        start = methods["single"][0][0].loss[0]
        best = [
            torch.stack([run.loss.nan_to_num(float("inf")).min() for run, _ in methods[name]])
            for name in ("single", "debiased")
        ]
        wins = int((debiased < single).sum())
        print(
            f"  M = {size:6d}: start {start:.4f}, single-batch {single.mean():.4f} (best "
            f"{best[0].mean():.4f}), debiased {debiased.mean():.4f} (best {best[1].mean():.4f}), "
            f"debiased lower in {wins} of {len(single)}"
        )
        if args.first_step and size in args.batch_sizes:
            slope, curvature = first_step(problem, size, args.draws, options).tolist()
            print(
                f"      along the gradient of a mini-batch: slope of all data {slope:.3f} of its "
                f"own, curvature {curvature:.2f}; its first step helps above {curvature / 2:.2f}"
            )
        if size in args.batch_sizes:
            assert wins >= 0.8 * len(single), f"single-batch CG ended lower too often at M = {size}"

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from laplace_debias import plots

    rows = len(runs)
    figure, axes = plt.subplots(
        rows, 4, figsize=(11, 2.3 * rows), squeeze=False, layout="constrained"
    )
    for (size, methods), row in zip(runs.items(), axes, strict=True):
        everything = size == len(problem.train[1])
        names = (
            ("full batch", "debiased, halves")
            if everything
            else (f"one of {size}", f"debiased, two of {size // 2}")
        )
        title = "all data" if everything else f"batch size {size}"
        plots.plot_cg_runs(
            dict(zip(names, methods.values(), strict=True)), title=title, axes=list(row)
        )
    path.mkdir(parents=True, exist_ok=True)
    figure.savefig(path / "cg.png", dpi=160)
    print(f"picture in {path}")


if __name__ == "__main__":
    main()
