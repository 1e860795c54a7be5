r"""Spectra: eigenbases, a basis's own eigenvalues, curvatures that other data measure along it.

Conventions as in :mod:`laplace_debias.kfac.factors`. What every method of fitting returns, a
:class:`FitResult`, is such a spectrum with the loss and what it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from laplace.utils import KronDecomposed
from torch import Tensor

from laplace_debias.data.processes import Processes, shared_out, together
from laplace_debias.debias.eigen import check_finite, eigh_float64, eigh_rows
from laplace_debias.kfac.factors import Block
from laplace_debias.kfac.few_rows import as_matrix, is_rows, scaled
from laplace_debias.kfac.thin import (
    curvature_along,
    curvatures_of,
    is_thin,
)
from laplace_debias.kfac.thin_kron import ThinKronDecomposed

__all__ = [
    "FitResult",
    "curvature_along",
    "decompose",
    "eigenbasis",
    "kron_decomposed",
    "rebuild",
    "reevaluate",
    "same_output",
]


@dataclass(frozen=True)
class FitResult:
    """What a fit leaves behind, in the precision it was computed in.

    Attributes:
        Q: Eigenvectors of the directions' factors, ``[d, d]``, or thin ones ``[d, r]`` of a factor
            of few rows (:mod:`laplace_debias.kfac.thin`).
        lam: Their eigenvalues on the same data, biased, ``[d]``.
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
        return kron_decomposed(Q, lam, damping)


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
        Eigenvectors ``Q`` (columns, ``[d, d]``; thin for factors of few rows) and eigenvalues
        ``lam`` (``[d]``, ascending, negative rounding errors clamped at 0), both in float64 and in
        the layout of ``factors``.

    Raises:
        ValueError: If a factor holds NaN or Inf, or LAPACK gives up on it; the message names the
            block.

    Example:
        >>> Q, lam = decompose([[torch.diag(torch.tensor([3.0, 1.0]))]], ["bias"])
        >>> lam[0][0].tolist()
        [1.0, 3.0]
    """
    return eigenbasis([list(block) for block in factors], names)


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
        Q: Orthonormal columns per factor, ``[d, d]`` or thin, from the directions' data.
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
            values.append(curvatures_of(as_matrix(C), Q_f))
        lam.append(values)
    return lam


def rebuild(Q: Sequence[Sequence[Tensor]], lam: Sequence[Sequence[Tensor]]) -> list[Block]:
    r"""Dense factors :math:`Q \,\mathrm{diag}(\lambda)\, Q^\top` from their decomposition.

    Args:
        Q: Eigenvectors per factor, ``[d, d]`` or thin.
        lam: Eigenvalues per factor, ``[d]``.

    Returns:
        Blocks of dense matrices ``[d, d]``, in the type of the eigenvalues.

    Example:
        >>> rebuild([[torch.eye(2)]], [[torch.tensor([1.0, 2.0])]])[0][0].diagonal().tolist()
        [1.0, 2.0]
    """
    return [
        [_rebuilt(Q_f.to(values.dtype), values) for Q_f, values in zip(*pair, strict=True)]
        for pair in zip(Q, lam, strict=True)
    ]


def _rebuilt(Q: Tensor, lam: Tensor) -> Tensor:
    """``lam_0 (I - Q Q^T) + Q diag(lam) Q^T``."""
    if not is_thin(Q):
        return (Q * lam) @ Q.T
    d, r = Q.shape
    out = (Q * (lam[d - r :] - lam[0])) @ Q.T
    out.diagonal().add_(lam[0])
    return out


def eigenbasis(
    blocks: list[Block],
    names: Sequence[str],
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    group: Processes | None = None,
    watched: Callable[[float], object] | None = None,
) -> tuple[list[Block], list[list[Tensor]]]:
    r"""Eigendecompose every factor in float64, the largest first, and free each on the way.

    Args:
        blocks: Blocks ``[B, A]`` or ``[B]``, whose factors are taken out one by one: as long as
            nobody else holds them, bases take the place of factors, and at no time there is more
            than one set of both.
        names: One name per block, for the error message.
        scale: Multiplies every ``B``.
        dtype: Type in which eigenvectors are kept; float64 by default.
        group: Processes that have the same blocks and share out the work, by its cost.
        watched: Called with each decomposition's share of the work, when it is done.

    Returns:
        Eigenvectors and eigenvalues as :func:`decompose` gives them. Blocks with the same ``B``
        share one tensor of eigenvectors.

    Raises:
        ValueError: As :func:`decompose`.

    Example:
        >>> blocks = [[torch.diag(torch.tensor([3.0, 1.0]))]]
        >>> Q, lam = eigenbasis(blocks, ["bias"], scale=2.0)
        >>> lam[0][0].tolist(), blocks
        ([2.0, 6.0], [[]])
    """
    shared = [i > 0 and same_output(block, blocks[i - 1]) for i, block in enumerate(blocks)]
    jobs = [(i, f) for i, block in enumerate(blocks) for f in range(len(block))]
    sizes = {(i, f): blocks[i][f].shape for i, f in jobs}
    waiting: dict[tuple[int, int], Tensor] = {(i, f): blocks[i][f] for i, f in jobs}
    for block in blocks:
        block.clear()
    dtype = dtype or torch.float64
    own = [(i, f) for i, f in jobs if f or not shared[i]]
    own.sort(key=lambda job: (-sizes[job].numel(), job))
    costs = [max(1, min(sizes[job]) ** 2 * max(sizes[job])) for job in own]
    ranks = dict(zip(own, shared_out(costs, group), strict=True))
    pairs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    devices: dict[tuple[int, int], torch.device] = {}  # of what other processes decompose
    with together("the eigendecompositions") if group is not None else nullcontext():
        for i, f in own:
            factor = waiting.pop((i, f))
            if group is not None and ranks[i, f] != group.rank:
                devices[i, f] = factor.device
                continue
            factor = factor if f or scale == 1 else scaled(factor, scale)
            values, vectors = (eigh_rows if is_rows(factor) else eigh_float64)(factor, names[i])
            pairs[i, f] = vectors.to(dtype), values.clamp(min=0.0)
            if watched is not None:
                watched(costs[own.index((i, f))] / sum(costs))
    if group is not None:
        shapes = group.gather({job: tuple(Q_f.shape) for job, (Q_f, _) in pairs.items()})
        for job in own:
            if job not in pairs:
                pairs[job] = _to_receive(shapes[ranks[job]][job], dtype, devices[job])
            Q_f, values = (part.contiguous() for part in pairs[job])
            pairs[job] = group.broadcast_(Q_f, ranks[job]), group.broadcast_(values, ranks[job])
    for i, is_shared in enumerate(shared):
        if is_shared:
            pairs[i, 0] = pairs[i - 1, 0]
    layout = [[(i, f) for j, f in jobs if j == i] for i in range(len(names))]
    return (
        [[pairs[job][0] for job in block] for block in layout],
        [[pairs[job][1] for job in block] for block in layout],
    )


def _to_receive(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Room for the eigenvectors and eigenvalues that another process has computed."""
    lam = torch.empty(shape[0], dtype=torch.float64, device=device)
    return torch.empty(shape, dtype=dtype, device=device), lam


def kron_decomposed(
    Q: list[list[Tensor]], lam: list[list[Tensor]], damping: bool = False
) -> KronDecomposed:
    """What laplace-torch holds, thin where there is a thin basis.

    Args:
        Q: Orthonormal columns ``[d, r]`` of every factor.
        lam: Eigenvalues ``[d]``.
        damping: laplace-torch's switch.

    Example:
        >>> type(kron_decomposed([[torch.eye(2)]], [[torch.ones(2)]])).__name__
        'KronDecomposed'
    """
    thin = any(is_thin(Q_f) for block in Q for Q_f in block)
    kind = ThinKronDecomposed if thin else KronDecomposed
    # laplace-torch holds lists of lists, and annotates them as if each were a tuple of one
    vectors: Any = Q
    values: Any = lam
    return kind(vectors, values, damping=damping)
