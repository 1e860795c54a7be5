r"""Spectra: eigenbases, a basis's own eigenvalues, curvatures that other data measure along it.

Conventions as in :mod:`laplace_debias.kfac.factors`. What every method of fitting returns, a
:class:`FitResult`, is such a spectrum with the loss and what it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from laplace.utils import KronDecomposed
from torch import Tensor

from laplace_debias.kfac.factors import Block

__all__ = [
    "FitResult",
    "check_finite",
    "curvature_along",
    "decompose",
    "eigh_float64",
    "rebuild",
    "reevaluate",
    "same_output",
]

# Rows of a symmetric matrix that are multiplied at once.
_ROWS = 256


@dataclass(frozen=True)
class FitResult:
    """What a fit leaves behind, in the precision it was computed in.

    Attributes:
        Q: Eigenvectors of the directions' factors.
        lam: Their eigenvalues on the same data, biased.
        lam_tilde: Curvatures along ``Q`` that the posterior uses (``lam`` if nothing was
            re-evaluated).
        curvatures: Undecomposed factors of the curvatures' data, empty if there are none.
        loss: Loss of all N training data, as far as the data seen tell.
        n_data: Number N of training data that the curvature stands for.
        n_outputs: Number C of outputs of the network.
        report: What the method has to say about the fit, if it says more than its cost.
    """

    Q: list[Block]
    lam: list[list[Tensor]]
    lam_tilde: list[list[Tensor]]
    curvatures: list[Block]
    loss: Tensor
    n_data: int
    n_outputs: int
    report: Any = None

    def decomposed(
        self, dtype: torch.dtype, damping: bool = False, transposed: Sequence[bool] = ()
    ) -> KronDecomposed:
        """The curvature as laplace-torch holds it.

        Args:
            dtype: Its type, the model's.
            damping: laplace-torch's switch.
            transposed: For each block, whether its parameter is ``[d_in, d_out]``: the block of
                the flattened parameter is then ``kron(A, B)``. By default none is.

        Returns:
            ``Q diag(lam_tilde) Q^T``, block by block.
        """
        Q = [[Q_f.to(dtype) for Q_f in block] for block in self.Q]
        lam = [[values.to(dtype) for values in block] for block in self.lam_tilde]
        for i in (i for i, turn in enumerate(transposed) if turn):
            Q[i], lam[i] = Q[i][::-1], lam[i][::-1]
        # laplace-torch holds lists of lists, and annotates them as if each were a tuple of one
        blocks = cast("tuple[list[tuple[Tensor]], list[tuple[Tensor]]]", (Q, lam))
        return KronDecomposed(*blocks, damping=damping)


def decompose(
    factors: Sequence[Sequence[Tensor]], names: Sequence[str]
) -> tuple[list[Block], list[list[Tensor]]]:
    r"""Eigendecompose every factor in float64.

    .. math:: A = Q_A \,\mathrm{diag}(\lambda_A)\, Q_A^\top, \qquad
              B = Q_B \,\mathrm{diag}(\lambda_B)\, Q_B^\top

    Args:
        factors: Blocks of symmetric positive semi-definite matrices.
        names: One name per block, for the error message.

    Returns:
        Eigenvectors ``Q`` (columns, ``[d, d]``) and eigenvalues ``lam`` (``[d]``, ascending,
        negative rounding errors clamped at 0), both in float64 and in the layout of ``factors``.

    Raises:
        ValueError: If a factor holds NaN or Inf, or LAPACK gives up on it; the message names the
            block.

    Example:
        >>> Q, lam = decompose([[torch.diag(torch.tensor([3.0, 1.0]))]], ["bias"])
        >>> lam[0][0].tolist()
        [1.0, 3.0]
    """
    Q, lam = [], []
    pairs: list[tuple[Tensor, Tensor]] = []
    previous: Sequence[Tensor] = ()
    for block, name in zip(factors, names, strict=True):
        shared = pairs[:1] if same_output(block, previous) else []
        pairs = shared + [eigh_float64(factor, name) for factor in block[len(shared) :]]
        previous = block
        lam.append([values.clamp(min=0.0) for values, _ in pairs])
        Q.append([vectors for _, vectors in pairs])
    return Q, lam


def same_output(block: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether two blocks have the same ``B``, as a layer's weight and bias do.

    Args:
        block: ``[B, A]`` or ``[B]``.
        other: Another block, or nothing, which is like no block.

    Returns:
        True if both ``B`` are equal; one decomposition then serves both.

    Example:
        >>> same_output([torch.eye(2)], [torch.eye(2), torch.ones(3, 3)])
        True
    """
    return len(other) > 0 and torch.equal(block[0], other[0])


