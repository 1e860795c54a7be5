"""Time of K-FAC's factors: this package's hooks against ASDL, curvlinops and bare backward passes.

Every row is one mini-batch of one network; times are the best of several repeats, taken in turns,
and the last columns are ratios within the run. The table is printed, and written as JSON
to ``outputs/bench_kfac.json``.

    python -m examples.benchmarks.kfac
    python -m examples.benchmarks.kfac --cases "CNN 28x28, 32" --repeats 1
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

from examples.networks import all_cnn_c, resnet20, strided_cnn
from laplace_debias.kfac.backend import HookGGN
from laplace_debias.kfac.engine import kfac_factors

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


# %% The table
def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Time all cases, print the table, write the JSON, and return the times in seconds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("outputs/bench_kfac.json"))
    args = parser.parse_args(argv)

    torch.manual_seed(0)
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
