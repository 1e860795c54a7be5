"""The paper's figures on the shape of a mini-batch quadratic, for All-CNN-C on CIFAR.

Slopes and curvatures along the top eigenvectors of a mini-batch and along its CG directions, on the
mini-batch that chose them and on others, and the overlaps of the eigenspaces.

    python -m examples.cifar10.quadratics --root DATA --checkpoint STATE.pt --name epoch-11
    ... --k 100 --k-cg 100 --mini-batches 78       # as in the paper: days without a GPU
    ... --data cifar100                            # for who has a network trained on it

Every product is kept in ``outputs/quadratics-NAME`` until its eigenvectors are done, and so is
every mini-batch; the same command goes on where it was interrupted. On a CPU convolutions are
fastest one vector at a time, and so is Lanczos: that is what ``max_columns`` and ``block_size`` of
1 are for.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn

from examples.quadratic_problems import cifar_problem
from laplace_debias.quadratics import (
    DirectionalBias,
    EigenspaceOverlaps,
    directional_bias,
    overlap_study,
    partition,
)

LOSS = nn.CrossEntropyLoss()


def studies(args) -> tuple[dict[str, DirectionalBias], EigenspaceOverlaps | None]:
    """Return the biases along eigenvectors and CG directions, and the overlaps."""
    problem = cifar_problem(args.data, args.root, args.model, args.checkpoint)
    folder = args.out / f"quadratics-{args.name}"
    generator = torch.Generator().manual_seed(args.seed)
    batches = partition(
        problem.train, args.batch_size, generator=generator, n_batches=args.mini_batches
    )
    options = {
        "l2": problem.l2,
        "regularize_biases": False,
        "chunk_size": args.chunk_size,
        "max_columns": args.max_columns,
        "progress_bar": args.progress_bar,
        "directions_folder": folder / "directions",
        "data_id": f"{args.data} {len(problem.train[1])}, {args.batch_size}, seed {args.seed}",
    }
    chosen = tuple(range(args.draws))
    eigen = {"block_size": args.block_size, "tol": args.tol, "probes": 0}
    results, overlaps = {}, None
    for name, k, solver in (("eigenvectors", args.k, eigen), ("cg", args.k_cg, None)):
        if k == 0:
            continue
        results[name] = directional_bias(
            problem.model,
            LOSS,
            batches,
            directions=name,
            k=k,
            chosen=chosen,
            folder=folder / name,
            solver_options=solver,
            **options,
        )
        if name == "eigenvectors":
            overlaps = overlap_study(
                problem.model,
                LOSS,
                batches[: args.draws],
                k=k,
                folder=folder / f"overlaps-{args.draws}",
                solver_options=solver,
                **options,
            )
    return results, overlaps


def numbers(bias: DirectionalBias) -> dict[str, list[float] | float]:
    """Return what is said of a figure: the same mini-batch against the mean of the others."""
    same, others = bias.same(), bias.others().mean(1)  # [draws, K]
    slope, other_slope = bias.same("slopes"), bias.others("slopes").mean(1)
    return {
        "curvature, same": _rounded(same.nanmean(0)),
        "curvature, others": _rounded(others.nanmean(0)),
        "curvature, same / others": _rounded(same.nansum(0) / others.nansum(0)),
        "curvature, same / others, all directions": float(same.nansum() / others.nansum()),
        "|slope|, same": _rounded(slope.abs().nanmean(0)),
        "slope with the sign of the same, others": _rounded(
            (slope.sign() * other_slope).nanmean(0)
        ),
        "slopes that turn their sign on others": float(
            (slope.sign() * other_slope < 0).sum() / torch.isfinite(slope).sum()
        ),
        "same curvature larger": float((same > others).sum() / torch.isfinite(same).sum()),
    }


def _rounded(values: Tensor) -> list[float]:
    """Four digits of each number."""
    return [float(f"{value:.4g}") for value in values.tolist()]


def main(argv: list[str] | None = None) -> dict:
    """Run the studies, print and write their numbers, and save the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="cifar10", choices=("cifar10", "cifar100"))
    parser.add_argument("--root", type=Path, required=True, help="holds cifar-10-batches-py etc.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="state dict of the network")
    parser.add_argument("--model", default="allcnnc", help="allcnnc or convnet-d-w")
    parser.add_argument("--name", required=True, help="of the folder for the results")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--mini-batches", type=int, default=4, help="on which to measure")
    parser.add_argument("--draws", type=int, default=3, help="how many of them choose directions")
    parser.add_argument("--k", type=int, default=10, help="eigenvectors; 0 for none")
    parser.add_argument("--k-cg", type=int, default=10, help="CG directions; 0 for none")
    parser.add_argument("--tol", type=float, default=1e-3, help="residual / largest eigenvalue")
    parser.add_argument("--block-size", type=int, default=1, help="vectors per step of Lanczos")
    parser.add_argument("--max-columns", type=int, default=1, help="vectors per pass")
    parser.add_argument("--chunk-size", type=int, default=64, help="images per pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs"))
    parser.add_argument("--progress-bar", action="store_true")
    args = parser.parse_args(argv)
    results, overlaps = studies(args)
    found = {name: numbers(bias) for name, bias in results.items()}
    if overlaps is not None:
        found["overlaps"] = {"weight in the other's top space": overlaps.alignment().tolist()}

    matplotlib.use("Agg")
    from laplace_debias import plots

    folder = args.out / f"quadratics-{args.name}"
    whole = f"average of all {args.mini_batches} mini-batches"
    figures = {
        f"bias_{name}": plots.plot_directional_bias(bias, whole=whole)
        for name, bias in results.items()
    }
    if "cg" in results:
        magnitudes = plots.plot_directional_bias(
            results["cg"], ["magnitudes"], first=10, whole=whole
        )
        figures["cg_magnitudes"] = magnitudes
    if overlaps is not None:
        figures["overlaps"] = plots.plot_overlaps(overlaps)
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=130)
    text = json.dumps(found, indent=1)
    (folder / "numbers.json").write_text(text)
    print(text)
    return found


if __name__ == "__main__":
    main()
