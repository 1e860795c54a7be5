"""Nonlinear shrinkage of a second moment's eigenvalues without a second batch of data."""

# %% Imports
from __future__ import annotations

import math

import torch
from torch import Tensor

from laplace_debias.debias.folds import isotonic


# %% Formula
def analytical_shrinkage(lam: Tensor, n: int, tol: float = 1e-6) -> Tensor:
    r"""Nonlinear shrinkage of eigenvalues (Ledoit and Wolf 2020, Annals of Statistics 48, sec. 4).

    The spectral density f and its Hilbert transform H are estimated with an Epanechnikov kernel of
    width ``h_j = lam_j n^(-1/3)``; with the concentration ``c = p / n`` the shrunk eigenvalues
    are::

        p <= n:   lam / ((pi c lam f)^2 + (1 - c - pi c lam H)^2)
        p > n:    lam / (pi^2 lam^2 (f^2 + H^2)),  and  1 / (pi (p - n) / n H(0))  for the zeros

    Args:
        lam: Eigenvalues ``[d]`` of a sample second moment, ascending.
        n: Number of observations.
        tol: Up to ``tol`` times the largest, an eigenvalue counts as zero. Zeros beyond the d - n
            that few observations explain belong to coordinates that are always zero, and stay.

    Returns:
        Ascending shrunk eigenvalues ``[d]``.
    """
    lam = lam.double().clamp(min=0)
    x = lam[lam > tol * lam[-1]]
    d, L = len(lam), len(x)
    p = d if L >= n else L
    h = n ** (-1 / 3)
    width = h * x  # [L], of column j
    z = (x[:, None] - x) / width
    root5 = math.sqrt(5)
    f = (3 / (4 * root5) * (1 - z.square() / 5).clamp(min=0) / width).mean(1)
    log = ((root5 - z) / (root5 + z)).abs().clamp(min=1e-300).log()
    H = -3 / (10 * math.pi) * z + 3 / (4 * root5 * math.pi) * (1 - z.square() / 5) * log
    H = (H / width).mean(1)
    if p <= n:
        c = p / n
        new = x / ((math.pi * c * x * f).square() + (1 - c - math.pi * c * x * H).square())
        zeros = 0.0
    else:
        new = x / (math.pi**2 * x.square() * (f.square() + H.square()))
        log0 = math.log((1 + root5 * h) / (1 - root5 * h))
        H0 = 3 / (10 * h**2) + 3 / (4 * root5 * h) * (1 - 1 / (5 * h**2)) * log0
        zeros = float(1 / ((p - n) / n * H0 * (1 / x).mean()))
    return isotonic(torch.cat([torch.full((d - L,), zeros, dtype=new.dtype), new]))
