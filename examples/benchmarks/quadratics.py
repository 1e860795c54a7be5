"""Timings of quadratics: many curvatures in one pass, eigenvectors, debiased against plain CG.

Ratios within one run; each side is the fastest of repetitions that alternate between the sides,
which is the one that other work on the machine has disturbed least. Writes
``outputs/bench_quadratics.json``.

    python -m examples.benchmarks.quadratics
    python -m examples.benchmarks.quadratics --quick    # without All-CNN-C
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import scipy.sparse.linalg
import torch
from torch import nn

from examples.networks import all_cnn_c, digits_mlp
from laplace_debias.quadratics import Quadratic, cg, debiased_cg, top_eigenvectors

LOSS = nn.CrossEntropyLoss()


def seconds(*functions: Callable[[], object], repeats: int) -> list[float]:
    """Return the fastest times of functions that are called in turn."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return [min(taken) for taken in times]


def small_quadratic(**options) -> Quadratic:
    """Digits-size network of 85,002 parameters on 64 data."""
    return Quadratic(digits_mlp(), LOSS, (torch.randn(64, 64), torch.randint(10, (64,))), **options)


def images(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random images of CIFAR's size, with labels."""
    return torch.randn(n, 3, 32, 32), torch.randint(10, (n,))


def bench_curvatures(name: str, quadratic: Quadratic, K: int, measured: int) -> dict:
    """K curvatures in one pass against K products, of which ``measured`` are timed and scaled."""
    D = torch.linalg.qr(torch.randn(quadratic.shape[0], K)).Q
    quadratic @ D[:, 0]
    quadratic.curvatures(D[:, :2])

    def separate():
        for column in D[:, :measured].unbind(1):
            column @ (quadratic @ column)

    together, apart = seconds(lambda: quadratic.curvatures(D), separate, repeats=2)
    apart *= K / measured
    return {
        "what": f"{K} curvatures in one pass / {K} products, {name}",
        "a": together,
        "b": apart,
        "ratio": together / apart,
        "bar": 0.5,
    }


def bench_eigenvectors(k: int) -> dict:
    """Block Lanczos against scipy's eigsh, with products of the same quadratic."""
    quadratic = small_quadratic(l2=1e-4)
    tol = torch.finfo(torch.float32).eps ** (2 / 3)
    operator = scipy.sparse.linalg.LinearOperator(
        quadratic.shape,
        lambda v: (quadratic @ torch.from_numpy(v).float()).numpy(),
        dtype="float32",
    )
    ours, scipys = seconds(
        lambda: top_eigenvectors(quadratic, k),
        lambda: scipy.sparse.linalg.eigsh(operator, k, which="LA", tol=tol),
        repeats=2,
    )
    return {
        "what": f"top {k} eigenvectors / scipy's eigsh, 85,002 parameters",
        "a": ours,
        "b": scipys,
        "ratio": ours / scipys,
        "bar": 1.0,
    }


def bench_cg(M: int, iterations: int, repeats: int) -> list[dict]:
    """Debiased CG with two mini-batches of M/2 against plain CG with one of M, on All-CNN-C."""
    model = all_cnn_c()
    X, y = images(M)
    options = {"l2": 1e-3, "regularize_biases": False, "chunk_size": M // 2}
    whole = Quadratic(model, LOSS, (X, y), **options)
    halves = [
        Quadratic(model, LOSS, half, **options)
        for half in zip(X.split(M // 2), y.split(M // 2), strict=True)
    ]
    for quadratic in (whole, *halves):
        _ = quadratic.gradient
    solve = {"max_iter": iterations, "rtol": 0.0}
    plain, side, after = seconds(
        lambda: cg(whole, **solve),
        lambda: debiased_cg(*halves, **solve),
        lambda: debiased_cg(*halves, **solve, side_by_side=False),
        repeats=repeats,
    )
    name = f"on All-CNN-C, M = {M}, {iterations} iterations"
    return [
        {
            "what": f"debiased CG (2 x M/2, {order}) / plain CG (M) {name}",
            "a": taken,
            "b": plain,
            "ratio": taken / plain,
            "bar": 1.2,
        }
        for order, taken in (("side by side", side), ("one after the other", after))
    ]


def main(argv: list[str] | None = None) -> list[dict]:
    """Print a table of all ratios and write them to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--K", type=int, default=100, help="number of directions")
    parser.add_argument("--quick", action="store_true", help="leave out All-CNN-C")
    parser.add_argument("--M", type=int, default=256, help="batch size of the CG comparison")
    parser.add_argument("--out", type=Path, default=Path("outputs"))
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    rows = [bench_curvatures("digits-size MLP, 64 data", small_quadratic(), args.K, args.K)]
    rows.append(bench_eigenvectors(args.K))
    if not args.quick:
        convolutions = Quadratic(all_cnn_c(), LOSS, images(8), max_columns=10)
        rows.append(bench_curvatures("All-CNN-C, 8 images", convolutions, args.K, 10))
        rows += bench_cg(args.M, iterations=2, repeats=2)
    for row in rows:
        met = "ok" if row["ratio"] <= row["bar"] else "MISSED"
        print(
            f"{row['what']:<82} {row['a']:8.2f} s / {row['b']:8.2f} s = {row['ratio']:.2f} "
            f"(bar {row['bar']}: {met})"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "bench_quadratics.json").write_text(json.dumps(rows, indent=2))
    return rows


if __name__ == "__main__":
    main()
