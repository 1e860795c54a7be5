r"""Variances of a layer with few positions, from pairs of them: no Jacobian is formed.

In the notation of :mod:`laplace_debias.predictive.contractions`, with rotated inputs
:math:`\tilde a_r` and gradients :math:`\tilde g_{cr}`, the square of a sum over positions is a sum
over pairs of them, and the input side of a pair is common to all outputs:

.. math::
    \sum_{ij} w_{ij} \Bigl(\sum_r \tilde g_{cri} \tilde a_{rj}\Bigr)^2
    = \sum_{r \le s} \sum_i S_{rsi} \, \tilde g_{cri} \tilde g_{csi}, \qquad
    S_{rsi} = (2 - [r = s]) \sum_j w_{ij} \tilde a_{rj} \tilde a_{sj} .

That takes ``R (R + 1) / 2`` products with w per datum and prior precision, where the direct way
makes C arrays of the weight's size. Along the null space of a thin basis w is constant, so that its
coordinates enter by their inner products alone, :math:`\sum_{j \in 0} \tilde a_{rj} \tilde a_{sj}`:
one number per pair for d of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from laplace_debias.kfac.thin import is_thin
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
    few_in, few_out = min(d_in, r_in + 1), min(d_out, r_out + 1)  # numbers per pair
    ours = k * pairs * few_out * few_in + _ENTRY * pairs * (few_in + C * few_out)
    for rows, d, r in ((R, d_in, r_in), (C * R, d_out, r_out)):
        ours += rows * (d * d if r == d else d * (2 * r + R))  # a thin basis: and inner products
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
    numel = max(pairs * min(len(Q_A), Q_A.shape[1] + 1), C * R * d_out)
    null_in, null_out = (max(0, len(Q) - 1) if is_thin(Q) else 0 for Q in (Q_A, Q_B))
    for s in data_chunks(n, numel, at_least=-(-_ROWS // pairs)):
        a = _Side(inputs(s).squeeze(2), Q_A)
        both = torch.cat([a.products(r, 2.0) for r in range(R)], dim=-2).flatten(0, 1)
        m, sides = len(both) // pairs, []
        for w in inverses():
            w = w[null_in:, null_out:]  # once for the null space
            sides.append((both @ w.flatten(1)).view(m, pairs, *w.shape[1:]))
        side = torch.cat(sides, dim=-1) if len(sides) > 1 else sides[0]  # [m, pairs, d_out, k]
        g = _Side(G[s].mT, Q_B)  # [m, C, R, d_out]
        total = side.new_zeros(m, C, side.shape[-1])
        for r, own in enumerate(side.split(list(range(R, 0, -1)), dim=1)):
            total = total + g.products(r).flatten(2) @ own.flatten(1, 2)
        parts.append(total)
    return torch.cat(parts)


class _Side:
    """Inputs or gradients of a layer in the eigenbasis; of a null space, inner products.

    Args:
        rows: Those of all positions, ``[..., R, d]``.
        Q: Eigenvectors ``[d, d]``, or thin ``[d, r]``.
    """

    def __init__(self, rows: Tensor, Q: Tensor) -> None:
        self.z = rows @ Q
        null = rows - self.z @ Q.mT if is_thin(Q) else None
        self.inner = None if null is None else null @ null.mT  # [..., R, R]

    def products(self, r: int, twice: float = 1.0) -> Tensor:
        """Row r times itself and, ``twice``, times each later row: ``[..., R - r, d or 1 + r]``."""
        first, own = self.z[..., r : r + 1, :], self.z[..., r:, :]
        found = first * own
        if self.inner is not None:
            found = torch.cat([self.inner[..., r:, r : r + 1], found], dim=-1)
        if twice == 1.0 or own.shape[-2] == 1:
            return found
        return torch.cat([found[..., :1, :], twice * found[..., 1:, :]], dim=-2)
