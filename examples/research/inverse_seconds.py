"""Distance to the full-batch posterior against seconds, on All-CNN-C.

The first ``--train-size`` images of CIFAR-10 are the training set, whose exact full-batch posterior
is the reference. Methods of the library are fitted with growing budgets, and timed (processor time
of one thread); ``auto`` also with scores recorded in training (here: the outputs of one earlier
pass, whose time is not counted).

    python -m examples.research.inverse_seconds --folder DATA --weights WEIGHTS --draws 5
"""

# %% Imports
from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import mean

import torch
from torch.utils.data import DataLoader, TensorDataset

from examples.classifiers import trained_problem
from laplace_debias import CurvatureRecorder, Laplace, far_inputs, posterior_distance
from laplace_debias.posterior import DebiasedKronLaplace
from laplace_debias.storage.cells import CellStore


# %% Fits
def fitted(problem, method: str, size: int, seed: int, prior: float) -> DebiasedKronLaplace:
    """One fit; ``size`` is a number of data, or of backward passes for ``auto``."""
    generator = torch.Generator().manual_seed(seed)
    data = TensorDataset(problem.x, problem.y)
    loader = DataLoader(data, batch_size=64, shuffle=True, generator=generator)
    kwargs = {"prior_precision": prior}
    if method.startswith("auto"):
        kwargs |= {"tolerance": None, "n_passes": size, "generator": generator}
        if "scores" in method:
            kwargs |= {"scores": recorded(problem)}
        la = Laplace(problem.model, "classification", "all", "kron", debias="auto", **kwargs)
        la.fit(loader)
        return la
    if method == "crossfit":
        kwargs |= {"sampling": "curvature", "n_passes": size, "fisher": "mc"}
        kwargs |= {"generator": generator}
        la = Laplace(problem.model, "classification", "all", "kron", debias="crossfit", **kwargs)
        la.fit(loader)
        return la
    rows = torch.randperm(problem.n, generator=generator)[:size]
    debias = "two-batch" if method == "two-batch" else "single"
    la = Laplace(problem.model, "classification", "all", "kron", debias=debias, **kwargs)
    n_roles = 2 if method == "two-batch" else 1
    loaders = [
        DataLoader(TensorDataset(problem.x[part], problem.y[part]), batch_size=64)
        for part in rows.split(size // n_roles)
    ]
    la.fit(loaders[0], curvature_loader=loaders[1] if n_roles == 2 else None, n_data=problem.n)
    return la


def recorded(problem) -> CurvatureRecorder:
    """Scores as a training loop would have kept them."""
    if not hasattr(recorded, "kept"):
        recorder = CurvatureRecorder(problem.n)
        with torch.no_grad():
            for rows in torch.arange(problem.n).split(64):
                recorder.update(rows, problem.model(problem.x[rows]))
        recorded.kept = recorder
    return recorded.kept


# %% Everything
def main(argv: list[str] | None = None) -> None:
    """Fit, time, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--train-size", type=int, default=2000)
    parser.add_argument("--test-size", type=int, default=16)
    parser.add_argument("--methods", nargs="*", help="all by default")
    parser.add_argument("--sizes", nargs="*", type=int, help="all by default")
    parser.add_argument("--prior", type=float, default=10.0)
    parser.add_argument("--output", type=Path, default=Path("outputs/inverse_seconds"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    sizes = {"train_size": args.train_size, "test_size": args.test_size}
    problem = trained_problem("cifar10", folder=args.folder, weights=args.weights, **sizes)
    (x_test, _), *_ = problem.test_loader
    far = far_inputs(problem.x, args.test_size, torch.Generator().manual_seed(0))
    store = CellStore(args.output, {**sizes, "prior": args.prior})
    reference: list[DebiasedKronLaplace] = []

    def cell(method: str, size: int, draw: int) -> dict:
        if not reference:
            reference.append(fitted(problem, "single", problem.n, 0, args.prior))
        start = time.process_time()  # a busy machine must not count
        la = fitted(problem, method, size, draw, args.prior)
        row = {"seconds": time.process_time() - start}
        row |= {"test": posterior_distance(la, reference[0], x_test)}
        row |= {"far": posterior_distance(la, reference[0], far)}
        if la.fit_report.distance is not None:
            row |= {"estimate": la.fit_report.distance, "error": la.fit_report.standard_error}
        return row

    plan = [("auto", 512), ("two-batch", 256), ("crossfit", 256), ("single", 256)]
    plan += [("auto", 256), ("auto", 1024), ("auto with scores", 512)]
    for at, wanted in enumerate((args.methods, args.sizes)):
        plan = [each for each in plan if wanted is None or each[at] in wanted]
    rows: dict[tuple[str, int], list[dict]] = {each: [] for each in plan}
    for draw in range(args.draws):  # draw by draw: an interrupted run has them all at equal numbers
        for method, size in plan:
            name = f"{method.replace(' ', '-')}_{size}_{draw}"
            kept = store.get(name, lambda a=(method, size, draw): cell(*a))
            rows[method, size].append(kept)
    print("| method | size | seconds | test | far | estimate | below |\n" + "| --- " * 7 + "|")
    for (method, size), found in rows.items():
        seconds, test, far_off = (mean(r[k] for r in found) for k in ("seconds", "test", "far"))
        texts = [f"{method} | {size} | {seconds:.1f} | {test:.4f} | {far_off:.4f}", "", ""]
        if "estimate" in found[0]:
            bounds = [r["estimate"] + 2 * r["error"] for r in found]
            below = [(r["test"] + r["far"]) / 2 <= b for r, b in zip(found, bounds, strict=True)]
            texts[1:] = [
                f"{mean(r['estimate'] for r in found):.4f}",
                f"{sum(below)} of {len(below)}",
            ]
        print("| " + " | ".join(texts) + " |", flush=True)


if __name__ == "__main__":
    main()
