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

from collections.abc import Sequence

import torch
from torch import Tensor

from laplace_debias.debias.eigen import check_finite, eigh_float64, null_tolerance
from laplace_debias.debias.folds import crossfit_spectrum, isotonic
from laplace_debias.debias.spectrum import FitResult, same_output
from laplace_debias.kfac.factors import Factors

__all__ = ["ROW_FOLDS", "crossfit_kron", "crossfit_rows", "few_rows_from", "most_few_rows"]

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


def crossfit_kron(
    outputs: Sequence[Factors],
    inputs: Sequence[Factors] | None = None,
    *,
    n_data: int,
    loss: Tensor | float = 0.0,
    output_hessian: Tensor | None = None,
    rows: Sequence[Tensor | None] | None = None,
) -> FitResult:
    """Cross-fitted curvature of N data from folds of a few.

    Output factors B come from the folds ``outputs``, scaled by ``n_data`` over their number of
    data, and input factors A from the folds ``inputs``, which may be other data, more data and
    another number of folds. Each factor is cross-fitted on its own (``crossfit_factor``), and a
    block's eigenvalues are the products of its factors' eigenvalues. An input factor whose rows
    were kept is cut into ``ROW_FOLDS`` folds at least (``crossfit_rows``).

    Args:
        outputs: Factors of each fold; their sums over data stand for ``n_data`` data.
        inputs: Input factors of each fold; by default those within ``outputs``.
        n_data: Number N of data that the curvature stands for.
        loss: Mean loss per datum.
        output_hessian: Mean loss Hessian ``[C, C]`` over a large pool. It is B of the layer at the
            network's output, if ``inputs`` know one, and replaces what the few data of the folds
            give.
        rows: For each parameter the input rows ``[n, d_in]`` of a wide layer, or None. They may be
            of more data than ``inputs``, whose A they replace; by default those that ``inputs``
            kept.

    Returns:
        The decomposition, one block per parameter: eigenvectors of the pooled factors in the
        factors' type, their eigenvalues and the cross-fitted ones in float64.

    Raises:
        ValueError: With fewer than two folds, folds of different parameters, or factors with NaN.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias.kfac.engine import kfac_factors
        >>> model, x = nn.Linear(3, 2), torch.randn(20, 3)
        >>> folds = [kfac_factors(model, part, likelihood="regression") for part in x.split(10)]
        >>> fitted = crossfit_kron(folds, n_data=1000)
        >>> [[len(lam) for lam in block] for block in fitted.lam_tilde]
        [[2, 3], [2]]
    """
    names = {fold.names for fold in (*outputs, *(inputs or ()))}
    if len(names) != 1:
        raise ValueError(
            f"Expected folds of the same parameters, got {len(names)} different sets. Remedy: "
            "compute all folds with the same model and the same `params`."
        )
    sizes, folds = [fold.weight for fold in outputs], [fold.blocks for fold in outputs]
    if rows is None and inputs is not None:
        rows = [_all_rows(parts) for parts in zip(*(fold.rows for fold in inputs), strict=True)]
    sources = outputs if inputs is None else inputs
    Q, lam, lam_tilde = [], [], []
    previous: list[list[Tensor]] = [[] for _ in outputs]
    for i, name in enumerate(outputs[0].names):
        at_output = inputs is not None and all(fold.at_output[i] for fold in inputs)
        if output_hessian is not None and at_output:
            exact, vectors = eigh_float64(output_hessian, f"B of {name}")
            exact = n_data * exact.clamp(min=0)
            parts = [(vectors, exact, exact)]
        else:
            blocks = [fold[i][:1] for fold in folds]
            if not all(map(same_output, blocks, previous)):
                B = [n_data / w * block[0] for w, block in zip(sizes, blocks, strict=True)]
                B_part = crossfit_spectrum(B, sizes, name=f"B of {name}")
            parts, previous = [B_part], blocks
        A = [factor for fold in sources if (factor := fold.A[i]) is not None]
        if A:
            kept = None if rows is None else rows[i]
            if kept is not None:
                n_folds = max(ROW_FOLDS, len(sources))
                parts.append(crossfit_rows(kept, n_folds, name=f"A of {name}"))
            else:
                parts.append(_input_spectrum(sources, i, name))
        dtype = folds[0][i][0].dtype
        Q.append([part[0].to(dtype) for part in parts])
        lam.append([part[1] for part in parts])
        lam_tilde.append([part[2] for part in parts])
    loss = torch.as_tensor(loss) * n_data
    return FitResult(Q, lam, lam_tilde, [], loss, n_data, outputs[0].n_outputs)


def _all_rows(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Rows of all folds, if every fold kept its own."""
    kept = [part for part in parts if part is not None]
    return torch.cat(kept) if len(kept) == len(parts) else None


def _input_spectrum(folds: Sequence[Factors], i: int, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-fit A, a mean over rows: folds count by their rows, which data may be routed past."""
    pairs = [(fold.A[i], fold.n_rows[i] if fold.n_rows else fold.n) for fold in folds]
    A = [(factor, n_rows) for factor, n_rows in pairs if factor is not None and n_rows > 0]
    if len(A) < 2:
        raise ValueError(
            f"Expected data of at least two folds to reach the layer of '{name}', got {len(A)}. "
            "Remedy: take larger mini-batches or more data (`n_input`), or freeze the layer."
        )
    return crossfit_spectrum([M for M, _ in A], [n for _, n in A], name=f"A of {name}")
