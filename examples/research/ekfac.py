"""EKFAC: the eigenvectors of K-FAC with the GGN's own curvature along them.

K-FAC's curvature along ``kron(q_B, q_A)`` is a product of one number per factor. EKFAC measures
that of the GGN instead, from the Jacobian of every datum.
"""

# %% Imports
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from laplace import KronLaplace
from laplace.utils import KronDecomposed
from torch import Tensor

from examples.classifiers import Problem
from examples.research.debiasing_lab import Curves, Fitter, Method, bases_of, curves, reevaluated
from laplace_debias.evaluation import default_grid
from laplace_debias.evaluation.predictors import run_sweep
from laplace_debias.evaluation.table import fresh_metrics
from laplace_debias.kfac.backend import HookGGN
from laplace_debias.network.vectors import softmax_hessian_root
from laplace_debias.predictive.predictor import StructuredPredictor


# %% Curvature
@dataclass(frozen=True)
class EigenvalueCorrected:
    """Eigenvectors of K-FAC with one eigenvalue per entry of a weight.

    ``lam[i]`` is ``[d_B, d_A]``.
    """

    H: KronDecomposed
    lam: list[Tensor]


def ggn_along(problem: Problem, rows: Tensor, bases: list[list[Tensor]]) -> list[Tensor]:
    """Curvature of the GGN of some data along ``kron(q_B, q_A)``, scaled to the training set."""
    model = problem.model
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def outputs(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, x[None])[0]

    jacobians = torch.func.vmap(torch.func.jacrev(outputs), in_dims=(None, 0))
    lam = [torch.zeros(len(Qs[0]), len(Qs[1])) for Qs in bases]
    for part in rows.split(16):
        x = problem.x[part]
        with torch.no_grad():
            root = softmax_hessian_root(model(x))  # [n, C, C - 1]
        for i, J in enumerate(jacobians(weights, x).values()):
            Q_B, Q_A = (Q.float() for Q in bases[i])
            # Root first: one row less per datum to rotate.
            S = torch.einsum("nck,ncoi->nkoi", root, J.flatten(3))
            lam[i] += (Q_B.T @ S @ Q_A).square().sum((0, 1)) * problem.n / len(rows)
    return lam


def ekfac(*, held_out: bool) -> Method:
    """Basis from M data, or from half of them; the GGN's curvature from the same or other half."""

    def fit_method(fit: Fitter, m: int, generator: torch.Generator) -> EigenvalueCorrected:
        rows = fit.uniform(m, generator)
        first, second = rows.chunk(2) if held_out else (rows, rows)
        factors = fit.factors(first)
        if held_out:  # the same data need no further passes
            fit.meter.forward += len(second)
            fit.meter.backward += factors.backward
        H = reevaluated(bases_of(factors), factors, fit.problem.n)
        return EigenvalueCorrected(H, ggn_along(fit.problem, second, H.eigenvectors))

    return fit_method


# %% Comparison
def curves_of_any(problem: Problem, posterior: KronDecomposed | EigenvalueCorrected) -> Curves:
    """Test NLL and ECE over the grid of prior precisions."""
    if isinstance(posterior, KronDecomposed):
        return curves(problem, posterior)
    la = KronLaplace(problem.model, "classification", backend=HookGGN)
    la.H, la.n_data, la.n_outputs = posterior.H, problem.n, 10
    predictor = StructuredPredictor(la, default_grid(problem.n), keep_graph=False)
    predictor.blocks = [
        replace(block, lam=lam.to(block.lam))
        for block, lam in zip(predictor.blocks, posterior.lam, strict=True)
    ]
    metrics = fresh_metrics(("nll", "ece"), len(predictor.deltas), "classification")

    def update(i: int, prediction: tuple[Tensor, ...], y: Tensor) -> None:
        for copies in metrics.values():
            copies[i].update(*prediction, y)

    run_sweep(la, predictor, problem.test_loader, update, link_approx="probit", n_samples=0)
    return {name: [float(c.compute()) for c in copies] for name, copies in metrics.items()}
