"""What else was tried to fit a K-FAC Laplace approximation from few data, and what a pool costs.

On the same footing as ``debiasing_methods.py``, on digits: mean absolute difference of the test NLL
to the full-batch posterior over the paper's 14 prior precisions, as a fraction of the single
mini-batch's, at M data with backward passes. Four groups:

* folds and shrinkage, on M data drawn uniformly, against ``two folds``;
* curvature sampling with other scores, shares of the uniform distribution, and independent draws,
  against ``curvature sampling``, with all data scored and input factors from 4 M data;
* the number of data scored (``n_pool``), and
* the number of data for the input factors (``n_input``), with what they cost.

Results are kept in ``outputs/``, and a run goes on where it was stopped.

    python -m examples.research.debiasing_losers    # some minutes
"""

# %% Imports
from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from laplace.utils import KronDecomposed
from torch import Tensor, nn

from examples.classifiers import trained_problem
from examples.research.analytical_shrinkage import analytical_shrinkage
from examples.research.debiasing_lab import Fitter, Method, mean, run, standard_error
from examples.research.debiasing_methods import library, sampled, single
from examples.research.ekfac import curves_of_any, ekfac
from laplace_debias.debias.eigen import eigh_float64, null_tolerance
from laplace_debias.debias.folds import crossfit_factor
from laplace_debias.storage.cells import CellStore

# %% One factor at a time
# A rule turns a factor's means over parts of the data, their sizes and a generator into
# eigenvalues and eigenvectors.
Rule = Callable[[list[Tensor], list[int], torch.Generator], tuple[Tensor, Tensor]]


