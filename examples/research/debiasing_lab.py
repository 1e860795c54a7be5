"""Tools to compare ways of fitting a K-FAC Laplace approximation with that of all training data.

A method gets a ``Fitter``, a number M of data with backward passes and a generator, and returns a
posterior's curvature. ``run`` fits every method, budget and draw, and measures the mean absolute
difference of test NLL and ECE to the full-batch posterior over the paper's 14 prior precisions.
Finished cells are kept, so a run goes on where it was stopped.
"""

# %% Imports
from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from math import inf
from operator import add
from statistics import stdev
from typing import Any

import torch
from laplace import KronLaplace
from laplace.utils import KronDecomposed
from torch import Tensor
from tqdm import tqdm

from examples.classifiers import Problem
from laplace_debias.debias.eigen import eigh_float64
from laplace_debias.evaluation.sweep import sweep_prior_precision
from laplace_debias.kfac.backend import HookGGN
from laplace_debias.kfac.engine import kfac_factors
from laplace_debias.kfac.factors import Factors
from laplace_debias.storage.cells import CellStore

Curves = dict[str, list[float]]


# %% Factors, counted
@dataclass
class Meter:
    """Counts what a fit costs: data in forward passes, and data times backward passes."""

    forward: int = 0
    backward: int = 0


@dataclass(frozen=True)
class Truth:
    """What all training data give; the factors are computed when a method asks for them."""

    problem: Problem

    @cached_property
    def factors(self) -> Factors:
        """Factors of the whole training set."""
        return Fitter(self.problem).factors(torch.arange(self.problem.n))

    def posterior(self) -> KronDecomposed:
        """The full-batch posterior's curvature."""
        return reevaluated(bases_of(self.factors), self.factors, self.problem.n)


@dataclass
class Fitter:
    """Computes and counts factors; ``truth`` is for the oracle alone."""

    problem: Problem
    truth: Truth | None = None
    meter: Meter = field(default_factory=Meter)

    def factors(
        self, indices: Tensor, weights: Tensor | None = None, *, inputs: bool = True, **kwargs
    ) -> Factors:
        """Factors of some data, in mini-batches."""
        parts = []
        for rows in torch.arange(len(indices)).split(self.problem.chunk):
            part = kfac_factors(
                self.problem.model,
                self.problem.x[indices[rows]],
                likelihood="classification",
                weights=None if weights is None else weights[rows],
                inputs=inputs,
                **kwargs,
            )
            self.meter.backward += part.backward
            parts.append(part)
        self.meter.forward += len(indices)
        return reduce(add, parts)

    def inputs(self, indices: Tensor, rows_from: float = inf) -> Factors:
        """Input factors of some data, in mini-batches, from forward passes."""
        x, model = self.problem.x, self.problem.model
        self.meter.forward += len(indices)
        return reduce(
            add,
            [
                kfac_factors(
                    model,
                    x[rows],
                    likelihood="classification",
                    outputs=False,
                    rows_from=rows_from,
                )
                for rows in indices.split(self.problem.chunk)
            ],
        )

    def outputs(self) -> Tensor:
        """The network's outputs for all training data."""
        x, model = self.problem.x, self.problem.model
        self.meter.forward += self.problem.n
        with torch.no_grad():
            return torch.cat([model(part) for part in x.split(self.problem.chunk)])

    def uniform(self, m: int, generator: torch.Generator) -> Tensor:
        """Indices of m distinct data (or of all there are), drawn uniformly."""
        return torch.randperm(self.problem.n, generator=generator)[:m]


def bases_of(factors: Factors) -> list[list[Tensor]]:
    """Eigenvectors of each factor."""
    return [[eigh_float64(M)[1] for M in block] for block in factors.blocks]


def reevaluated(bases: list[list[Tensor]], factors: Factors, n_data: int) -> KronDecomposed:
    """Given eigenvectors, with the curvature that the factors show along them."""
    eigenvalues = []
    for Qs, block in zip(bases, factors.blocks, strict=True):
        lams = [
            (Q.double() * (M.double() @ Q.double())).sum(0).clamp(min=0)
            for Q, M in zip(Qs, block, strict=True)
        ]
        lams[0] *= n_data / factors.weight
        eigenvalues.append([lam.float() for lam in lams])
    return KronDecomposed([[Q.float() for Q in Qs] for Qs in bases], eigenvalues)


# %% Comparison
Method = Callable[[Fitter, int, torch.Generator], Any]


def curves(problem: Problem, H: KronDecomposed) -> Curves:
    """Test NLL and ECE over the grid of prior precisions."""
    la = KronLaplace(problem.model, "classification", backend=HookGGN)
    la.H, la.n_data = H, problem.n
    sweep = sweep_prior_precision(la, problem.test_loader, metrics=("nll", "ece"))
    return {name: list(values) for name, values in sweep.values.items()}


def feasible(budgets: Iterable[int], n: int) -> list[int]:
    """The budgets smaller than a training set of n data; says which it leaves out."""
    kept = []
    for m in budgets:
        if m < n:
            kept.append(m)
        else:
            print(f"Budget {m} left out: the training set has {n} data.")
    if not kept:
        raise ValueError(f"Expected a budget below {n}, the number of training data, got none.")
    return kept


def run(
    problem: Problem,
    methods: Mapping[str, Method],
    budgets: list[int],
    draws: int,
    store: CellStore,
    measure: Callable[[Problem, Any], Curves] = curves,
) -> list[dict]:
    """Fit and compare every method, budget and draw, or read what ``store`` already has."""
    truth = Truth(problem)
    reference = store.get("reference", lambda: curves(problem, truth.posterior()))

    def cell(method: str, m: int, draw: int) -> dict:
        generator = torch.Generator().manual_seed(1000 * m + draw)
        fit = Fitter(problem, truth)
        start = time.perf_counter()
        posterior = methods[method](fit, m, generator)
        seconds = time.perf_counter() - start
        found = measure(problem, posterior)
        row = {"method": method, "m": m, "draw": draw, "seconds": seconds}
        row |= {"forward": fit.meter.forward, "backward": fit.meter.backward}
        for key, values in reference.items():
            row[key] = sum(abs(a - b) for a, b in zip(found[key], values, strict=True)) / len(
                values
            )
        return row

    rows = []
    tasks = [(method, m, draw) for m in budgets for draw in range(draws) for method in methods]
    for method, m, draw in tqdm(tasks):
        name = re.sub(r"[^\w.-]+", "-", f"{method}_{m}_{draw}")
        rows.append(store.get(name, lambda task=(method, m, draw): cell(*task)))
    return rows


def standard_error(values: list[float]) -> float:
    """Standard error of a mean; not a number for a single value."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def mean(rows: list[dict], method: str, m: int, key: str) -> float:
    """Mean of a column over the draws."""
    values = [row[key] for row in rows if (row["method"], row["m"]) == (method, m)]
    return sum(values) / len(values)
