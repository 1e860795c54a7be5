"""Time of K-FAC's factors: this package's hooks against ASDL, curvlinops and bare backward passes.

Every row is one mini-batch of one network; times are the best of several repeats, taken in turns,
and the last columns are ratios within the run. The table is printed, and written as JSON
to ``outputs/bench_kfac.json``.

    python -m examples.benchmarks.kfac
    python -m examples.benchmarks.kfac --cases "CNN 28x28, 32" --repeats 1

With ``--symmetric``, what the factors' symmetry could save: eigendecompositions in single precision
with steps of Ogita and Aishima's refinement, by the given sizes, and sums of Gram matrices as
squares, packed triangles or triangles of blocks, of two large networks' sizes. CPU seconds.

    OMP_NUM_THREADS=1 python -m examples.benchmarks.kfac --symmetric 576 1152 2304
"""

# %% Imports
from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from laplace.curvature.asdl import AsdlGGN
from laplace.curvature.curvlinops import CurvlinopsGGN
from torch import Tensor, nn

from examples.large_networks import VisionTransformer, resnet50
from examples.networks import all_cnn_c, resnet20, strided_cnn
from laplace_debias.kfac.backend import HookGGN
from laplace_debias.kfac.engine import kfac_factors
from laplace_debias.network import live_bytes

warnings.filterwarnings("ignore", message=".*(BatchNorm unsupported|non-full backward hook).*")


# %% The cases
CASES = {
    "CNN 28x28, 32": (strided_cnn, (1, 28, 28), 32),
    "CNN 28x28, 256": (strided_cnn, (1, 28, 28), 256),
    "ResNet-20, 32": (resnet20, (3, 32, 32), 32),
    "All-CNN-C, 32": (all_cnn_c, (3, 32, 32), 32),
}


# %% What is timed
def backward_passes(model: nn.Module, x: Tensor) -> None:
    """One forward pass, and for each class a backward pass to the first layer's output."""
    first = next(m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))
    found: list[Tensor] = []
    handle = first.register_forward_hook(lambda module, args, output: found.append(output))
    f = model(x)
    handle.remove()
    for c in range(f.shape[1]):
        torch.autograd.grad(f[:, c].sum(), found, retain_graph=True)


def contenders(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    """Each way to compute (part of) the factors, on a copy of the model of its own."""
    runs: dict[str, Callable[[], object]] = {}
    for name, backend in (("hooks", HookGGN), ("ASDL", AsdlGGN), ("curvlinops", CurvlinopsGGN)):
        own = backend(copy.deepcopy(model), "classification")
        runs[name] = lambda own=own: own.kron(x, y, N=len(y))
    plain = copy.deepcopy(model)
    runs["inputs only"] = lambda: kfac_factors(plain, x, likelihood="classification", outputs=False)
    runs["C backward passes"] = lambda: backward_passes(plain, x)

    def forward() -> Tensor:
        with torch.no_grad():
            return plain(x)

    runs["forward"] = forward
    return runs


def best_times(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Shortest time of each run in seconds; runs take turns, to share the machine evenly."""
    best = dict.fromkeys(runs, float("inf"))
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if repeat:  # the first round warms up
                best[name] = min(best[name], time.perf_counter() - start)
    return best


# %% What symmetry could save
def refined(M: Tensor, X: Tensor) -> tuple[Tensor, Tensor]:
    """One step of Ogita and Aishima's: eigenvalues, and eigenvectors nearer to those of M.

    With R = I - X^T X and S = X^T M X: lam_i = S_ii / (1 - R_ii), and X + X E, with
    E_ij = (S_ij + lam_j R_ij) / (lam_j - lam_i), or R_ij / 2 where the two are too close to tell.
    """
    R, S = torch.eye(len(M), dtype=M.dtype) - X.T @ X, X.T @ (M @ X)
    lam = S.diagonal() / (1 - R.diagonal())
    close = 2 * (norm(S - lam.diag()) + norm(M) * norm(R))
    gaps = lam[None, :] - lam[:, None]
    far = gaps.abs() > close
    E = torch.where(far, (S + lam * R) / torch.where(far, gaps, 1.0), R / 2)
    return lam, X + X @ E


def norm(M: Tensor) -> float:
    """Largest singular value of a symmetric matrix, by twenty steps of the power method."""
    v = torch.ones(len(M), dtype=M.dtype)
    for _ in range(20):
        v = M @ (v / v.norm().clamp(min=1e-300))
    return float(v.norm())


def cpu_and_wall(call: Callable[[], object]) -> tuple[float, float, object]:
    """Seconds of a call by the CPU's clock and the wall's, and its result."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = call()
    return time.process_time() - cpu, time.perf_counter() - wall, result


def decompositions(d: int) -> dict[str, dict[str, float]]:
    """Times and errors of eigendecompositions of a spectrum over six decades."""
    torch.linalg.eigh(torch.eye(2))  # the first call of a process is dearer
    Q = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))[0]
    lam = torch.logspace(-6, 0, d, dtype=torch.float64)
    M = Q * lam @ Q.T
    M = (M + M.T) / 2

    def single(steps: int) -> tuple[Tensor, Tensor]:
        values, X = (part.double() for part in torch.linalg.eigh(M.float()))
        for _ in range(steps):
            values, X = refined(M, X)
        return values, X

    runs: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "float64": lambda: torch.linalg.eigh(M),
        "float32": lambda: single(0),
        "float32, one step": lambda: single(1),
        "float32, two steps": lambda: single(2),
    }
    rows: dict[str, dict[str, float]] = {}
    for name, run in runs.items():
        cpu, wall, (values, X) = cpu_and_wall(run)
        off = (values - lam).abs() / lam
        chords = (X * (Q * X).sum(0).sign() / X.norm(dim=0) - Q).norm(dim=0)
        top = lam > 1e-3
        rows[name] = {
            "cpu": cpu,
            "wall": wall,
            "eigenvalue error": float(off.max()),
            "of the upper half": float(off[top].max()),
            "eigenvector error": float(chords.max()),
            "of the upper half ": float(chords[top].max()),
        }
    return rows