def factorwise(rule: Rule, shares: list[int]) -> Method:
    """M data, cut into parts in proportion to the shares, and a rule for every factor."""

    def fit_method(fit: Fitter, m: int, generator: torch.Generator) -> KronDecomposed:
        sizes = [m * share // sum(shares) for share in shares]
        parts = [fit.factors(rows) for rows in fit.uniform(m, generator).split(sizes)]
        vectors, values = [], []
        for i, block in enumerate(parts[0].blocks):
            # B is a sum over data, A a mean.
            B = [part.blocks[i][0] / part.weight for part in parts]
            A = [part.blocks[i][1] for part in parts]
            lams, Qs = zip(*(rule(means, sizes, generator) for means in (B, A)), strict=True)
            vectors.append([Q.to(block[0].dtype) for Q in Qs])
            values.append([(fit.problem.n * lams[0]).float(), lams[1].float()])
        return KronDecomposed(vectors, values)

    return fit_method


def crossfitted(means: list[Tensor], sizes: list[int], _: torch.Generator) -> tuple[Tensor, Tensor]:
    """As many folds as parts."""
    return crossfit_factor(means, sizes)


def not_monotone(
    means: list[Tensor], sizes: list[int], _: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Cross-fitted eigenvalues as they come, not projected onto rising sequences."""
    return crossfit_factor(means, sizes, monotone=False)


def repeated(
    means: list[Tensor], sizes: list[int], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Mean over four random splits of the (equally large) parts into two folds."""
    stack, lams = torch.stack(means), []
    for _ in range(4):
        halves = torch.randperm(len(means), generator=generator).chunk(2)
        folds = [stack[half].mean(0) for half in halves]
        lam, Q = crossfit_factor(folds, [len(half) for half in halves])
        lams.append(lam)
    return torch.stack(lams).mean(0), Q


def shrunk(means: list[Tensor], sizes: list[int], _: torch.Generator) -> tuple[Tensor, Tensor]:
    """Analytical nonlinear shrinkage of the whole factor; a datum counts as one observation."""
    M = sum(size / sum(sizes) * part for size, part in zip(sizes, means, strict=True))
    lam, Q = eigh_float64(M)
    return analytical_shrinkage(lam, sum(sizes), null_tolerance(M)), Q


# %% Other scores
def frobenius(fit: Fitter, outputs: Tensor) -> Tensor:
    """Frobenius norm of each datum's output Hessian."""
    p = outputs.double().softmax(-1)
    return (torch.diag_embed(p) - p[:, :, None] * p[:, None]).flatten(1).norm(dim=1)


def behind_last_layer(fit: Fitter, outputs: Tensor) -> Tensor:
    """Trace of the Hessian with respect to the last layer's input.

    ``tr(W^T (diag p - p p^T) W)``.
    """
    W = [layer for layer in fit.problem.model if isinstance(layer, nn.Linear)][-1].weight
    G, p = (W @ W.T).detach().double(), outputs.double().softmax(-1)
    return (p * G.diag()).sum(1) - ((p @ G) * p).sum(1)


# %% Everything
POOLS = {"n_pool = 4 M": 4, "n_pool = 8 M": 8, "n_pool = 16 M": 16, "n_pool = all": None}
METHODS: dict[str, Method] = {
    "single": single,
    "two folds": factorwise(crossfitted, [1, 1]),
    "four folds": factorwise(crossfitted, [1] * 4),
    "eight folds": factorwise(crossfitted, [1] * 8),
    "two folds of sizes 1 : 3": factorwise(crossfitted, [1, 3]),
    "four random splits into two": factorwise(repeated, [1] * 8),
    "two folds, not monotone": factorwise(not_monotone, [1, 1]),
    "Ledoit and Wolf 2020": factorwise(shrunk, [1]),
    "EKFAC, same data": ekfac(held_out=False),
    "EKFAC, held-out half": ekfac(held_out=True),
    "curvature sampling": sampled(),
    "independent draws": sampled(systematic=False),
    "score: Frobenius norm": sampled(score=frobenius),
    "score: behind last layer": sampled(score=behind_last_layer),
    **{f"uniform share {u}": sampled(u=u) for u in (0.0, 0.02, 0.05, 0.1, 0.2)},
    **{name: library(pool=k) for name, k in POOLS.items()},
    **{f"n_input = {k} M, all scored": library(inputs=k) for k in (1, 2, 8, 16)},
}


def table(rows: list[dict]) -> str:
    """Gap as a fraction of the single mini-batch's with its standard error, and cost per M."""
    budgets = sorted({row["m"] for row in rows})
    lines = ["method".ljust(30) + "".join(f"{f'M={m}: NLL gap':>18}{'passes':>8}" for m in budgets)]
    for method in dict.fromkeys(row["method"] for row in rows):
        line = method.ljust(30)
        for m in budgets:
            gaps = [row["nll"] for row in rows if (row["method"], row["m"]) == (method, m)]
            unit = mean(rows, "single", m, "nll")
            error = standard_error(gaps) / unit
            passes = sum(mean(rows, method, m, key) for key in ("forward", "backward")) / m
            line += f"{sum(gaps) / len(gaps) / unit:10.3f} +- {error:.3f}{passes:8.1f}"
        lines.append(line)
    return "\n".join(lines)


def figure(rows: list[dict], n: int, path: Path) -> None:
    """Gap against the number of data scored, out of n."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, ax = plt.subplots(figsize=(5, 3.6), constrained_layout=True)
    for m, marker in zip(sorted({row["m"] for row in rows}), "os^v", strict=False):
        unit, points = mean(rows, "single", m, "nll"), {}
        for name, k in POOLS.items():
            gaps = [row["nll"] / unit for row in rows if (row["method"], row["m"]) == (name, m)]
            if gaps:
                points[n if k is None else min(k * m, n)] = (
                    sum(gaps) / len(gaps),
                    standard_error(gaps),
                )
        means, errors = zip(*points.values(), strict=True)
        ax.errorbar(list(points), means, errors, marker=marker, capsize=3, label=f"M = {m}")
    ax.set(yscale="log", xlabel="data scored (one forward pass each)")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:.0f}")
    ax.set_ylabel("NLL gap / gap of a single mini-batch")
    ax.legend()
    fig.savefig(path, dpi=150)
    plt.close(fig)


def main(argv: list[str] | None = None) -> list[dict]:
    """Train, compare, print the table, and write results and figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budgets", type=int, nargs="*", default=[32, 128])
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--output", type=Path, default=Path("outputs"))
    args = parser.parse_args(argv)

    problem = trained_problem("digits", args.epochs)
    stem = args.output / "debiasing_losers"
    store = CellStore(stem, {"data": "digits", "epochs": args.epochs})
    methods = {name: METHODS[name] for name in dict.fromkeys(["single", *args.methods])}
    rows = run(problem, methods, args.budgets, args.draws, store, curves_of_any)
    print(table(rows))
    stem.with_suffix(".json").write_text(json.dumps(rows, indent=1))
    figure(rows, problem.n, stem.with_suffix(".png"))
    return rows


# %% What came out
# Eight draws; the gap as a fraction of the single mini-batch's, with its standard error, and
# forward plus backward passes per datum with backward passes.
#
#     method                             M=32: NLL gap  passes    M=128: NLL gap  passes
#     single                             1.000 +- 0.119    10.0     1.000 +- 0.238    10.0
#     two folds                          0.210 +- 0.049    10.0     0.442 +- 0.102    10.0
#     four folds                         0.292 +- 0.082    10.0     0.489 +- 0.100    10.0
#     eight folds                        0.335 +- 0.099    10.0     0.468 +- 0.086    10.0
#     two folds of sizes 1 : 3           0.608 +- 0.278    10.0     0.620 +- 0.123    10.0
#     four random splits into two        0.212 +- 0.047    10.0     0.505 +- 0.114    10.0
#     two folds, not monotone            0.293 +- 0.062    10.0     0.483 +- 0.085    10.0
#     Ledoit and Wolf 2020               0.824 +- 0.125    10.0     0.962 +- 0.218    10.0
#     EKFAC, same data                   1.076 +- 0.120    10.0     1.268 +- 0.291    10.0
#     EKFAC, held-out half               0.893 +- 0.171    10.0     0.869 +- 0.303    10.0
#     curvature sampling                 0.041 +- 0.018    54.5     0.093 +- 0.021    24.1
#     independent draws                  0.036 +- 0.010    54.5     0.073 +- 0.015    24.1
#     score: Frobenius norm              0.041 +- 0.013    54.5     0.092 +- 0.006    24.1
#     score: behind last layer           0.042 +- 0.020    54.5     0.065 +- 0.012    24.1
#     uniform share 0.0                  0.049 +- 0.025    54.5     0.054 +- 0.011    24.1
#     uniform share 0.02                 0.032 +- 0.012    54.5     0.073 +- 0.007    24.1
#     uniform share 0.05                 0.041 +- 0.018    54.5     0.093 +- 0.021    24.1
#     uniform share 0.1                  0.046 +- 0.021    54.5     0.098 +- 0.026    24.1
#     uniform share 0.2                  0.033 +- 0.015    54.5     0.108 +- 0.019    24.1
#     n_pool = 4 M                       0.198 +- 0.045    10.6     0.215 +- 0.052    10.7
#     n_pool = 8 M                       0.155 +- 0.039    16.2     0.090 +- 0.018    16.2
#     n_pool = 16 M                      0.075 +- 0.012    25.7     0.063 +- 0.013    18.7
#     n_pool = all                       0.017 +- 0.003    50.5     0.063 +- 0.013    18.7
#     n_input = 1 M, all scored          0.023 +- 0.004    50.5     0.056 +- 0.011    18.7
#     n_input = 2 M, all scored          0.019 +- 0.003    50.5     0.055 +- 0.010    18.7
#     n_input = 8 M, all scored          0.017 +- 0.003    50.5     0.065 +- 0.013    18.7
#     n_input = 16 M, all scored         0.016 +- 0.003    50.5     0.069 +- 0.015    18.8
#
# * Two folds win or tie, and need the fewest decompositions. Shrinkage without held-out data
#   repairs little. EKFAC's limit is another matrix than K-FAC's, so it need not come close.
# * Scores and shares are the same within errors, so the simplest score stays.
# * A pool of 4 M brings much of the variance back. 16 M forward passes are less than twice the nine
#   backward passes of M data, each of which takes longer than a forward pass, so scoring does not
#   dominate a fit. That is why `n_pool` is 16 M by default; score all data where a small M matters
#   more than time. (At M = 128 all 1,297 data are fewer than 16 M.)
# * Input factors from 2 M data on make no difference: the one wide linear layer, which would gain
#   from more, takes the rows of scored data whatever `n_input` is.


if __name__ == "__main__":
    main()
