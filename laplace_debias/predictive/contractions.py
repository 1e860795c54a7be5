r"""Pure maths of one Jacobian block in the eigenbasis; no model, no hooks, no state.

Notation, for one parameter tensor, one datum and one output (class) :math:`c`. A layer sees
inputs :math:`a_r` at positions :math:`r = 1, \dots, R` (tokens, pixels, repeated calls), and
:math:`g_{cr}` is the gradient of output c with respect to the layer's output there. Then

.. math::
    J_c = \sum_r g_{cr} a_r^\top, \qquad
    \tilde J_c = Q_B^\top J_c Q_A = \sum_r (Q_B^\top g_{cr}) (Q_A^\top a_r)^\top,

for a weight, and :math:`J_c = \sum_r g_{cr}`, :math:`\tilde J_c = Q^\top J_c` for a bias. With the
posterior variances in the eigenbasis, :math:`w_{ij} = 1 / (\lambda_{ij} + \delta)`, the block adds

.. math::
    \Sigma_{cd} = \sum_{ij} w_{ij} \tilde J_{c,ij} \tilde J_{d,ij}

to the covariance of outputs c and d. With one position the block has rank one, and the input
side can be contracted first: :math:`s_i = \sum_j w_{ij} \tilde a_j^2` and
:math:`\Sigma_{cd} = \sum_i s_i \tilde g_{ci} \tilde g_{di}`, with no factor C and no
:math:`[d_{out}, d_{in}]` array per datum.

Shapes: A ``[n, R, d_in]``, G ``[n, C, d_out, R]``, weights w ``[D, k]`` for k prior precisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from laplace_debias.kfac.thin import coordinates, is_thin

# Numbers per array: 6 MB in float32 for what a chunk of data shares, less for the tiles of rotated
# Jacobians, which stay in cache between the product that makes them and the one that consumes them.
CHUNK_NUMEL = 1_500_000
TILE_NUMEL = 700_000


def data_chunks(n: int, numel_per_datum: int, at_least: int = 1) -> list[slice]:
    """Cut n data into slices whose arrays hold about ``CHUNK_NUMEL`` numbers."""
    size = max(at_least, min(n, CHUNK_NUMEL // max(1, numel_per_datum)))
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def rotation_order(
    C: int,
    R: int,
    d_out: int,
    d_in: int,
    groups: int = 1,
    n_bases: int = 1,
    ranks: tuple[int, int] | None = None,
) -> tuple[bool, bool]:
    r"""Say whether to rotate inputs, and output gradients, before the sum over positions.

    Per datum and basis, rotating before costs ``R d_in^2`` (inputs) and ``C R d_out^2``
    (gradients), after the sum ``C d_out d_in^2`` and ``C d_out^2 d_in``. The sum itself costs
    ``C R d_out d_in``; if both sides are rotated after it, all bases share it. With several groups,
    output row o sees the inputs of its own group only, so gradients are rotated after. Rotating d
    numbers into a thin basis of r directions costs ``2 r d`` instead of ``d^2``.

    Returns:
        Whether inputs are rotated before, and whether gradients are.

    Example:
        >>> rotation_order(C=10, R=1024, d_out=96, d_in=864, n_bases=6)
        (False, False)
        >>> rotation_order(C=10, R=256, d_out=192, d_in=1728, n_bases=6)
        (True, True)
    """
    costs = direct_costs(C, R, d_out, d_in, groups, n_bases, ranks)
    return min(costs, key=lambda way: costs[way])


def direct_costs(
    C: int,
    R: int,
    d_out: int,
    d_in: int,
    groups: int = 1,
    n_bases: int = 1,
    ranks: tuple[int, int] | None = None,
) -> dict[tuple[bool, bool], float]:
    """Multiplications per datum and basis of each order, see :func:`rotation_order`.

    Example:
        >>> direct_costs(C=1, R=1, d_out=2, d_in=3)[True, True]
        19.0
    """
    r_out, r_in = ranks or (d_out, d_in)

    def cost(A_first: bool, B_first: bool) -> float:
        inputs = (R * groups if A_first else C * d_out) * d_in * min(d_in, 2 * r_in)
        outputs = C * d_out * min(d_out, 2 * r_out) * (R if B_first else d_in)
        shared = 1 if A_first or B_first else n_bases
        return inputs + outputs + C * R * d_out * d_in / shared

    ways = [(a, b) for a in (True, False) for b in (True, False) if groups == 1 or not b]
    return {way: cost(*way) for way in ways}


def _sum_over_positions(g: Tensor, A: Tensor) -> Tensor:
    """Return ``[m, C, d_out, d_in]`` from ``g [m, C, d_out, R]`` and ``A [m, R, groups, d_in]``."""
    C, d_out = g.shape[1:3]
    if A.shape[2] == 1:
        J = g.flatten(1, 2) @ A.squeeze(2)
        return J.view(len(J), C, d_out, -1)
    g = g.unflatten(2, (A.shape[2], -1)).transpose(1, 2).flatten(2, 3)
    J = g @ A.transpose(1, 2)  # [m, groups, C * d_out / groups, d_in]
    return J.view(*J.shape[:2], C, -1, J.shape[-1]).transpose(1, 2).flatten(2, 3)


def weight_moments(
    inputs: Callable[[slice], Tensor],
    G: Tensor,
    bases: Sequence[tuple[Tensor, Tensor]],
    inverses: Sequence[Callable[[slice], Iterable[Tensor]]],
    mode: str,
) -> list[Tensor]:
    r"""Contract :math:`\tilde J_c = Q_B^\top (\sum_r g_{cr} a_r^\top) Q_A` for several posteriors.

    The work is cut into tiles of a few data and a few output directions, so that a tile of
    :math:`\tilde J` is made, squared and consumed in cache. Inputs are extracted once for all
    posteriors, and so is the sum over positions where :func:`rotation_order` says so.

    Args:
        inputs: Gives the layer inputs ``[m, R, groups, d_in]`` of a slice of the data.
        G: Output gradients ``[n, C, d_out, R]``.
        bases: Eigenvectors ``(Q_B [d_out, d_out], Q_A [d_in, d_in])`` of each posterior, or thin.
        inverses: Of each posterior: gives the posterior variances ``[rows * d_in, k]`` of a slice
            of output directions, for consecutive prior precisions.
        mode: A key of ``CONTRACTIONS``.

    Returns:
        Per posterior ``[n, C, k]``, ``[n, C, C, k]`` or ``[n * C, n * C, k]``.
    """
    n, C, d_out, R = G.shape
    d_in = len(bases[0][1])
    numel = max(C * d_out * d_in, R * d_in)
    ranks = (bases[0][0].shape[1], bases[0][1].shape[1])
    few = max(1, min(n, 4, 10 * CHUNK_NUMEL // numel))  # data that share a read of the variances
    slices = [slice(0, n)] if mode == "joint" else data_chunks(n, numel, at_least=few)
    parts: list[list[Tensor]] = [[] for _ in bases]
    for s in slices:
        A, g = inputs(s), G[s]
        A_first, B_first = rotation_order(C, R, d_out, d_in, A.shape[2], len(bases), ranks)
        J = None if A_first or B_first else _sum_over_positions(g, A)
        for (Q_B, Q_A), w, part in zip(bases, inverses, parts, strict=True):
            rotated = coordinates(A, Q_A) if A_first else A
            wide_out, wide_in = (len(Q) + is_thin(Q) * Q.shape[1] for Q in (Q_B, Q_A))
            size = max(1, min(wide_out, TILE_NUMEL // (len(g) * C * wide_in)))
            if B_first:
                g_B = coordinates(g.mT, Q_B).mT.transpose(1, 2)  # [m, d_out, C, R]
            else:
                J_A = _sum_over_positions(g, rotated) if J is None else coordinates(J, Q_A)
                if is_thin(Q_B):
                    J_A = coordinates(J_A.mT, Q_B).mT
            total: Tensor | None = None
            for start in range(0, wide_out, size):
                rows = slice(start, min(start + size, wide_out))
                if B_first:
                    tile = g_B[:, rows].transpose(1, 2).flatten(1, 2) @ rotated.squeeze(2)
                    tile = tile if A_first else coordinates(tile, Q_A)
                else:
                    tile = J_A[:, :, rows] if is_thin(Q_B) else Q_B[:, rows].T @ J_A
                moments = contract([tile.reshape(len(g), C, -1)], partial(w, rows), mode)
                total = moments if total is None else total + moments
            if total is not None:
                part.append(total)
    return [torch.cat(part) for part in parts]


def dense_jacobians(J: Tensor, Q: tuple[Tensor, ...], whole: bool = False) -> Iterator[Tensor]:
    r"""Yield :math:`\tilde J` for an explicit Jacobian ``J [n, C, D]``, a few data at a time.

    :math:`\tilde J_c = Q^\top J_c` for one factor, :math:`Q_B^\top J_c Q_A` for two.
    """
    for s in [slice(0, len(J))] if whole else data_chunks(len(J), J[0].numel()):
        if len(Q) == 1:
            yield coordinates(J[s], Q[0])
        else:
            Q_B, Q_A = Q
            J_A = coordinates(J[s].unflatten(2, (len(Q_B), len(Q_A))), Q_A)
            yield (coordinates(J_A.mT, Q_B).mT if is_thin(Q_B) else Q_B.T @ J_A).flatten(2)


def variance(J: Tensor, w: Tensor) -> Tensor:
    r"""Contract :math:`\sum_i w_{ik} \tilde J_{ci}^2`.

    Args:
        J: Squares of the rotated Jacobians ``[m, C, D]``.
        w: Posterior variances ``[D, k]``, or ``[m, D, k]`` if they differ between data.

    Returns:
        Output variances ``[m, C, k]``.

    Example:
        >>> variance(torch.tensor([[[1.0, 4.0]]]), torch.tensor([[1.0], [0.5]]))
        tensor([[[3.]]])
    """
    return torch.matmul(J, w)


def covariance(J: Tensor, w: Tensor) -> Tensor:
    r"""Contract :math:`\sum_i w_{ik} \tilde J_{ci} \tilde J_{di}`.

    With many prior precisions the products :math:`\tilde J_c \tilde J_d` of the pairs c <= d are
    formed once and shared; with few, J is scaled once per prior precision.

    Args:
        J: Rotated Jacobians ``[m, C, D]``.
        w: Posterior variances ``[D, k]``, or ``[m, D, k]`` if they differ between data.

    Returns:
        Output covariances ``[m, C, C, k]``.

    Example:
        >>> covariance(torch.tensor([[[1.0, 2.0], [1.0, 0.0]]]), torch.ones(2, 1)).squeeze()
        tensor([[5., 1.],
                [1., 1.]])
    """
    C, k = J.shape[1], w.shape[-1]
    if 2 * k <= C:
        scaled = [(J * w[..., i].unsqueeze(-2)) @ J.mT for i in range(k)]
        return torch.stack(scaled, dim=-1)
    rows = [torch.matmul(J[:, c : c + 1] * J[:, c:], w) for c in range(C)]  # [m, C - c, k]
    upper = torch.cat(rows, dim=1)
    pair = torch.zeros(C, C, dtype=torch.long, device=J.device)
    c, d = torch.triu_indices(C, C, device=J.device)
    pair[c, d] = pair[d, c] = torch.arange(len(c), device=J.device)
    return upper[:, pair]


def joint_covariance(J: Tensor, w: Tensor) -> Tensor:
    r"""Contract :math:`\sum_i w_{ik} \tilde J_{nc,i} \tilde J_{md,i}` across data.

    Args:
        J: Rotated Jacobians ``[n, C, D]``.
        w: Posterior variances ``[D, k]``.

    Returns:
        Covariances of all outputs of all data ``[n * C, n * C, k]``.
    """
    J = J.flatten(0, 1)
    return torch.stack([(J * w[:, i]) @ J.mT for i in range(w.shape[-1])], dim=-1)


def input_side(a: Tensor, w: Tensor) -> Tensor:
    r"""Contract the input side of a one-position layer: :math:`s_i = \sum_j w_{ij} \tilde a_j^2`.

    Args:
        a: Rotated layer inputs ``[n, d_in]``.
        w: Posterior variances, input dimension first, ``[d_in, d_out, k]``.

    Returns:
        ``[n, d_out, k]``, the weights for :func:`variance` and :func:`covariance` of the rotated
        output gradients.

    Example:
        >>> input_side(torch.tensor([[1.0, 2.0]]), torch.ones(2, 3, 1)).squeeze(-1)
        tensor([[5., 5., 5.]])
    """
    return (a.square() @ w.flatten(1)).view(len(a), *w.shape[1:])


CONTRACTIONS = {"variance": variance, "covariance": covariance, "joint": joint_covariance}


def contract(
    jacobians: Iterable[Tensor], inverses: Callable[[], Iterable[Tensor]], mode: str
) -> Tensor:
    """Contract chunks of data with chunks of prior precisions.

    Args:
        jacobians: Rotated Jacobians ``[m, C, D]`` of consecutive data; they may be overwritten.
        inverses: Gives the posterior variances ``[D, k]`` of consecutive prior precisions.
        mode: A key of ``CONTRACTIONS``.

    Returns:
        ``[n, C, k]``, ``[n, C, C, k]`` or ``[n * C, n * C, k]``.
    """
    parts = []
    for J in jacobians:
        if mode == "variance":  # squared once, in place where autograd allows it
            J = J.square() if J.requires_grad else J.square_()
        parts.append(torch.cat([CONTRACTIONS[mode](J, w) for w in inverses()], dim=-1))
    return torch.cat(parts)
