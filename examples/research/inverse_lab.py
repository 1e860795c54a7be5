"""Estimators of a full-batch posterior against each other: distance at equal backward passes.

The distance is ``posterior_distance``, the mean |log ratio| of predictive standard deviations, on
test inputs and on far ones. P backward passes are P / 9 exact data for ten classes and P data for
one output. Besides the library's methods there are those that lost:

* ``single + c``: one mini-batch, its factors inflated by ``(1 - df / N) / (1 - df / n)``;
* ``geometric mean``: two mini-batches, own and held-out eigenvalues multiplied, and the root;
* ``quadratic shrinkage``: one mini-batch, its eigenvalues shrunk without other data;
* ``held-out likelihood``: per factor the likeliest of own, inflated, shrunk and held-out ones;
* ``crossfit + curvature sampling``, with exact vectors and with one random vector per datum;
* ``pairs``: the draws of ``auto`` without any correction, and ``pairs + scalar c``, with the number
  of draws for n. ``auto`` takes each draw's own leverage, and a floor where draws are few.

    python -m examples.research.inverse_lab                       # all problems, some 20 minutes
    python -m examples.research.inverse_lab --problems diabetes 1-D --draws 4
    python -m examples.research.inverse_lab --certificate         # is the estimated distance right?
    python -m examples.research.inverse_lab --log-dets            # the same cells, another judge
    python -m examples.research.inverse_lab --crossfit-parts --trainings 5
    python -m examples.research.inverse_lab --prior-changes       # a prior changed after the fit

Results are kept in ``outputs/inverse_lab``, and a run goes on where it was stopped.
"""

# %% Imports
from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from unittest.mock import patch

import torch
from torch import Tensor

from examples.research.heldout_likelihood import likeliest, ridges_of
from examples.research.inverse_problems import PROBLEMS, InverseProblem, clusters
from laplace_debias import linearized_predictive, posterior_distance
from laplace_debias.data.roles import TrainingData
from laplace_debias.debias import folds
from laplace_debias.debias.auto import fit_auto
from laplace_debias.debias.inverse import resolvent_inflation
from laplace_debias.debias.options import AutoOptions
from laplace_debias.debias.spectrum import FitResult
from laplace_debias.evaluation.sweep import sweep_prior_precision
from laplace_debias.kfac.engine import Engine
from laplace_debias.posterior import DebiasedKronLaplace
from laplace_debias.storage.cells import CellStore

Method = Callable[[InverseProblem, float, int, torch.Generator], DebiasedKronLaplace]


