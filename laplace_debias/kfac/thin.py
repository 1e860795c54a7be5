r"""Orthonormal bases that are thin: some directions, and what they leave as one null space.

A factor of few rows has a basis ``Q [d, r]`` of the space that its rows span; what is left is a
projection :math:`P_0 = I - Q Q^\top`, along which there is one curvature :math:`\lambda_0`:

.. math:: F = \lambda_0 P_0 + Q \,\mathrm{diag}(\lambda)\, Q^\top .

Eigenvalues are kept as if the basis were full, ``[d]``: the first d - r of them, all equal, are
:math:`\lambda_0`. What only reads eigenvalues (determinants, the bias) need not know.

Wherever a full basis serves as :math:`Q \,\mathrm{diag}(w)\, Q^\top`, a thin one serves as the
frame :math:`U = [P_0, Q]`, ``[d, d + r]``: :math:`U U^\top = I`, and
:math:`U \,\mathrm{diag}(w_0, \dots, w_0, w)\, U^\top = w_0 P_0 + Q \,\mathrm{diag}(w)\, Q^\top`.
Coordinates are :math:`U^\top x = (x - Q Q^\top x,\; Q^\top x)`; the residual is formed itself,
because :math:`|x|^2 - |Q^\top x|^2` cancels.

A second role's curvature C along the null space is its mean,
:math:`\tilde\lambda_0 = \mathrm{tr}(P_0 C) / (d - r)`. This is the paper's
:math:`\mathrm{diag}(Q^\top C Q)` for one of the eigenbases of the null space: every symmetric
matrix has an orthonormal basis in which its diagonal is constant (Schur and Horn). Unlike that of
an arbitrary basis, it does not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from laplace.utils import KronDecomposed
from torch import Tensor

__all__ = [
    "bases_of",
    "completed",
    "coordinates",
    "curvature_along",
    "curvatures_of",
    "frame_values",
    "from_coordinates",
    "is_thin",
    "with_null_space",
]


# Rows of a symmetric matrix, and directions, that are multiplied at once.
_ROWS = 256

_COLUMNS = 512


def is_thin(Q: Tensor) -> bool:
    """Whether a basis leaves a null space.

    Args:
        Q: Orthonormal columns ``[d, r]``.

    Example:
        >>> is_thin(torch.eye(3)), is_thin(torch.eye(3)[:, :1])
        (False, True)
    """
    return Q.shape[-1] < Q.shape[-2]


def coordinates(x: Tensor, Q: Tensor) -> Tensor:
    r"""Coordinates of rows, :math:`Q^\top x`, or :math:`U^\top x` with a thin basis.

    Args:
        x: Rows ``[..., d]``.
        Q: Orthonormal columns ``[d, r]``.

    Returns:
        ``[..., d]``, or ``[..., d + r]`` with a thin basis.

    Example:
        >>> coordinates(torch.tensor([1.0, 2.0]), torch.tensor([[0.0], [1.0]]))
        tensor([1., 0., 2.])
    """
    z = x @ Q
    return torch.cat([x - z @ Q.mT, z], dim=-1) if is_thin(Q) else z


def from_coordinates(z: Tensor, Q: Tensor) -> Tensor:
    r"""Rows from their coordinates, :math:`Q z` or :math:`U z`.

    Args:
        z: As :func:`coordinates` returns them.
        Q: Orthonormal columns ``[d, r]``.

    Returns:
        Rows ``[..., d]``.

    Example:
        >>> from_coordinates(torch.tensor([1.0, 5.0, 2.0]), torch.tensor([[0.0], [1.0]]))
        tensor([1., 2.])
    """
    if not is_thin(Q):
        return z @ Q.mT
    null, span = z[..., : len(Q)], z[..., len(Q) :]
    return null + (span - null @ Q) @ Q.mT


def frame_values(lam: Tensor, Q: Tensor) -> Tensor:
    """Eigenvalues for every column of the frame.

    Args:
        lam: Eigenvalues ``[d]``, those of the null space first.
        Q: Orthonormal columns ``[d, r]``.

    Returns:
        ``[d]``, or ``[d + r]`` with a thin basis.

    Example:
        >>> frame_values(torch.tensor([3.0, 3.0, 7.0]), torch.eye(3)[:, :1])
        tensor([3., 3., 3., 7.])
    """
    d, r = Q.shape
    return torch.cat([lam[:1].expand(d), lam[d - r :]]) if is_thin(Q) else lam


def with_null_space(values: Tensor, trace: Tensor, d: int) -> Tensor:
    """Curvatures in all d directions from those along a basis, and their sum.

    Args:
        values: Curvatures ``[r]`` along the columns of a basis.
        trace: Sum over all directions.
        d: Number of directions.

    Returns:
        ``[d]``: the mean of what is left, at least 0, for each direction of the null space, then
        ``values``.

    Example:
        >>> with_null_space(torch.tensor([4.0]), torch.tensor(10.0), 3)
        tensor([3., 3., 4.])
    """
    r = len(values)
    if r == d:
        return values
    null = ((trace - values.sum()) / (d - r)).clamp(min=0)
    return torch.cat([null.expand(d - r), values])


def completed(Q: Tensor) -> Tensor:
    """A full basis whose last columns are the given ones.

    Args:
        Q: Orthonormal columns ``[d, r]``.

    Returns:
        Orthonormal columns ``[d, d]``; ``Q`` itself if it is full.

    Example:
        >>> Q = torch.tensor([[0.6], [0.8]])
        >>> full = completed(Q)
        >>> bool(torch.equal(full[:, 1:], Q)), (full.T @ full).round(decimals=5).tolist()
        (True, [[1.0, 0.0], [0.0, 1.0]])
    """
    if not is_thin(Q):
        return Q
    full: Tensor = torch.linalg.qr(Q.double(), mode="complete")[0]
    return torch.cat([full[:, Q.shape[1] :].to(Q.dtype), Q], dim=1)


def all_completed(blocks: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Full bases of all blocks.

    Args:
        blocks: Bases ``[d, r]``, in the layout of Kronecker factors.

    Example:
        >>> [Q.shape for Q in all_completed([[torch.eye(3)[:, :1]]])[0]]
        [torch.Size([3, 3])]
    """
    return [[completed(Q) for Q in block] for block in blocks]


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


