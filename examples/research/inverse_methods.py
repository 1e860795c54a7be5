"""Estimators of a full-batch posterior from P backward passes: the library's, and those that lost.

P backward passes are P / 9 exact data for ten classes and P data for one output.

* ``single + c``: one mini-batch, its factors inflated by ``(1 - df / N) / (1 - df / n)``;
* ``geometric mean``: two mini-batches, own and held-out eigenvalues multiplied, and the root;
* ``quadratic shrinkage``: one mini-batch, its eigenvalues shrunk without other data;
* ``held-out likelihood``: per factor the likeliest of own, inflated, shrunk and held-out ones;
* ``crossfit + curvature sampling``, with exact vectors and with one random vector per datum;
* ``pairs``: the draws of ``auto`` without any correction, and ``pairs + scalar c``, with the number
  of draws for n. ``auto`` takes each draw's own leverage, and a floor where draws are few.
"""

# %% Imports
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from examples.research.heldout_likelihood import likeliest, ridges_of
from examples.research.inverse_problems import InverseProblem
from laplace_debias.data.roles import TrainingData
from laplace_debias.debias.auto import fit_auto
from laplace_debias.debias.inverse import resolvent_inflation
from laplace_debias.debias.options import AutoOptions
from laplace_debias.debias.spectrum import FitResult
from laplace_debias.kfac.engine import Engine
from laplace_debias.posterior import DebiasedKronLaplace

Method = Callable[[InverseProblem, float, int, torch.Generator], DebiasedKronLaplace]


# %% Methods
def n_exact(p: InverseProblem, passes: int) -> int:
    """Data whose exact vectors take so many backward passes."""
    return max(2, passes // 9) if p.likelihood == "classification" else passes


def single(p: InverseProblem, prior: float, P: int, g: torch.Generator) -> DebiasedKronLaplace:
    """One mini-batch."""
    la = p.laplace("single", prior)
    la.fit(p.batches(*p.draw(n_exact(p, P), g)), n_data=len(p.x))
    return la


def two_batch(p: InverseProblem, prior: float, P: int, g: torch.Generator) -> DebiasedKronLaplace:
    """The paper's method with two halves."""
    x, y = p.draw(n_exact(p, P), g)
    h = len(x) // 2
    la = p.laplace("two-batch", prior)
    parts = p.batches(x[:h], y[:h]), p.batches(x[h:], y[h:])
    la.fit(parts[0], curvature_loader=parts[1], n_data=len(p.x))
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
        held = {} if other is None else {"curvature_loader": p.batches(x[other], y[other])}
        la.fit(p.batches(x[own], y[own]), n_data=len(p.x), **held)
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
    n_exact_blocks = 1 + (len(fit.lam[-1]) == 1)  # the output layer is exact, and its bias
    values[-n_exact_blocks:] = fit.lam[-n_exact_blocks:]
    return with_values(la, fit, values)


def auto(
    p: InverseProblem,
    prior: float,
    P: int,
    g: torch.Generator,
    n_pool: int | None = None,
    *,
    scored: bool = False,
) -> DebiasedKronLaplace:
    """The library's own; with fewer forward passes, and with scores of the last training epoch."""
    options = {"n_pool": n_pool, "scores": p.recorder if scored else None}
    la = p.laplace("auto", prior, tolerance=None, n_passes=P, generator=g, **options)
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

POOL = 256
FEW_FORWARD: dict[str, Method] = {
    f"auto, {POOL} forward": partial(auto, n_pool=POOL),
    f"auto, {POOL} forward, recorded scores": partial(auto, n_pool=POOL, scored=True),
}
"""With so few forward passes, does it help to know the scores of all data from training?"""
