r"""Cross-fitted eigenvalues: directions from all data, curvatures from data that chose none.

The data of one Kronecker factor come in K folds; ``E_k`` is the factor's mean over the ``m_k`` data
of fold k and ``E = sum_k m_k E_k / sum_k m_k`` the pooled factor, with eigenvectors Q in ascending
order. Let ``q_i^(-k)`` be the rank-i eigenvector of the factor pooled over all folds but k. Then::

    lam_i = sum_k (m_k / M)  q_i^(-k)^T  E_k  q_i^(-k)          block factor: Q diag(lam) Q^T

The eigenvectors inside each term never saw the data of ``E_k``, so each term is free of the bias
which makes the largest eigenvalues of E too large and the smallest too small. The basis still
comes from all the data. (This is cross-validated nonlinear shrinkage of covariance estimation.)
The trace is that of E: each term sums to ``tr E_k``. If all folds are equal, ``lam`` are exactly
the eigenvalues of E.

Null space. A factor of fewer rows than dimensions has an arbitrary basis of its null space. Each
term gives the null space of its own directions the mean of the held-out curvature over it, a
number that no choice of basis changes; the null space of the pooled factor lies inside all of
these, so the result does not depend on its basis either. Traces stay as they are.

Order. Noise can put a term's curvature at rank i above that at rank i + 1. What ``lam`` estimates
rises with rank on average, so ``lam`` is projected onto the rising sequences (isotonic regression):
this keeps the sum, equal neighbours stay equal, and the distance to every rising sequence, hence
the error, can only shrink.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from laplace_debias.debias.eigen import check_finite, eigh_float64, null_tolerance
from laplace_debias.kfac.thin import curvature_along

SINGLE_FROM = 512
"""Dimension from which on single precision saves time, see ``fold_directions``."""


def crossfit_factor(
    means: Sequence[Tensor],
    sizes: Sequence[float],
    *,
    monotone: bool = True,
    null_tol: float | None = None,
    name: str = "factor",
) -> tuple[Tensor, Tensor]:
    """Eigenbasis of the pooled factor with cross-fitted eigenvalues.

    Args:
        means: The factor's mean over the data of each fold, K matrices ``[d, d]``.
        sizes: Number of data in each fold.
        monotone: Whether to project the eigenvalues onto rising sequences.
        null_tol: Eigenvalues up to ``null_tol`` times the largest count as zero; by default what
            rounding makes of a zero, see ``null_tolerance``: in the factors' type for directions of
            fewer data than dimensions, in float64 for others.
        name: What the factor is called in errors.

    Returns:
        Eigenvalues ``lam``, ``[d]``, ascending and non-negative, and eigenvectors Q, ``[d, d]``,
        both in float64.

    Raises:
        ValueError: With fewer than two folds, folds of different shapes, a size that is not
            positive, or a factor with NaN or infinite entries.

    Example:
        >>> folds = [torch.diag(torch.tensor([1.0, 3.0])), torch.diag(torch.tensor([1.0, 5.0]))]
        >>> lam, Q = crossfit_factor(folds, [8, 8])
        >>> lam
        tensor([1., 4.], dtype=torch.float64)
    """
    Q, _, lam = crossfit_spectrum(means, sizes, monotone=monotone, null_tol=null_tol, name=name)
    return lam, Q


def crossfit_spectrum(
    means: Sequence[Tensor],
    sizes: Sequence[float],
    *,
    monotone: bool = True,
    null_tol: float | None = None,
    name: str = "factor",
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the pooled factor's own eigenvalues, for a look at their bias.

    Args:
        means: See :func:`crossfit_factor`.
        sizes: See :func:`crossfit_factor`.
        monotone: See :func:`crossfit_factor`.
        null_tol: See :func:`crossfit_factor`.
        name: See :func:`crossfit_factor`.

    Returns:
        Eigenvectors Q, ``[d, d]``, the pooled factor's eigenvalues and the cross-fitted ones,
        ``[d]``, all in float64.

    Raises:
        ValueError: As :func:`crossfit_factor`.

    Example:
        >>> folds = [torch.diag(torch.tensor([1.0, 3.0])), torch.diag(torch.tensor([1.0, 5.0]))]
        >>> crossfit_spectrum(folds, [8, 8])[1]
        tensor([1., 4.], dtype=torch.float64)
    """
    _check_folds(means, sizes, name)
    folds = [M.double() for M in means]
    total = float(sum(sizes))
    scaled = [size * M for size, M in zip(sizes, folds, strict=True)]
    pooled, Q = eigh_float64(sum(scaled[1:], scaled[0]), name)
    lam = torch.zeros(len(Q), dtype=torch.float64, device=Q.device)
    for size, held_out, others in zip(sizes, folds, sums_of_others(scaled), strict=True):
        mu, Q_others = fold_directions(others, means[0].dtype, name)
        few = total - size < len(Q)
        tol = null_tolerance(means[0] if few else folds[0]) if null_tol is None else null_tol
        lam += size / total * curvatures_along(held_out, Q_others, mu, null_tol=tol)
    return Q, pooled.clamp(min=0) / total, isotonic(lam) if monotone else lam


