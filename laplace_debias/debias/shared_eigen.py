"""Eigendecompositions that several processes share out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laplace_debias.data.processes import processes, shared_out, together
from laplace_debias.debias.eigen import eigh_float64

__all__ = ["eigh_shared"]


def eigh_shared(factors: Sequence[Tensor], names: Sequence[str]) -> list[tuple[Tensor, Tensor]]:
    """Eigendecompositions that several processes share out by their cost.

    Args:
        factors: Symmetric matrices, the same in every process.
        names: What they are called in errors.

    Returns:
        As :func:`eigh_float64` for each; all processes get the same bits.

    Example:
        >>> eigh_shared([torch.eye(2)], ["B"])[0][0]
        tensor([1., 1.], dtype=torch.float64)
    """
    group = processes()
    ranks = shared_out([len(M) ** 3 for M in factors], group)
    pairs: dict[int, tuple[Tensor, Tensor]] = {}
    with together("the eigendecompositions"):
        for i, (M, name) in enumerate(zip(factors, names, strict=True)):
            if group is None or ranks[i] == group.rank:
                pairs[i] = eigh_float64(M, name)
    if group is not None:
        for i, M in enumerate(factors):
            lam, Q = pairs.get(i) or (M.new_empty(len(M)).double(), torch.empty_like(M).double())
            parts = (group.broadcast_(part.contiguous(), ranks[i]) for part in (lam, Q))
            pairs[i] = (next(parts), next(parts))
    return [pairs[i] for i in range(len(factors))]