def curvatures_of(M: Tensor, Q: Tensor) -> Tensor:
    """Curvatures of a matrix along a basis and its null space, at least 0.

    Args:
        M: Symmetric matrix ``[d, d]``.
        Q: Directions ``[d, k]`` in columns, orthonormal.

    Returns:
        Curvatures ``[d]`` in float64, first those of the null space of a thin basis.

    Example:
        >>> curvatures_of(torch.diag(torch.tensor([1.0, 3.0, 5.0])), torch.eye(3)[:, 2:])
        tensor([2., 2., 5.], dtype=torch.float64)
    """
    parts = [curvature_along(M, part.double()) for part in Q.split(_COLUMNS, dim=1)]
    return with_null_space(torch.cat(parts).clamp_(min=0.0), M.diagonal().double().sum(), len(M))


def bases_of(H: KronDecomposed) -> list[list[Tensor]]:
    """Bases of a curvature as they are held: thin, if it is ours.

    Args:
        H: laplace-torch's, or a :class:`~laplace_debias.kfac.thin_kron.ThinKronDecomposed`.

    Example:
        >>> from laplace_debias.kfac.thin_kron import ThinKronDecomposed
        >>> H = ThinKronDecomposed([[torch.eye(3)[:, :1]]], [[torch.ones(3)]])
        >>> bases_of(H)[0][0].shape
        torch.Size([3, 1])
    """
    found: Any = H.bases if hasattr(H, "bases") else H.eigenvectors
    return [list(block) for block in found]