def reevaluate(
    Q: Sequence[Sequence[Tensor]], factors: Sequence[Sequence[Tensor]], names: Sequence[str]
) -> list[list[Tensor]]:
    r"""Curvature of other data's factors along given directions.

    .. math:: \tilde\lambda_A = \mathrm{diag}(Q_A^\top C\, Q_A), \qquad
              \tilde\lambda_B = \mathrm{diag}(Q_B^\top D\, Q_B)

    Args:
        Q: Orthonormal columns per factor, ``[d, d]``, from the directions' data.
        factors: Blocks ``[D, C]`` or ``[D]`` from the curvatures' data.
        names: One name per block, for the error message.

    Returns:
        ``lam~`` per factor, ``[d]``, in the order of the columns of ``Q``, clamped at 0.

    Raises:
        ValueError: If a factor holds NaN or Inf; the message names the block.

    Example:
        >>> C = torch.tensor([[2.0, 1.0], [1.0, 4.0]])
        >>> reevaluate([[torch.eye(2)]], [[C]], ["bias"])[0][0].tolist()
        [2.0, 4.0]
    """
    lam = []
    for vectors, block, name in zip(Q, factors, names, strict=True):
        values = []
        for Q_f, C in zip(vectors, block, strict=True):
            check_finite(C, name)
            values.append(curvature_along(C, Q_f).clamp(min=0.0))
        lam.append(values)
    return lam


def curvature_along(M: Tensor, Q: Tensor) -> Tensor:
    r"""Curvature of a symmetric matrix along directions, :math:`\mathrm{diag}(Q^\top M Q)`.

    Blocks below the diagonal count twice, those above are not read: nearly half of the product.

    Args:
        M: Symmetric matrix ``[d, d]``, of any floating point type.
        Q: Directions ``[d, k]`` in columns.

    Returns:
        Curvatures ``[k]`` in the type of ``Q``.

    Example:
        >>> curvature_along(torch.tensor([[2.0, 1.0], [1.0, 4.0]]), torch.tensor([[1.0], [1.0]]))
        tensor([8.])
    """
    values = Q.new_zeros(Q.shape[1])
    for start in range(0, len(M), _ROWS):
        here = slice(start, start + _ROWS)
        rows = M[here, : start + _ROWS].to(Q.dtype)
        product = rows[:, start:] @ Q[here]
        if start:
            product.addmm_(rows[:, :start], Q[:start], alpha=2.0)
        values += (Q[here] * product).sum(0)
    return values


def rebuild(Q: Sequence[Sequence[Tensor]], lam: Sequence[Sequence[Tensor]]) -> list[Block]:
    r"""Dense factors :math:`Q \,\mathrm{diag}(\lambda)\, Q^\top` from their decomposition.

    Args:
        Q: Eigenvectors per factor, ``[d, d]``.
        lam: Eigenvalues per factor, ``[d]``.

    Returns:
        Blocks of dense matrices ``[d, d]``, in the type of the eigenvalues.

    Example:
        >>> rebuild([[torch.eye(2)]], [[torch.tensor([1.0, 2.0])]])[0][0].diagonal().tolist()
        [1.0, 2.0]
    """
    return [
        [
            (Q_f.to(values.dtype) * values) @ Q_f.to(values.dtype).T
            for Q_f, values in zip(vectors, block, strict=True)
        ]
        for vectors, block in zip(Q, lam, strict=True)
    ]


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
        if symmetric.device.type != "cpu":
            values, vectors = torch.linalg.eigh(symmetric)
            return values, vectors
        # NumPy's LAPACK takes two thirds of the time of torch's.
        lam, Q = np.linalg.eigh(symmetric.numpy())
        return torch.from_numpy(lam), torch.from_numpy(Q)
    except (torch.linalg.LinAlgError, np.linalg.LinAlgError) as error:
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