def factor_sizes(model: nn.Module, size: int, images: int = 32) -> tuple[list[int], list[int]]:
    """Dimensions of a network's factors, and of those that 32 images give enough rows for."""
    sizes: list[tuple[int, int]] = []  # with rows per image

    def hook(layer: nn.Module, _: object, output: Tensor) -> None:
        rows = output[0].numel() // len(layer.weight)
        sizes.extend((d, rows) for d in (len(layer.weight), layer.weight[0].numel()))

    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    for layer in layers:
        layer.register_forward_hook(hook)
    with torch.no_grad():
        model.eval()(torch.randn(1, 3, size, size))
    return [d for d, _ in sizes], [d for d, rows in sizes if 2 * images * rows >= d]


def sums(dims: list[int], n_rows: int = 256, chunks: int = 2) -> dict[str, dict[str, float]]:
    """CPU seconds and peak of live bytes of sums over chunks, one sum per factor."""

    def blocks(d: int) -> list[slice]:
        return [slice(i * d // 4, (i + 1) * d // 4) for i in range(4)]

    def squares() -> None:
        kept = [torch.zeros(d, d) for d in dims]
        for _ in range(chunks):
            for S in kept:
                X = torch.randn(n_rows, len(S))
                S.addmm_(X.T, X)

    def packed() -> None:
        kept = [torch.zeros(d * (d + 1) // 2) for d in dims]
        lower = {d: torch.ones(d, d, dtype=torch.bool).tril_() for d in set(dims)}
        for _ in range(chunks):
            for d, S in zip(dims, kept, strict=True):
                X = torch.randn(n_rows, d)
                S += (X.T @ X)[lower[d]]

    def in_blocks() -> None:
        kept = [
            [torch.zeros(r.stop - r.start, c.stop - c.start) for r in blocks(d) for c in blocks(d)
             if c.start <= r.start] for d in dims
        ]  # fmt: skip
        for _ in range(chunks):
            for d, parts in zip(dims, kept, strict=True):
                X = torch.randn(n_rows, d)
                pairs = [(r, c) for r in blocks(d) for c in blocks(d) if c.start <= r.start]
                for S, (r, c) in zip(parts, pairs, strict=True):
                    S.addmm_(X[:, r].T, X[:, c])

    found = {}
    for run in (squares, packed, in_blocks):
        with live_bytes.LiveBytes() as live:
            start = time.process_time()
            run()
        found[run.__name__] = {"cpu": time.process_time() - start, "MiB": live.peak / 2**20}
    return found


def shown(name: str, rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Print a table."""
    print(name)
    for row, values in rows.items():
        cells = "".join(f"  {key.strip()} {value:.3g}" for key, value in values.items())
        print(f"  {row:20}{cells}", flush=True)
    return rows


def symmetric(dims: list[int]) -> dict[str, dict[str, dict[str, float]]]:
    """Print both tables, as they come."""
    tables = {}
    for d in dims:
        tables[f"{d} x {d}"] = shown(f"{d} x {d}", decompositions(d))
    for name, build, size in (("ResNet-50", resnet50, 224), ("ViT", VisionTransformer, 256)):
        every, enough = factor_sizes(build(), size)
        mebibytes = [sum(4 * d**2 for d in own) / 2**20 for own in (every, enough)]
        print(f"{name}: factors of {mebibytes[0]:.0f} MiB, {mebibytes[1]:.0f} with enough rows")
        tables[name] = shown(name, sums(every))
    return tables


# %% The table
def main(argv: list[str] | None = None) -> dict[str, dict]:
    """Time all cases, print the table, write the JSON, and return the times in seconds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("outputs/bench_kfac.json"))
    parser.add_argument("--symmetric", nargs="+", type=int, metavar="d", help="see above")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    if args.symmetric:
        return symmetric(args.symmetric)
    table: dict[str, dict[str, float]] = {}
    for case in args.cases:
        build, shape, n = CASES[case]
        model, x, y = build().eval(), torch.randn(n, *shape), torch.randint(10, (n,))
        runs = contenders(model, x, y)
        # Same factors first, then their time.
        ours, theirs = (runs[name]()[1].kfacs for name in ("hooks", "ASDL"))
        for block, other in zip(ours, theirs, strict=True):
            for M, L in zip(block, other, strict=True):
                assert (M - L).norm() <= 1e-3 * L.norm(), case
        table[case] = best_times(runs, args.repeats)

    columns = list(next(iter(table.values())))
    header = "".join(f"{c:>19}" for c in columns) + "  ASDL/hooks  curvlinops/hooks"
    print("seconds".ljust(18) + header)
    for case, row in table.items():
        times = "".join(f"{row[c]:19.4f}" for c in columns)
        ratios = f"{row['ASDL'] / row['hooks']:12.2f}{row['curvlinops'] / row['hooks']:18.2f}"
        print(case.ljust(18) + times + ratios)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(table, indent=2))
    return table


if __name__ == "__main__":
    main()
