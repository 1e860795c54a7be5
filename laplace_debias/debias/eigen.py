r"""Eigendecompositions of factors: dense ones, and those that are given by few rows.

A factor of few rows, :math:`F = X^\top X` with ``X [m, d]``, has its basis in the span of its rows.
With :math:`X^\top = Q_0 R` (``Q_0 [d, m]`` orthonormal) and :math:`R R^\top = V \Lambda V^\top`,

.. math:: F = Q_0 R R^\top Q_0^\top = Q \Lambda Q^\top, \qquad Q = Q_0 V,

which takes about :math:`6 d m^2 + 9 m^3` operations instead of :math:`9 d^3`, and no d x d matrix.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["EigenFactors", "check_finite", "eigh_float64", "eigh_rows", "null_tolerance"]


def eigh_rows(rows: Tensor, name: str = "factor") -> tuple[Tensor, Tensor]:
    r"""Eigendecomposition of a factor of few rows, without its null space.

    A squared singular value counts as zero up to ``max(d eps^2, m eps_64)`` times the largest: what
    rounding of the rows, or of the decomposition, makes of a zero.

    Args:
        rows: ``X [m, d]`` with m at most d; the factor is ``X^T X``.
        name: What it is called in errors.

    Returns:
        Eigenvalues ``[d]``, ascending, those of the null space 0, and eigenvectors ``[d, r]`` in
        columns that span the rows, in float64.

    Raises:
        ValueError: If the rows hold NaN or Inf, or LAPACK gives up on them.

    Example:
        >>> lam, Q = eigh_rows(torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 1.0]]))
        >>> lam, Q.abs()
        (tensor([0., 1., 4.], dtype=torch.float64), tensor([[0., 0.],
                [0., 1.],
                [1., 0.]], dtype=torch.float64))
    """
    check_finite(rows, name)
    m, d = rows.shape
    X = rows.detach().to(torch.float64)
    Q_0, R = torch.linalg.qr(X.T)
    lam, V = eigh_float64(R @ R.T, name)
    eps, eps_64 = (torch.finfo(dtype).eps for dtype in (rows.dtype, torch.float64))
    tol = max(d * eps**2, m * eps_64)
    null = int((lam <= tol * lam[-1]).sum()) if m else 0
    Q = Q_0 @ V[:, null:]
    return torch.cat([lam.new_zeros(d - m + null), lam[null:]]), Q


def eigh_float64(factor: Tensor, name: str = "factor") -> tuple[Tensor, Tensor]:
    """Eigendecomposition of a symmetric matrix in float64 that raises, and never ends the process.

    Args:
        factor: Symmetric matrix ``[d, d]``.
        name: What it is called in errors.

    Returns:
        Eigenvalues ``[d]``, ascending, and eigenvectors ``[d, d]`` in columns, in float64.

    Raises:
        ValueError: If the matrix holds NaN or Inf, or LAPACK gives up on it.

    Example:
        >>> eigh_float64(torch.diag(torch.tensor([2.0, 1.0])))[0]
        tensor([1., 2.], dtype=torch.float64)
    """
    check_finite(factor, name)
    factor = factor.detach().to(torch.float64)
    symmetric = (factor + factor.T) / 2
    try:
        # torch's, unlike NumPy's, keeps to the user's number of threads
        values, vectors = torch.linalg.eigh(symmetric)
        return values, vectors
    except torch.linalg.LinAlgError as error:
        raise ValueError(
            f"Expected the Kronecker factor {list(factor.shape)} of '{name}' to have an "
            f"eigendecomposition, got: {error}. Remedy: check the scale of this layer's inputs "
            "and gradients, or fit in float64 (`model.double()`)."
        ) from error


def check_finite(factor: Tensor, name: str) -> None:
    """Raise where a factor holds NaN or Inf."""
    if not torch.isfinite(factor).all():
        bad = int((~torch.isfinite(factor)).sum())
        raise ValueError(
            f"Expected finite Kronecker factors, got {bad} NaN or Inf of {factor.numel()} entries "
            f"in the factor {list(factor.shape)} of '{name}'. Remedy: look for NaN or Inf in the "
            "network's weights and activations up to this layer, or fit in a wider dtype "
            "(`model.float()`)."
        )


def null_tolerance(M: Tensor) -> float:
    """Relative size up to which an eigenvalue may be a rounded zero.

    A Gram matrix is rounded in its own type: entry by entry an error of ``eps`` times the entry's
    size, which adds up to a spectral norm of about ``sqrt(d) * eps`` times the largest eigenvalue
    at most.

    Args:
        M: The factor ``[d, d]``, in the type in which it was computed.

    Returns:
        ``sqrt(d) * eps``.

    Example:
        >>> null_tolerance(torch.eye(4, dtype=torch.float64)) == 2 * 2.0**-52
        True
    """
    return math.sqrt(len(M)) * torch.finfo(M.dtype).eps


class EigenFactors(NamedTuple):
    """One block in its eigenbasis; a bias has no input factor."""

    Q_B: Tensor
    lam_B: Tensor
    Q_A: Tensor | None = None
    lam_A: Tensor | None = None

    @property
    def table(self) -> Tensor:
        """Eigenvalues of the block, ``[d_out, d_in]`` or ``[d_out, 1]``."""
        if self.lam_A is None:
            return self.lam_B[:, None]
        return torch.outer(self.lam_B, self.lam_A)
