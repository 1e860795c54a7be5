r"""Cross-fitted eigenvalues of a factor of few rows, in the space that the rows span.

A factor of n rows in d > n dimensions, ``E = X^T X / n`` with ``X [n, d]``, has rank n at most: few
data meet a wide linear layer. With two folds, the directions of each are n / 2 only, while the
basis of all rows has n, and half of these get no more than the mean curvature of the null space.
More folds mend that, and cost little here, because no matrix ``[d, d]`` has to be decomposed. With
the singular value decomposition ``X = U diag(s) V^T``, all folds live in the r dimensions of V::

    Z = X V = U diag(s)   [n, r]            E_k = V (Z_k^T Z_k / n_k) V^T

so that the rank-i direction of the other folds and the curvature of fold k along it come from
``r x r`` matrices, exactly as ``laplace_debias.debias.folds`` defines them. Directions that the
other folds do not span share what is left of the trace of ``E_k``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laplace_debias.debias.eigen import check_finite, eigh_float64, null_tolerance
from laplace_debias.debias.folds import isotonic

__all__ = ["ROW_FOLDS", "crossfit_rows", "few_rows_from", "most_few_rows"]

ROW_FOLDS = 8
"""Folds of a factor of few rows; ``tests/test_crossfit_rows.py`` shows what they save over two."""


def few_rows_from(n_rows: int) -> int:
    """Dimension from which on a number of rows counts as few.

    ``ROW_FOLDS`` decompositions of ``n x n`` matrices take at most the time of one of a ``d x d``
    matrix then.

    Args:
        n_rows: Number of rows of all folds.

    Returns:
        The least dimension.

    Example:
        >>> few_rows_from(128)
        256
    """
    return 2 * n_rows


def most_few_rows(d: int) -> int:
    """Largest number of rows that counts as few in d dimensions, see ``few_rows_from``.

    Args:
        d: Dimension of the rows.

    Returns:
        The number.

    Example:
        >>> most_few_rows(256)
        128
    """
    return d // 2


def crossfit_rows(
    rows: Tensor,
    n_folds: int = ROW_FOLDS,
    *,
    monotone: bool = True,
    null_tol: float | None = None,
    name: str = "factor",
) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenbasis of a factor of few rows with cross-fitted eigenvalues.

    The same as ``crossfit_spectrum`` on the folds' matrices, without forming or decomposing any of
    them. Fold k consists of the rows k, k + K, k + 2 K, ...

    Args:
        rows: Rows ``[n, d]``; the factor is the mean of their outer products.
        n_folds: Number K of folds, at least 2; at most one per row is used.
        monotone: Whether to project the eigenvalues onto rising sequences.
        null_tol: Eigenvalues up to ``null_tol`` times the largest count as zero; by default what
            rounding in the rows' type makes of a zero.
        name: What the factor is called in errors.

    Returns:
        Eigenvectors, thin, ``[d, r]`` (see :mod:`laplace_debias.kfac.thin`), the factor's own
        eigenvalues and the cross-fitted ones, ``[d]``, ascending, all in float64. The first d - r
        of these are equal: what no row spans has one curvature.

    Raises:
        ValueError: With fewer than two rows or folds, or with NaN or infinite rows.

    Example:
        >>> rows = torch.tensor([[1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.1, 0.0]])
        >>> Q, pooled, lam = crossfit_rows(rows, n_folds=3)
        >>> torch.isclose(lam.sum(), rows.double().square().sum() / 3)  # the trace is kept
        tensor(True)
    """
    if rows.ndim != 2 or len(rows) < 2 or n_folds < 2:
        raise ValueError(
            f"Expected rows [n, d] of at least two data and two folds for {name}, got shape "
            f"{list(rows.shape)} and {n_folds} folds. Remedy: draw more data, or use more folds."
        )
    check_finite(rows, name)
    n, d = rows.shape
    K = min(n_folds, n)
    tol = null_tolerance(rows.new_empty(d, 0)) if null_tol is None else null_tol
    X = rows.double()
    try:
        _, s, Vh = torch.linalg.svd(X, full_matrices=False)  # s descending
    except torch.linalg.LinAlgError as error:
        raise ValueError(
            f"Expected the rows {list(rows.shape)} behind {name} to have a singular value "
            f"decomposition, got: {error}. Remedy: check the scale of this layer's inputs."
        ) from error
    r = int((s.square() > tol * s[0].square()).sum())
    V = Vh[:r].flip(0).T  # [d, r], ascending
    pooled = torch.cat([s.new_zeros(d - r), s[:r].flip(0).square() / n])
    Z = X @ V  # [n, r]
    lam = torch.zeros(d, dtype=torch.float64, device=V.device)
    for k in range(K if r else 0):  # rows of zeros have no curvature
        held_out = torch.zeros(n, dtype=torch.bool, device=Z.device)
        held_out[k::K] = True
        others = Z[~held_out]
        mu, W = eigh_float64(others.T @ others, name)
        seen = mu > tol * mu[-1]  # directions that the other folds span
        curvatures = (Z[held_out] @ W).square().sum(0) / n  # weighted by the fold's size
        rank = int(seen.sum())
        lam[d - rank :] += curvatures[seen]
        if rank < d:
            lam[: d - rank] += curvatures[~seen].sum() / (d - rank)
    return V, pooled, isotonic(lam) if monotone else lam
