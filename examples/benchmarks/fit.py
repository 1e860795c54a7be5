"""Time of whole fits on All-CNN-C, or another of the paper's networks, as ratios within one run.

A single mini-batch of M, two of M / 2 (debiased), the cross-fitted posterior with curvature
sampling (A from 4 M data, 8 M scored) and ``"auto"`` with as many backward passes, all with the
default backend; how far each is from the full batch (``posterior_distance``) on a trained CNN for
the digits, because data are all alike to random weights; what a fit on a whole
training set of 40,000 would take against M = 512 with all of it scored, from the time per datum
measured here; and the share of a two-batch fit that goes into checking the model, also in the first
fit of a process. JSON goes to ``outputs/bench_fit.json``.

    python -m examples.benchmarks.fit
    python -m examples.benchmarks.fit --model convnet-1-8 --budget 8    # a few seconds
"""

# %% Imports
from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from examples.benchmarks.kfac import best_times
from examples.classifiers import trained_problem
from examples.networks import make_model
from laplace_debias import Laplace, far_inputs, posterior_distance
from laplace_debias.debias.spectrum import decompose, reevaluate
from laplace_debias.kfac.engine import kfac_factors
from laplace_debias.posterior import DebiasedKronLaplace


# %% What is timed
def fits(
    model: nn.Module, data: TensorDataset, M: int
) -> dict[str, Callable[[], DebiasedKronLaplace]]:
    """Each way to fit, as a function without arguments."""

    def fit(batch_size: int, **kwargs: object) -> DebiasedKronLaplace:
        la = Laplace(model, "classification", "all", "kron", **kwargs)
        loader = DataLoader(data, batch_size, shuffle=True)
        source = next(iter(loader)) if kwargs["debias"] == "single" else loader
        la.fit(source, n_data=len(data))
        return la

    curvature = {"sampling": "curvature", "n_curvature": M, "n_input": 4 * M, "n_pool": 8 * M}
    return {
        "single, M": lambda: fit(M, debias="single"),
        "two-batch, 2 x M/2": lambda: fit(M // 2, debias=True),
        "crossfit, M": lambda: fit(M // 2, debias="crossfit"),
        "crossfit, curvature sampling, M": lambda: fit(M // 2, debias="crossfit", **curvature),
        "auto, 9 M passes": lambda: fit(M // 2, debias="auto", tolerance=None, n_passes=9 * M),
    }


def distances(M: int) -> dict[str, float]:
    """How far one fit of each way is from the full batch, on the digits; test and far inputs."""
    p = trained_problem("digits")
    full = Laplace(p.model, "classification", "all", "kron", debias="single")
    data = TensorDataset(p.x, p.y)
    full.fit(DataLoader(data, batch_size=250))
    (x, _), *_ = p.test_loader
    inputs = torch.cat([x[:50], far_inputs(p.x, 50, torch.Generator().manual_seed(1))])
    ways = fits(p.model, data, M)
    return {name: posterior_distance(way(), full, inputs) for name, way in ways.items()}


def debiasing_seconds(model: nn.Module, data: TensorDataset, M: int) -> float:
    """The debiasing step alone: re-evaluation along the first mini-batch's eigenvectors."""
    X, y = data[: M // 2]
    blocks = kfac_factors(model, X, y, likelihood="classification").blocks
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    Q, _ = decompose(blocks, names)
    start = time.perf_counter()
    reevaluate(Q, blocks, names)
    return time.perf_counter() - start


def verification_share(model: nn.Module, data: TensorDataset, M: int, repeats: int) -> float:
    """Seconds of checking the model over those of a whole fit on two mini-batches of M."""
    shares = []
    for _ in range(repeats):
        # a copy, because what a check has shown of a model is remembered
        la = Laplace(copy.deepcopy(model), "classification", "all", "kron", debias=True)
        la.fit(data[:M], curvature_loader=data[M : 2 * M], n_data=len(data))
        seconds = la.fit_cost.seconds
        shares.append(seconds["verification"] / sum(seconds.values()))
    return min(shares)


def cold_verification_share(model: nn.Module, data: TensorDataset, M: int) -> float:
    """The same in the first fit of a new process, where PyTorch still loads what it needs."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(verification_share, model, data, M, 1).result()


# %% The table
def main(argv: list[str] | None = None) -> dict[str, float]:
    """Time the fits, print the ratios, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="allcnnc", help="allcnnc or convnet-d-w")
    parser.add_argument("--budget", type=int, default=64, help="M")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("outputs/bench_fit.json"))
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    M, model = args.budget, make_model(args.model).eval()
    data = TensorDataset(torch.randn(8 * M, 3, 32, 32), torch.randint(10, (8 * M,)))
    times, off = best_times(fits(model, data, M), args.repeats), distances(M)

    x, y = data[:M]
    no_grad = torch.no_grad()
    passes = best_times(
        {
            "forward": no_grad(lambda: model(x)),
            "inputs": lambda: kfac_factors(model, x, likelihood="classification", outputs=False),
            "outputs": lambda: kfac_factors(model, x, y, likelihood="classification", inputs=False),
            "both": lambda: kfac_factors(model, x, y, likelihood="classification"),
        },
        args.repeats,
    )
    N, m = 40_000, 512
    few = N * passes["forward"] + 4 * m * passes["inputs"] + m * passes["outputs"]
    result = {
        "two-batch / single": times["two-batch, 2 x M/2"] / times["single, M"],
        "crossfit / two-batch": times["crossfit, M"] / times["two-batch, 2 x M/2"],
        "curvature sampling / two-batch": times["crossfit, curvature sampling, M"]
        / times["two-batch, 2 x M/2"],
        "auto / two-batch": times["auto, 9 M passes"] / times["two-batch, 2 x M/2"],
        "debiasing step / two-batch": debiasing_seconds(model, data, M)
        / times["two-batch, 2 x M/2"],
        "verification / two-batch, 2 x M": verification_share(model, data, M, args.repeats),
        "the same in the first fit of a process": cold_verification_share(model, data, M),
        "full batch / curvature sampling, N=40,000, M=512, all scored": N * passes["both"] / few,
    }
    for name, seconds in times.items():
        print(f"{name:<62}{seconds:10.2f} s, distance {off[name]:.4f} (digits)")
    for name, ratio in result.items():
        print(f"{name:<62}{ratio:10.3f}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    content = {"model": args.model, "budget": M, "seconds": times, "distances": off}
    args.output.write_text(json.dumps(content | {"ratios": result}, indent=2))
    return result


if __name__ == "__main__":
    main()
