r"""Variances of a layer with few positions, from pairs of them: no Jacobian is formed.

In the notation of :mod:`laplace_debias.predictive.contractions`, with rotated inputs
:math:`\tilde a_r` and gradients :math:`\tilde g_{cr}`, the square of a sum over positions is a sum
over pairs of them, and the input side of a pair is common to all outputs:

.. math::
    \sum_{ij} w_{ij} \Bigl(\sum_r \tilde g_{cri} \tilde a_{rj}\Bigr)^2
    = \sum_{r \le s} \sum_i S_{rsi} \, \tilde g_{cri} \tilde g_{csi}, \qquad
    S_{rsi} = (2 - [r = s]) \sum_j w_{ij} \tilde a_{rj} \tilde a_{sj} .

That takes ``R (R + 1) / 2`` products with w per datum and prior precision, where the direct way
makes C arrays of the weight's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from laplace_debias.kfac.thin import coordinates
from laplace_debias.predictive.contractions import data_chunks, direct_costs

__all__ = ["pair_moments", "pairs_pay"]

# Reading, squaring and weighting an entry of a Jacobian takes the time of so many multiplications
# in a matrix product.
_ENTRY = 10
_ROWS = 256  # rows of a product that are worth reading w for


def pairs_pay(G: Tensor, bases: tuple[Tensor, Tensor], delta: Tensor) -> bool:
    """Whether pairs of positions cost less than Jacobians, for one group.

    Args:
        G: Output gradients ``[n, C, d_out, R]``.
        bases: Eigenvectors ``(Q_B [d_out, r], Q_A [d_in, r])``; only their shapes count.
        delta: The k prior precisions.

    Example:
        >>> bases = torch.empty(512, 512), torch.empty(4608, 4608)
        >>> [pairs_pay(torch.empty(1, 20, 512, R), bases, torch.ones(1)) for R in (4, 256)]
        [True, False]
    """
    (_, C, d_out, R), k = G.shape, len(delta)
    (_, r_out), (d_in, r_in) = bases[0].shape, bases[1].shape
    pairs = R * (R + 1) // 2
    rotations = R * d_in * min(d_in, 2 * r_in) + C * R * d_out * min(d_out, 2 * r_out)
    ours = rotations + k * pairs * d_out * d_in + _ENTRY * pairs * (d_in + C * d_out)
    direct = min(direct_costs(C, R, d_out, d_in, ranks=(r_out, r_in)).values())
    return ours < direct + C * d_out * d_in * (_ENTRY + k)


def pair_moments(
    inputs: Callable[[slice], Tensor],
    G: Tensor,
    Q_B: Tensor,
    Q_A: Tensor,
    inverses: Callable[[], Iterable[Tensor]],
) -> Tensor:
    r"""Variances :math:`\sum_{ij} w_{ij} \tilde J_{c,ij}^2` from pairs of positions.

    Args:
        inputs: Gives the layer inputs ``[m, R, 1, d_in]`` of a slice of the data.
        G: Output gradients ``[n, C, d_out, R]``.
        Q_B: Eigenvectors ``[d_out, d_out]``, or thin.
        Q_A: Eigenvectors ``[d_in, d_in]``, or thin.
        inverses: Gives the posterior variances, input dimension first, ``[d_in, d_out, k]``, for
            consecutive prior precisions.

    Returns:
        ``[n, C, k]``.

    Example:
        >>> a, g = torch.tensor([[[[2.0]], [[3.0]]]]), torch.tensor([[[[5.0, 1.0]]]])
        >>> Q, w = torch.eye(1), torch.ones(1, 1, 1)
        >>> pair_moments(lambda s: a[s], g, Q, Q, lambda: [w])
        tensor([[[169.]]])
    """
    n, C, d_out, R = G.shape
    pairs, parts = R * (R + 1) // 2, []
    numel = max(pairs * len(Q_A), C * R * d_out)
    for s in data_chunks(n, numel, at_least=-(-_ROWS // pairs)):
        a = coordinates(inputs(s).squeeze(2), Q_A)  # [m, R, d_in]
        m = len(a)
        both = torch.cat([_products(a, r, 2.0) for r in range(R)], dim=1).flatten(0, 1)
        sides = [(both @ w.flatten(1)).view(m, pairs, *w.shape[1:]) for w in inverses()]
        side = torch.cat(sides, dim=-1) if len(sides) > 1 else sides[0]  # [m, pairs, d_out, k]
        g = coordinates(G[s].mT, Q_B)  # [m, C, R, d_out]
        total = side.new_zeros(m, C, side.shape[-1])
        for r, own in enumerate(side.split(list(range(R, 0, -1)), dim=1)):
            total = total + _products(g, r).flatten(2) @ own.flatten(1, 2)
        parts.append(total)
    return torch.cat(parts)


def _products(t: Tensor, r: int, twice: float = 1.0) -> Tensor:
    """Row r of ``[..., R, d]`` times itself and, ``twice``, times each later row."""
    first, own = t[..., r : r + 1, :], t[..., r:, :]
    if twice == 1.0 or own.shape[-2] == 1:
        return first * own
    return torch.cat([first.square(), (twice * first) * own[..., 1:, :]], dim=-2)
