"""Estimators of a full-batch posterior against each other: distance at equal backward passes.

The distance is ``posterior_distance``, the mean |log ratio| of predictive standard deviations, on
test inputs and on far ones. P backward passes are P / 9 exact data for ten classes and P data for
one output. Besides the library's methods there are those that lost:

* ``single + c``: one mini-batch, its factors inflated by ``(1 - df / N) / (1 - df / n)``;
* ``geometric mean``: two mini-batches, own and held-out eigenvalues multiplied, and the root;
* ``quadratic shrinkage``: one mini-batch, its eigenvalues shrunk without other data;
* ``crossfit + curvature sampling``, with exact vectors and with one random vector per datum;
* ``pairs``: the draws of ``auto`` without any correction, and ``pairs + scalar c``, with the number
  of draws for n. ``auto`` takes each draw's own leverage, and a floor where draws are few.

    python -m examples.research.inverse_lab                       # all problems, some 20 minutes
    python -m examples.research.inverse_lab --problems diabetes 1-D --draws 4
    python -m examples.research.inverse_lab --certificate         # is the estimated distance right?
    python -m examples.research.inverse_lab --crossfit-parts --problems 1-D
    python -m examples.research.inverse_lab --prior-changes       # a prior changed after the fit

Results are kept in ``outputs/inverse_lab``, and a run goes on where it was stopped.
"""

# %% Imports
from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from unittest.mock import patch

import torch
from torch import Tensor

from examples.research.inverse_problems import PROBLEMS, InverseProblem
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


def shrunk(p: InverseProblem, prior: float, P: int, g: torch.Generator) -> DebiasedKronLaplace:
    """One mini-batch, its eigenvalues shrunk; a backward vector counts as one observation."""
    la, M = single(p, prior, P, g), n_exact(p, P)
    k = 9 if p.likelihood == "classification" else 1
    fit = la._posterior()
    numbers = [(M * k, M)[: len(lam)] for lam in fit.lam]
    values = [
        [quadratic_shrinkage(part, n) for part, n in zip(lam, ns, strict=True)]
        for lam, ns in zip(fit.lam, numbers, strict=True)
    ]
    return with_values(la, fit, values)


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
    "crossfit": crossfit(),
    "crossfit + curvature": crossfit(sampling="curvature"),
    "crossfit + curvature, one vector": crossfit(sampling="curvature", fisher="mc"),
    "pairs": pairs,
    "pairs + scalar c": pairs_c,
    "auto": auto,
}


# %% Cells
def budgets_of(p: InverseProblem) -> tuple[int, ...]:
    """Numbers of backward passes."""
    return (36, 144, 576, 2304) if p.likelihood == "classification" else (16, 64, 256)


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


def rows_of(p: InverseProblem, methods: list[str], draws: int, output: Path) -> list[dict]:
    """All cells of a problem, those that are kept read from files."""
    store, rows = CellStore(output / p.name, {"problem": p.name, "version": 1}), []
    for prior in p.prior_precisions:
        full: list[DebiasedKronLaplace] = []

        def made(name: str, P: int, draw: int, prior: float = prior, full: list = full) -> dict:
            full[:] = full or [reference(p, prior)]
            return cell(p, full[0], METHODS[name], prior, P, draw)

        for P in budgets_of(p):
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
        for key in ("nll", "logdet"):
            gaps = {
                name: chosen(rows, key, method=name, prior=prior, P=576)
                for name in dict.fromkeys(r["method"] for r in rows)
            }
            texts = [f"{name} {mean(found):.2g}" for name, found in gaps.items() if found]
            if texts:
                what = {"nll": "NLL gap over 14 prior precisions", "logdet": "log det per weight"}
                lines.append(f"{what[key]}, P = 576: " + ", ".join(texts))
    return "\n".join(lines)


def certificate(p: InverseProblem, draws: int, output: Path) -> str:
    """How often the true distance lies below estimate + 2 errors, and the ratio of the means."""
    rows = rows_of(p, ["auto"], draws, output)
    lines = []
    for prior in p.prior_precisions:
        for P in budgets_of(p):
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


def crossfit_parts(p: InverseProblem, draws: int, P: int = 256) -> str:
    """What makes cross-fitting wrong: signed and absolute log ratios, its parts changed."""

    def in_logs(values: Tensor) -> Tensor:
        return plain(values.clamp(min=1e-300).log()).exp()

    plain, prior, lines = folds.isotonic, p.prior_precisions[0], []
    full = reference(p, prior)
    fits: dict[str, Callable] = {"isotonic": plain, "isotonic in logs": in_logs}
    fits |= {"not monotone": lambda values: values}
    cases = {f"crossfit, {name}": (crossfit(), change) for name, change in fits.items()}
    cases |= {"basis and curvatures of halves": (two_batch, plain), "single": (single, plain)}
    for name, (method, change) in cases.items():
        found = []
        for draw in range(draws):
            with patch.object(folds, "isotonic", change):
                la = method(p, prior, P, torch.Generator().manual_seed(1000 * P + draw))
            both = [linearized_predictive(one, p.x_test).covariance.flatten() for one in (la, full)]
            ratio = 0.5 * (both[0] / both[1]).log()
            found.append((float(ratio.abs().mean()), float(ratio.mean())))
        size, signed = (mean(column) for column in zip(*found, strict=True))
        error = stdev(s for _, s in found) / draws**0.5
        lines.append(f"| {name} | {size:.4f} | {signed:+.4f} ± {error:.4f} |")
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
    parser.add_argument("--certificate", action="store_true")
    parser.add_argument("--prior-changes", action="store_true")
    parser.add_argument("--crossfit-parts", action="store_true")
    parser.add_argument("--leak", type=Path, help="where the picture of the leak goes")
    parser.add_argument("--output", type=Path, default=Path("outputs/inverse_lab"))
    args = parser.parse_args(argv)
    if args.leak:
        leak(args.leak)
        return
    torch.set_num_threads(1)
    for name in args.problems:
        p = PROBLEMS[name]()
        if args.certificate:
            print(certificate(p, args.draws, args.output), flush=True)
        elif args.crossfit_parts:
            print(crossfit_parts(p, args.draws), flush=True)
        elif args.prior_changes:
            print(prior_changes(p, args.draws), flush=True)
        else:
            print(table(p, rows_of(p, args.methods, args.draws, args.output)), flush=True)


if __name__ == "__main__":
    main()