# %% Methods
def n_exact(p: InverseProblem, passes: int) -> int:
    """Data whose exact vectors take so many backward passes."""
    return max(2, passes // 9) if p.likelihood == "classification" else passes


def single(p: InverseProblem, prior: float, P: int, g: torch.Generator) -> DebiasedKronLaplace:
    """One mini-batch."""
    la = p.laplace("single", prior)
    la.fit(p.draw(n_exact(p, P), g), n_data=len(p.x))
    return la


def two_batch(p: InverseProblem, prior: float, P: int, g: torch.Generator) -> DebiasedKronLaplace:
    """The paper's method with two halves."""
    x, y = p.draw(n_exact(p, P), g)
    h = len(x) // 2
    la = p.laplace("two-batch", prior)
    la.fit((x[:h], y[:h]), curvature_loader=(x[h:], y[h:]), n_data=len(p.x))
    return la


def with_values(la: DebiasedKronLaplace, fit: FitResult, values: list) -> DebiasedKronLaplace:
    """The same basis with other eigenvalues."""
    la.take_over(replace(fit, lam_tilde=values))
    return la


def ridge(p: InverseProblem, prior: float) -> float:
    """Prior precision over the Hessian factor."""
    return prior * p.sigma_noise**2


def inflated(
    p: InverseProblem, prior: float, fit: FitResult, n_B: float, N_B: float, n_A: float
) -> list:
    """Both factors of every block inflated by scalars of their numbers of rows, of N and N_B."""
    N, d, values = float(len(p.x)), ridge(p, prior), []
    for lam in fit.lam:
        if len(lam) == 1:
            values.append([lam[0] * resolvent_inflation(lam[0], lam[0].new_tensor([d]), n_B, N_B)])
            continue
        B, A = lam
        c_A = resolvent_inflation(B, d / A.clamp(min=1e-14 * float(A.max())), n_B, N_B)
        c_B = A.new_ones(len(B))
        if n_A < N:
            c_B = resolvent_inflation(A, d / B.clamp(min=1e-14 * float(B.max())), n_A, N)
        values.append([c_B * B, c_A * A])
    return values


def single_c(p: InverseProblem, prior: float, P: int, g: torch.Generator) -> DebiasedKronLaplace:
    """One mini-batch, inflated."""
    la, M = single(p, prior, P, g), n_exact(p, P)
    k = 9 if p.likelihood == "classification" else 1  # exact vectors per datum
    fit = la._posterior()
    return with_values(la, fit, inflated(p, prior, fit, M * k, len(p.x) * k, M))


def geometric(p: InverseProblem, prior: float, P: int, g: torch.Generator) -> DebiasedKronLaplace:
    """Geometric mean of own and held-out eigenvalues."""
    la = two_batch(p, prior, P, g)
    fit = la._posterior()
    pairs = zip(fit.lam, fit.lam_tilde, strict=True)
    values = [[(a * b).sqrt() for a, b in zip(x, y, strict=True)] for x, y in pairs]
    return with_values(la, fit, values)


def crossfit(**options: object) -> Method:
    """Cross-fitting with its options; ``vectors`` data per exact datum for sampled ones."""

    def fit(p: InverseProblem, prior: float, P: int, g: torch.Generator) -> DebiasedKronLaplace:
        M = P if options.get("fisher") == "mc" else n_exact(p, P)
        M = max(4, min(M, len(p.x)))
        pool = {"n_pool": len(p.x)} if "sampling" in options else {}
        la = p.laplace("crossfit", prior, n_curvature=M, generator=g, **pool, **options)
        la.fit(p.loader(g))
        return la

    return fit


def quadratic_shrinkage(lam: Tensor, n: float, tol: float = 1e-12) -> Tensor:
    r"""Quadratic-inverse shrinkage of eigenvalues (Ledoit and Wolf 2022, Bernoulli 28, sec. 4).

    With :math:`x_j = 1 / \lambda_j`, :math:`c = p / n` and
    :math:`h = (\min(c^2, c^{-2}) / p)^{0.35}`, the smoothed Stein shrinker :math:`\theta` and its
    conjugate :math:`\bar\theta` are means over j of :math:`x_j (x_j - x_i) / D_{ji}` and
    :math:`h x_j^2 / D_{ji}`, :math:`D_{ji} = (x_j - x_i)^2 + h^2 x_j^2`, and the new eigenvalues
    :math:`1 / (x ((1 - c)^2 + 2 c (1 - c) \theta + c^2 (\theta^2 + \bar\theta^2)))`
    for :math:`p \le n`, else :math:`1 / (x (\theta^2 + \bar\theta^2))` and, for zeros,
    :math:`1 / ((c - 1)\, \mathrm{mean}\, x)`; the trace is kept.
    """
    lam = lam.double().clamp(min=0)
    seen = lam > tol * lam.max()
    x, L = 1 / lam[seen], int(seen.sum())
    rank_short = L >= n
    size = len(lam) if rank_short else L
    c = size / n
    h = min(c**2, c**-2) ** 0.35 / size**0.35
    gap = x[:, None] - x
    D = gap.square() + (h * x[:, None]).square()
    theta = (x[:, None] * gap / D).mean(0)
    square = theta.square() + (h * x[:, None].square() / D).mean(0).square()
    new = torch.zeros_like(lam)
    if rank_short:
        new[~seen] = 1 / (max(c - 1, 1e-3) * x.mean())
        new[seen] = 1 / (x * square)
    else:
        new[seen] = 1 / (x * ((1 - c) ** 2 + 2 * c * (1 - c) * theta + c**2 * square))
    return new * (lam.sum() / new.sum())


def shrunk_values(p: InverseProblem, fit: FitResult, M: int) -> list:
    """Eigenvalues of a fit on M data, shrunk; a backward vector counts as one observation."""
    k = 9 if p.likelihood == "classification" else 1
    numbers = [(M * k, M)[: len(lam)] for lam in fit.lam]
    return [
        [quadratic_shrinkage(part, n) for part, n in zip(lam, ns, strict=True)]
        for lam, ns in zip(fit.lam, numbers, strict=True)
    ]


def shrunk(p: InverseProblem, prior: float, P: int, g: torch.Generator) -> DebiasedKronLaplace:
    """One mini-batch, its eigenvalues shrunk."""
    la = single(p, prior, P, g)
    fit = la._posterior()
    return with_values(la, fit, shrunk_values(p, fit, n_exact(p, P)))


def by_likelihood(
    p: InverseProblem, prior: float, P: int, g: torch.Generator
) -> DebiasedKronLaplace:
    """Per factor, own, inflated, shrunk or held-out eigenvalues, by held-out likelihood.

    Half the data give a basis, its own eigenvalues, and these inflated and shrunk. Each quarter of
    the others measures held-out ones, and judges all with the other quarter's. The choice is then
    made from all data: own, inflated and shrunk of the whole mini-batch, held-out of two halves.
    """
    x, y = p.draw(n_exact(p, P), g)
    M, h, k = len(x), len(x) // 2, 9 if p.likelihood == "classification" else 1

    def fitted(own: slice, other: slice | None) -> tuple[DebiasedKronLaplace, FitResult]:
        la = p.laplace("single" if other is None else "two-batch", prior)
        held = {} if other is None else {"curvature_loader": (x[other], y[other])}
        la.fit((x[own], y[own]), n_data=len(p.x), **held)
        return la, la._posterior()

    def made(fit: FitResult, m: int) -> dict[str, list]:
        n = m * k, len(p.x) * k, m
        values = {"own": fit.lam, "inflated": inflated(p, prior, fit, *n)}
        return values | {"shrunk": shrunk_values(p, fit, m)}

    own, q = slice(0, h), h + max(1, (M - h) // 2)
    quarters = [fitted(own, part)[1].lam_tilde for part in (slice(h, q), slice(q, M))]
    half, (la, whole) = fitted(own, slice(h, M))[1], fitted(slice(0, M), None)
    of_half, of_all = made(half, h), made(whole, M)
    Q, values = [list(block) for block in whole.Q], [list(block) for block in whole.lam]
    for b, lam in enumerate(half.lam):
        for f in range(len(lam)):
            first, second = (part[b][f] for part in quarters)
            parts = {name: (found[b][f],) * 2 for name, found in of_half.items()}
            parts |= {"held-out": (first, second)}
            ridges = ridges_of(lam[1 - f] if len(lam) == 2 else None, ridge(p, prior))
            name = likeliest(parts, (second, first), ridges)
            if name == "held-out":
                Q[b][f], values[b][f] = half.Q[b][f], half.lam_tilde[b][f]
            else:
                values[b][f] = of_all[name][b][f]
    return with_values(la, replace(whole, Q=Q), values)


def pairs(p: InverseProblem, prior: float, P: int, g: torch.Generator) -> DebiasedKronLaplace:
    """The draws of ``auto``, nothing corrected."""
    engine = Engine(p.model, p.likelihood)
    data = TrainingData(p.loader(g), None, len(p.x), torch.device("cpu"))
    options = AutoOptions(None, P, generator=g)
    ridges = torch.full((len(engine.names),), ridge(p, prior))
    la = p.laplace("auto", prior)
    la.take_over(fit_auto(engine, data, options, ridges, correct=False))
    return la


def pairs_c(p: InverseProblem, prior: float, P: int, g: torch.Generator) -> DebiasedKronLaplace:
    """The same, inflated by a scalar of the number of draws."""
    la = pairs(p, prior, P, g)
    fit = la._posterior()
    n_pairs = len(p.x) * fit.n_outputs
    values = inflated(p, prior, fit, P, n_pairs, len(p.x))
    values[-2:] = fit.lam[-2:]  # the output layer is exact
    return with_values(la, fit, values)


def auto(p: InverseProblem, prior: float, P: int, g: torch.Generator) -> DebiasedKronLaplace:
    """The library's own."""
    la = p.laplace("auto", prior, tolerance=None, n_passes=P, generator=g)
    la.fit(p.loader(g))
    return la


METHODS: dict[str, Method] = {
    "single": single,
    "single + c": single_c,
    "two-batch": two_batch,
    "geometric mean": geometric,
    "quadratic shrinkage": shrunk,
    "held-out likelihood": by_likelihood,
    "crossfit": crossfit(),
    "crossfit + curvature": crossfit(sampling="curvature"),
    "crossfit + curvature, one vector": crossfit(sampling="curvature", fisher="mc"),
    "pairs": pairs,
    "pairs + scalar c": pairs_c,
    "auto": auto,
}


# %% Cells
def budgets_of(p: InverseProblem, only: list[int] | None = None) -> tuple[int, ...]:
    """Numbers of backward passes; of these, only some."""
    every = (36, 144, 576, 2304) if p.likelihood == "classification" else (16, 64, 256)
    return tuple(P for P in every if only is None or P in only)


def reference(p: InverseProblem, prior: float) -> DebiasedKronLaplace:
    """The full-batch posterior."""
    la = p.laplace("single", prior)
    la.fit(p.loader())
    return la


def nll(p: InverseProblem, la: DebiasedKronLaplace) -> list[float]:
    """Test NLL over the paper's 14 prior precisions."""
    test = [(p.x_test, p.y_test)]
    return list(sweep_prior_precision(la, test, metrics=("nll",)).values["nll"])


def cell(
    p: InverseProblem, full: DebiasedKronLaplace, method: Method, prior: float, P: int, draw: int
) -> dict:
    """Distances of one fit, and what it cost."""
    start = time.perf_counter()
    la = method(p, prior, P, torch.Generator().manual_seed(1000 * P + draw))
    row = {"seconds": time.perf_counter() - start}
    row |= {"test": posterior_distance(la, full, p.x_test)}
    row |= {"far": posterior_distance(la, full, p.far)}
    n_params = sum(q.numel() for q in p.model.parameters() if q.requires_grad)
    both = [float(one.log_det_posterior_precision.detach()) for one in (la, full)]
    row |= {"logdet": abs(both[0] - both[1]) / n_params}
    if la.fit_report is not None and la.fit_report.distance is not None:
        row |= {"estimate": la.fit_report.distance, "error": la.fit_report.standard_error}
        row |= {"backward": la.fit_report.n_passes, "forward": la.fit_report.n_forward}
    if p.y_test is not None and P == 576 and prior == p.prior_precisions[0]:
        gaps = zip(nll(p, la), nll(p, full), strict=True)
        row["nll"] = mean(abs(a - b) for a, b in gaps)
    return row


def rows_of(
    p: InverseProblem,
    methods: list[str],
    draws: int,
    output: Path,
    budgets: tuple[int, ...] | None = None,
) -> list[dict]:
    """All cells of a problem, those that are kept read from files."""
    store, rows = CellStore(output / p.name, {"problem": p.name, "version": 1}), []
    for prior in p.prior_precisions:
        full: list[DebiasedKronLaplace] = []

        def made(name: str, P: int, draw: int, prior: float = prior, full: list = full) -> dict:
            full[:] = full or [reference(p, prior)]
            return cell(p, full[0], METHODS[name], prior, P, draw)

        for P in budgets or budgets_of(p):
            for name in methods:
                for draw in range(draws):
                    key = f"{name}_{prior}_{P}_{draw}".replace(" ", "-").replace(",", "")
                    row = store.get(key, lambda a=(name, P, draw): made(*a))
                    rows.append({"method": name, "prior": prior, "P": P, "draw": draw, **row})
    return rows


# %% Tables
def chosen(rows: list[dict], key: str, **which: object) -> list[float]:
    """A column of some rows."""
    return [r[key] for r in rows if key in r and all(r[k] == v for k, v in which.items())]


def table(p: InverseProblem, rows: list[dict]) -> str:
    """Distance on test / far inputs, mean over draws, with the standard error of the former."""
    lines = []
    for prior in p.prior_precisions:
        budgets = budgets_of(p)
        head = f"{p.name}, prior precision {prior:g} (test / far)"
        lines += [f"| {head} | " + " | ".join(f"P = {P}" for P in budgets) + " |"]
        lines += ["| --- |" + " --- |" * len(budgets)]
        for name in dict.fromkeys(r["method"] for r in rows):
            texts = []
            for P in budgets:
                found = [chosen(rows, k, method=name, prior=prior, P=P) for k in ("test", "far")]
                if not found[0]:
                    texts.append("")
                    continue
                error = stdev(found[0]) / len(found[0]) ** 0.5 if len(found[0]) > 1 else 0.0
                texts.append(f"{mean(found[0]):.4f} ± {error:.4f} / {mean(found[1]):.4f}")
            lines.append(f"| {name} | " + " | ".join(texts) + " |")
        lines.append("")
        gaps = {
            name: chosen(rows, "nll", method=name, prior=prior, P=576)
            for name in dict.fromkeys(r["method"] for r in rows)
        }
        texts = [f"{name} {mean(found):.2g}" for name, found in gaps.items() if found]
        if texts:
            lines.append("NLL gap over 14 prior precisions, P = 576: " + ", ".join(texts))
    return "\n".join(lines)


def log_dets(p: InverseProblem, rows: list[dict]) -> str:
    """Mean |difference| of the log determinants to the full batch's, per weight."""
    lines, names = [], dict.fromkeys(r["method"] for r in rows)
    cells = dict.fromkeys((r["prior"], r["P"]) for r in rows)
    lines += ["| problem | prior precision | P | " + " | ".join(names) + " |"]
    lines += ["| --- " * (3 + len(names)) + "|"]
    for prior, P in cells:
        found = [chosen(rows, "logdet", method=name, prior=prior, P=P) for name in names]
        texts = [f"{mean(values):.2g}" if values else "" for values in found]
        lines.append(f"| {p.name} | {prior:g} | {P} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def certificate(
    p: InverseProblem, draws: int, output: Path, budgets: tuple[int, ...] | None = None
) -> str:
    """How often the true distance lies below estimate + 2 errors, and the ratio of the means."""
    rows = rows_of(p, ["auto"], draws, output, budgets)
    lines = []
    for prior in p.prior_precisions:
        for P in budgets or budgets_of(p):
            found = [r for r in rows if (r["prior"], r["P"]) == (prior, P)]
            truth = [(r["test"] + r["far"]) / 2 for r in found]
            bound = [r["estimate"] + 2 * r["error"] for r in found]
            inside = mean(float(t <= b) for t, b in zip(truth, bound, strict=True))
            estimate = mean(r["estimate"] for r in found)
            lines.append(
                f"| {p.name} | {prior:g} | {P} | {mean(truth):.4f} | {estimate:.4f} | "
                f"{estimate / max(mean(truth), 1e-12):.2f} | {100 * inside:.0f} % |"
            )
    return "\n".join(lines)


def prior_changes(p: InverseProblem, draws: int) -> str:
    """Distance at a prior precision that was set after the fit, to the full batch's at it."""
    lines, base = [], p.prior_precisions[0]
    for P in budgets_of(p)[:3]:
        texts = []
        for factor in (0.01, 1.0, 100.0):
            full = reference(p, base * factor)
            found = []
            for draw in range(draws):
                g = torch.Generator().manual_seed(draw)
                la = auto(p, base, P, g)
                la.prior_precision = base * factor
                found.append(posterior_distance(la, full, p.x_test))
            texts.append(f"{mean(found):.4f}")
        lines.append(f"| {p.name} | {P} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def along(fit: FitResult, full: FitResult) -> list:
    """Curvatures of all data along the directions of a fit."""
    values = []
    for Qs, Rs, lams in zip(fit.Q, full.Q, full.lam, strict=True):
        turned = [(R.T @ Q).square() for Q, R in zip(Qs, Rs, strict=True)]
        values.append([T.T @ lam for T, lam in zip(turned, lams, strict=True)])
    return values


def parts_of(p: InverseProblem, full: FitResult, P: int, draw: int) -> dict[str, list]:
    """Bases and eigenvalues, part by part, of what cross-fitting makes of one draw."""
    x, y = p.draw(P, torch.Generator().manual_seed(1000 * P + draw))
    h, prior, fits = P // 2, p.prior_precisions[0], []
    for own, other in ((slice(0, h), slice(h, P)), (slice(h, P), slice(0, h))):
        la = p.laplace("two-batch", prior)
        la.fit((x[own], y[own]), curvature_loader=(x[other], y[other]), n_data=len(p.x))
        fits.append(la._posterior())
    la = p.laplace("single", prior)
    la.fit((x, y), n_data=len(p.x))
    whole = la._posterior()
    pairs = zip(fits[0].lam_tilde, fits[1].lam_tilde, strict=True)
    mixed = [[(a + b) / 2 for a, b in zip(*pair, strict=True)] for pair in pairs]
    return {
        "own bases, held-out": [(fit, fit.lam_tilde) for fit in fits],
        "own bases, all data's": [(fit, along(fit, full)) for fit in fits],
        "pooled basis, held-out": [(whole, mixed)],
        "the same, isotonic": [(whole, [[folds.isotonic(v) for v in b] for b in mixed])],
        "pooled basis, all data's": [(whole, along(whole, full))],
        "single": [(whole, whole.lam)],
    }


def crossfit_parts(trainings: int, draws: int, P: int = 256) -> str:
    """What makes cross-fitting wrong on the 1-D regression: signed log ratios, part by part.

    Both halves of a draw give a basis each, and held-out curvatures along the other's. These stay
    where they were measured (the mean of both posteriors' log ratios), or go onto the basis of the
    whole draw as cross-fitting does, with and without isotonic regression. On the same bases: the
    curvatures of all data, free of noise.
    """
    lines = []
    for training in range(trainings):
        p = clusters(training)
        full, found = reference(p, p.prior_precisions[0]), {}
        exact = linearized_predictive(full, p.x_test).covariance.flatten()
        for draw in range(draws):
            for name, fits in parts_of(p, full._posterior(), P, draw).items():
                made = [with_values(p.laplace("single", full.prior_precision), *f) for f in fits]
                all_ = [linearized_predictive(la, p.x_test).covariance.flatten() for la in made]
                ratio = torch.stack([0.5 * (each / exact).log() for each in all_])
                sizes = float(ratio.abs().mean()), float(ratio.mean())
                found.setdefault(name, []).append(sizes)
        for name, both in found.items():
            size, signed = (mean(column) for column in zip(*both, strict=True))
            error = stdev(s for _, s in both) / draws**0.5
            lines.append(f"| {training} | {name} | {size:.4f} | {signed:+.4f} ± {error:.4f} |")
    return "\n".join(lines)


def crossfit_rounded(trainings: int, draws: int, P: int = 256) -> str:
    """The library's cross-fitting on the 1-D regression in double and in single precision.

    And as it was: with the null space of single precision averaged, however many the data.
    """

    def rounded(M: Tensor) -> float:
        return len(M) ** 0.5 * torch.finfo(torch.float32).eps

    lines = []
    for training in range(trainings):
        p = clusters(training)
        full = reference(p, p.prior_precisions[0])
        exact = linearized_predictive(full, p.x_test).covariance.flatten()
        low = replace(p, model=deepcopy(p.model).float(), x=p.x.float(), y=p.y.float())
        cases = {"double": (p, None), "single": (low, None), "single, averaged": (low, rounded)}
        for name, (problem, tolerance) in cases.items():
            both = []
            for draw in range(draws):
                g = torch.Generator().manual_seed(1000 * P + draw)
                with patch.object(folds, "null_tolerance", tolerance or folds.null_tolerance):
                    la = crossfit()(problem, p.prior_precisions[0], P, g)
                x_test = p.x_test.to(problem.x)
                found = linearized_predictive(la, x_test).covariance.flatten().double()
                ratio = 0.5 * (found / exact).log()
                both.append((float(ratio.abs().mean()), float(ratio.mean())))
            size, signed = (mean(column) for column in zip(*both, strict=True))
            error = stdev(s for _, s in both) / draws**0.5
            lines.append(f"| {training} | {name} | {size:.4f} | {signed:+.4f} ± {error:.4f} |")
    return "\n".join(lines)


def leak(path: Path, d: int = 60, n: int = 90) -> Tensor:
    """The picture of the leak: curvatures along an estimated basis, and what its inverse needs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    generator = torch.Generator().manual_seed(0)
    truth = torch.logspace(3, -5, d, dtype=torch.float64)
    X = torch.randn(n, d, generator=generator, dtype=torch.float64) * truth.sqrt()
    lam, Q = torch.linalg.eigh(X.T @ X / n)
    held_out = (Q.square() * truth[:, None]).sum(0)
    needed = 1 / (Q.square() / truth[:, None]).sum(0)
    fig, ax = plt.subplots(figsize=(6.5, 4), constrained_layout=True)
    rank = range(1, d + 1)
    ax.semilogy(rank, truth, "k-", label="true eigenvalues")
    ax.semilogy(rank, lam.flip(0), "o", ms=3, color="C3", label="the mini-batch's own")
    ax.semilogy(
        rank, held_out.flip(0), "s", ms=3, color="C0", label="true curvature along its basis"
    )
    ax.semilogy(rank, needed.flip(0), "^", ms=3, color="C2", label="what the inverse needs")
    c = resolvent_inflation(lam, lam.new_tensor([1e-4]), n, 1e12)
    ax.semilogy(rank, (c * lam).flip(0), "-", color="C1", label=f"inflated, c = {float(c):.2f}")
    ax.set_xlabel("rank of the direction")
    ax.set_ylabel("curvature")
    ax.legend(fontsize="small")
    fig.savefig(path, dpi=150)
    plt.close(fig)
    return held_out / needed


# %% Everything
def main(argv: list[str] | None = None) -> None:
    """Fit, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="*", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--passes", nargs="*", type=int, help="only these numbers of passes")
    parser.add_argument("--certificate", action="store_true")
    parser.add_argument("--log-dets", action="store_true")
    parser.add_argument("--prior-changes", action="store_true")
    parser.add_argument("--crossfit-parts", action="store_true")
    parser.add_argument("--trainings", type=int, default=5, help="of the 1-D regression")
    parser.add_argument("--leak", type=Path, help="where the picture of the leak goes")
    parser.add_argument("--output", type=Path, default=Path("outputs/inverse_lab"))
    args = parser.parse_args(argv)
    if args.leak:
        leak(args.leak)
        return
    torch.set_num_threads(1)
    if args.crossfit_parts:
        sizes = args.trainings, args.draws, *(args.passes or [256])[:1]
        print(crossfit_parts(*sizes), crossfit_rounded(*sizes), sep="\n\n", flush=True)
        return
    for name in args.problems:
        p = PROBLEMS[name]()
        budgets = budgets_of(p, args.passes)
        if args.certificate:
            print(certificate(p, args.draws, args.output, budgets), flush=True)
        elif args.prior_changes:
            print(prior_changes(p, args.draws), flush=True)
        else:
            rows = rows_of(p, args.methods, args.draws, args.output, budgets)
            print((log_dets if args.log_dets else table)(p, rows), flush=True)


if __name__ == "__main__":
    main()