def sums_of_others(terms: Sequence[Tensor]) -> Iterator[Tensor]:
    """For each of several matrices, the sum of all others.

    Added up from before and from behind. Subtracting each from the total would leave its rounding
    errors behind, and these pass for curvature in the null space of the others as soon as the one
    taken away is several times larger.

    Args:
        terms: K matrices of one shape, K at least 2.

    Yields:
        K sums of K - 1 matrices.

    Example:
        >>> [int(total) for total in sums_of_others([torch.tensor(v) for v in (1, 10, 100)])]
        [110, 101, 11]
    """
    after = list(accumulate(reversed(terms)))[-2::-1]  # after[k] = terms[k + 1] + ... + terms[-1]
    before: Tensor | None = None
    for k, term in enumerate(terms):
        if before is None:
            yield after[0]
        else:
            yield before + after[k] if k < len(after) else before
        before = term if before is None else before + term


def fold_directions(M: Tensor, dtype: torch.dtype, name: str = "factor") -> tuple[Tensor, Tensor]:
    """Eigenvectors to measure held-out curvature along, up to the precision of the factors.

    Large factors that were computed in single precision are decomposed in it, which takes less than
    half of the time; the curvatures along the directions are in float64 all the same. Where single
    precision does not converge, float64 takes over.

    Args:
        M: Symmetric matrix ``[d, d]`` in float64.
        dtype: Type in which its factors were computed.
        name: What it is called in errors.

    Returns:
        Eigenvalues ``[d]``, ascending, and eigenvectors ``[d, d]`` in columns, as float64.

    Raises:
        ValueError: If the matrix holds NaN or Inf, or LAPACK gives up on it.

    Example:
        >>> fold_directions(torch.diag(torch.tensor([2.0, 1.0])).double(), torch.float32)[0]
        tensor([1., 2.], dtype=torch.float64)
    """
    check_finite(M, name)
    scale = M.abs().max()
    if dtype == torch.float32 and len(M) >= SINGLE_FROM and scale > 0:
        try:
            mu, Q = torch.linalg.eigh(((M + M.T) / (2 * scale)).float())
            return mu.double() * scale, Q.double()
        except torch.linalg.LinAlgError:
            pass
    return eigh_float64(M, name)


def curvatures_along(M: Tensor, Q: Tensor, mu: Tensor, *, null_tol: float) -> Tensor:
    """Curvature of M along eigenvectors of another matrix, averaged over that matrix' null space.

    Args:
        M: Symmetric, positive semi-definite matrix ``[d, d]``.
        Q: Eigenvectors ``[d, d]`` of the other matrix, in columns.
        mu: Its eigenvalues ``[d]``, ascending.
        null_tol: Directions with ``mu <= null_tol * max(mu)`` form the null space.

    Returns:
        Non-negative curvatures ``[d]`` with the sum ``tr M``.

    Example:
        >>> M, mu = torch.diag(torch.tensor([1.0, 3.0, 5.0])), torch.tensor([0.0, 0.0, 1.0])
        >>> curvatures_along(M, torch.eye(3), mu, null_tol=1e-6)
        tensor([2., 2., 5.])
    """
    lam = curvature_along(M, Q).clamp(min=0)
    null = mu <= null_tol * mu[-1]
    return torch.where(null, lam[null].mean(), lam) if null.any() else lam


def isotonic(values: Tensor) -> Tensor:
    """Nearest rising sequence in least squares (scipy's ``isotonic_regression``).

    Args:
        values: Sequence ``[d]``.

    Returns:
        Non-decreasing sequence ``[d]`` with the same sum.

    Example:
        >>> isotonic(torch.tensor([1.0, 4.0, 2.0, 6.0]))
        tensor([1., 3., 3., 6.])
    """
    return values.new_tensor(isotonic_regression(values.cpu().numpy()).x)


def _check_folds(means: Sequence[Tensor], sizes: Sequence[float], name: str) -> None:
    """At least two folds of one shape, with positive sizes."""
    if len(means) < 2 or len(means) != len(sizes):
        raise ValueError(
            f"Expected at least two folds of {name} and as many sizes, got {len(means)} folds and "
            f"{len(sizes)} sizes. Remedy: draw more mini-batches or use fewer folds."
        )
    shapes = {tuple(M.shape) for M in means}
    if len(shapes) > 1 or any(M.ndim != 2 or len(M) != M.shape[1] for M in means):
        raise ValueError(
            f"Expected square matrices of one shape as folds of {name}, got {sorted(shapes)}. "
            "Remedy: compute all folds with the same model."
        )
    if not all(size > 0 for size in sizes):
        raise ValueError(
            f"Expected a positive number of data in every fold of {name}, got {list(sizes)}. "
            "Remedy: leave out empty folds."
        )
