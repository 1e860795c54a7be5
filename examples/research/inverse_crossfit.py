"""What is wrong with cross-fitting on a steep spectrum, part by part, and the picture of the leak.

python -m examples.research.inverse_crossfit --trainings 5
python -m examples.research.inverse_crossfit --leak leak.png
"""

# %% Imports
from __future__ import annotations

import argparse
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from unittest.mock import patch

import torch
from torch import Tensor

from examples.research.inverse_lab import reference
from examples.research.inverse_methods import crossfit, with_values
from examples.research.inverse_problems import InverseProblem, clusters
from laplace_debias import linearized_predictive
from laplace_debias.debias import folds
from laplace_debias.debias.inverse import resolvent_inflation
from laplace_debias.debias.spectrum import FitResult


# %% Parts
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


# %% The leak
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
    """Fit and print, or draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainings", type=int, default=5, help="of the 1-D regression")
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--passes", type=int, default=256)
    parser.add_argument("--leak", type=Path, help="where the picture of the leak goes")
    args = parser.parse_args(argv)
    if args.leak:
        leak(args.leak)
        return
    torch.set_num_threads(1)
    sizes = args.trainings, args.draws, args.passes
    print(crossfit_parts(*sizes), crossfit_rounded(*sizes), sep="\n\n", flush=True)


if __name__ == "__main__":
    main()
