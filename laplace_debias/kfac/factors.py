r"""Kronecker factors: merge, rescale, decompose, re-evaluate, rebuild.

Conventions (stated here once, used everywhere):

* A *block* belongs to one trainable parameter. For a weight it is ``[B, A]`` and stands for the
  matrix ``kron(B, A)``: ``B`` ``[d_out, d_out]`` from output gradients, ``A`` ``[d_in, d_in]`` from
  layer inputs (convolution: ``d_in = C_in / groups * k * k``). For a bias it is ``[B]``.
  A list of blocks, one per trainable parameter in the order of ``model.parameters()``, is what
  laplace-torch's ``Kron`` holds.
* K-FAC-expand: ``B`` is the SUM over data and positions of :math:`g g^\top`, ``A`` the MEAN over
  data and positions of :math:`a a^\top`. Only their product counts: for regression some backends
  put a root of 1/2 on each factor, so one backend's ``A`` must not meet another one's ``B``.
* laplace-torch's precision is ``H + prior_precision * I`` with ``H`` a sum over the ``N`` training
  data; the paper's is ``N (K + beta I)`` with ``K`` a mean. Hence
  ``prior_precision = N * beta``.
* The ``M`` data of a role (directions, curvatures) stand for ``N``: every block, weight or bias, is
  multiplied by ``N / M`` exactly once, on ``B`` (:func:`rescale`). The mini-batches of one role are
  first merged: ``B`` adds up, ``A`` is averaged with weights ``m / M`` (:func:`merge`).
* Debiased block: with ``A = Q_A diag(lam_A) Q_A^T`` and ``B = Q_B diag(lam_B) Q_B^T`` from the
  directions' data and ``C``, ``D`` the same factors from the curvatures' data,
  ``lam~_A = diag(Q_A^T C Q_A)``, ``lam~_B = diag(Q_B^T D Q_B)``, and the block is
  ``kron(Q_B, Q_A) diag(lam~_B x lam~_A) kron(Q_B, Q_A)^T``. Along every column of
  ``kron(Q_B, Q_A)`` its curvature is that of ``kron(D, C)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Block",
    "DataFactors",
    "check_finite",
    "curvature_along",
    "decompose",
    "eigh_float64",
    "merge",
    "rebuild",
    "reevaluate",
    "rescale",
    "same_output",
]

# Rows of a symmetric matrix that are multiplied at once.
_ROWS = 256

Block = list[Tensor]
"""``[B, A]`` or ``[B]``; the same layout holds eigenvectors and eigenvalues of the factors."""


@dataclass(frozen=True)
class DataFactors:
    """Kronecker factors and loss of a set of n data.

    Attributes:
        blocks: ``[B, A]`` or ``[B]`` per parameter, B a sum and A a mean over the n data.
        n: Number of data.
        loss: Loss summed over the n data.
        n_outputs: Number C of outputs of the network.
    """

    blocks: list[Block]
    n: int
    loss: Tensor
    n_outputs: int


def merge(
    first: Sequence[Block], n_first: int, second: Sequence[Block], n_second: int
) -> list[Block]:
    r"""Factors of two disjoint sets of data taken together.

    .. math::
        B = B_1 + B_2, \qquad A = \frac{n_1 A_1 + n_2 A_2}{n_1 + n_2}

    Args:
        first: Blocks of the first set.
        n_first: Number of data behind ``first`` (or the number they stand for).
        second: Blocks of the second set, of the same shapes.
        n_second: Number of data behind ``second``.

    Returns:
        New blocks of the same shapes; the arguments are left as they are.

    Example:
        >>> one = [[torch.tensor([[2.0]]), torch.tensor([[1.0]])], [torch.tensor([[2.0]])]]
        >>> two = [[torch.tensor([[6.0]]), torch.tensor([[5.0]])], [torch.tensor([[6.0]])]]
        >>> [[factor.item() for factor in block] for block in merge(one, 1, two, 3)]
        [[8.0, 4.0], [8.0]]
    """
    n = n_first + n_second
    merged = []
    for block1, block2 in zip(first, second, strict=True):
        block = [block1[0] + block2[0]]
        if len(block1) == 2:
            block.append(block1[1] * (n_first / n) + block2[1] * (n_second / n))
        merged.append(block)
    return merged


def rescale(factors: Sequence[Block], factor: float) -> list[Block]:
    r"""Multiply every block by ``factor`` exactly once, on ``B``.

    With ``factor = N / M`` the ``M`` data behind the factors stand for ``N``.

    Args:
        factors: Blocks ``[B, A]`` or ``[B]``.
        factor: The multiplier.

    Returns:
        New blocks; ``A`` is shared with the argument.

    Example:
        >>> blocks = [[torch.eye(2), torch.eye(3)], [torch.eye(2)]]
        >>> [block[0].trace().item() for block in rescale(blocks, 10.0)]
        [20.0, 20.0]
    """
    return [[block[0] * factor, *block[1:]] for block in factors]


def decompose(
    factors: Sequence[Block], names: Sequence[str]
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
    Q, lam, pairs = [], [], []
    previous: Block = []
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
    Q: Sequence[Block], factors: Sequence[Block], names: Sequence[str]
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


def rebuild(Q: Sequence[Block], lam: Sequence[Sequence[Tensor]]) -> list[Block]:
    r"""Dense factors :math:`Q \,\mathrm{diag}(\lambda)\, Q^\top` from their decomposition.

    Args:
        Q: Eigenvectors per factor, ``[d, d]``.
        lam: Eigenvalues per factor, ``[d]``.

    Returns:
        Blocks of dense matrices ``[d, d]``.

    Example:
        >>> rebuild([[torch.eye(2)]], [[torch.tensor([1.0, 2.0])]])[0][0].diagonal().tolist()
        [1.0, 2.0]
    """
    return [
        [(Q_f * values) @ Q_f.T for Q_f, values in zip(vectors, block, strict=True)]
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
            return torch.linalg.eigh(symmetric)
        # NumPy's LAPACK takes two thirds of the time of torch's.
        values, vectors = np.linalg.eigh(symmetric.numpy())
        return torch.from_numpy(values), torch.from_numpy(vectors)
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
