"""Sums over processes: the factors of all shares of the data as if one process had seen them.

Per role B is summed and A averaged by numbers of rows, as :class:`~laplace_debias.kfac.factors`
adds factors within one process; numbers of data, passes and losses add up. All processes end with
the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace_debias.data.processes import Processes, processes
from laplace_debias.kfac.factors import Factors
from laplace_debias.kfac.few_rows import are_few, as_matrix, is_rows

__all__ = ["factors_of_all"]


@dataclass(frozen=True)
class _Share:
    """What a process tells the others about its factors before they are summed."""

    names: tuple[str, ...]
    shapes: tuple[tuple[tuple[int, ...] | None, tuple[int, ...] | None], ...]  # as matrices
    few: tuple[tuple[int | None, int | None], ...]  # rows where factors are given by these
    dtype: torch.dtype
    same_B: tuple[bool, ...]  # as the parameter's before: a layer's weight and bias
    n_rows: tuple[int, ...]
    n: int
    n_outputs: int
    weight: float
    at_output: tuple[bool, ...]
    passes: tuple[int, int]


def factors_of_all(factors: Factors | None, device: torch.device) -> Factors | None:
    r"""Factors of the data of all processes together.

    .. math:: B = \sum_r B_r, \qquad A = \frac{\sum_r n_r A_r}{\sum_r n_r}

    with :math:`n_r` the number of rows behind :math:`A_r`. Factors may be given by their curvatures
    along a basis; these add up alike. Few rows are put below each other, if all of them are few.

    Args:
        factors: Those of this process's share, ``None`` if it is empty. Their tensors are
            overwritten.
        device: Where those of an empty share are to be.

    Returns:
        Those of all shares, the same in every process; ``None`` if all are empty. Without other
        processes, what was handed over.

    Raises:
        ValueError: If processes have factors of different parameters, or kept outputs or rows.

    Example:
        >>> factors_of_all(None, torch.device("cpu")) is None
        True
    """
    group = processes()
    if group is None:
        return factors
    shares: list[_Share | None] = group.gather(None if factors is None else _share(factors))
    found = [share for share in shares if share is not None]
    if not found:
        return None
    kinds = {(share.names, share.shapes, share.n_outputs) for share in found}
    if len(kinds) > 1:
        raise ValueError(
            "Expected factors of the same parameters and shapes in every process, got "
            f"{len(kinds)} different sets. Remedy: build the same model in every process, with the "
            "same parameters frozen."
        )
    if factors is None:
        factors = _zeros(found[0], device)
    before = [share for share in shares[: group.rank] if share is not None]
    few = [[_few(found, before, i, f) for f in (0, 1)] for i in range(len(factors.names))]
    rows = [sum(each) for each in zip(*(share.n_rows for share in found), strict=True)]
    same = [all(each) for each in zip(*(share.same_B for share in found), strict=True)]
    B: list[Tensor | None] = []
    A: list[Tensor | None] = []
    n_rows = factors.n_rows or (factors.n,) * len(rows)
    for i, (own_B, own_A) in enumerate(zip(factors.B, factors.A, strict=True)):
        if own_B is None:
            B.append(None)
        else:
            B.append(B[i - 1] if same[i] else _summed(own_B, few[i][0], group))
        if own_A is not None:
            share = n_rows[i] / max(rows[i], 1)
            own_A.mul_(math.sqrt(share) if is_rows(own_A) else share)
            own_A = _summed(own_A, few[i][1], group)
        A.append(own_A)
    loss = factors.summed_loss.to(torch.float64, copy=True)
    return replace(
        factors,
        B=tuple(B),
        A=tuple(A),
        n=sum(share.n for share in found),
        weight=sum(share.weight for share in found),
        loss=group.sum_(loss).to(factors.summed_loss.dtype),
        forward=sum(share.passes[0] for share in found),
        backward=sum(share.passes[1] for share in found),
        at_output=tuple(
            all(each) for each in zip(*(share.at_output for share in found), strict=True)
        ),
        n_rows=tuple(rows) if found[0].n_rows else (),
    )


def _share(factors: Factors) -> _Share:
    """Describe the factors of one process."""
    if factors.outputs is not None or any(rows is not None for rows in factors.rows):
        raise ValueError(
            "Expected factors without outputs and rows to sum over processes, got some that kept "
            "them. Remedy: compute them with `outputs=True` and without `rows_from`."
        )
    B, A = factors.B, factors.A
    return _Share(
        factors.names,
        tuple((_shape(b), _shape(a)) for b, a in zip(B, A, strict=True)),
        tuple((_n_few(b), _n_few(a)) for b, a in zip(B, A, strict=True)),
        next(M.dtype for M in (*B, *A) if M is not None),
        tuple(i > 0 and _equal(B[i - 1], b) for i, b in enumerate(B)),
        factors.n_rows or (factors.n,) * len(B),
        factors.n,
        factors.n_outputs,
        factors.weight,
        factors.at_output,
        (factors.forward, factors.backward),
    )


def _equal(one: Tensor | None, two: Tensor | None) -> bool:
    """Whether two output factors are the same."""
    return one is not None and two is not None and one.shape == two.shape and torch.equal(one, two)


def _shape(M: Tensor | None) -> tuple[int, ...] | None:
    """Shape of a factor, as a matrix if it is given by its rows."""
    if M is None:
        return None
    return (M.shape[1], M.shape[1]) if is_rows(M) else tuple(M.shape)


def _n_few(M: Tensor | None) -> int | None:
    """Number of rows of a factor that is given by these."""
    return len(M) if M is not None and is_rows(M) else None


def _few(
    found: Sequence[_Share], before: Sequence[_Share], i: int, f: int
) -> tuple[int, int] | None:
    """Rows of a factor in all shares, and in those before; ``None`` if it is to be a matrix."""
    shape, counts = found[0].shapes[i][f], [share.few[i][f] for share in found]
    known = [count for count in counts if count is not None]
    if shape is None or len(known) < len(counts) or not are_few(sum(known), shape[-1]):
        return None
    return sum(known), sum(share.few[i][f] or 0 for share in before)


def _summed(M: Tensor, few: tuple[int, int] | None, group: Processes) -> Tensor:
    """A factor of all processes: rows in the order of ranks, or the sum of matrices."""
    if few is None:
        return group.sum_(as_matrix(M))
    total, start = few
    rows = M.new_zeros(total, M.shape[1])
    rows[start : start + len(M)] = M
    return group.sum_(rows)


def _zeros(share: _Share, device: torch.device) -> Factors:
    """Factors of no data, in the form of those of another process."""

    def zeros(shape: tuple[int, ...] | None, few: int | None) -> Tensor | None:
        if shape is None:
            return None
        size = shape if few is None else (0, shape[1])
        return torch.zeros(size, dtype=share.dtype, device=device)

    parts = list(zip(share.shapes, share.few, strict=True))
    return Factors(
        share.names,
        tuple(zeros(B, few[0]) for (B, _), few in parts),
        tuple(zeros(A, few[1]) for (_, A), few in parts),
        0,
        share.n_outputs,
        weight=0.0,
        loss=torch.zeros((), dtype=share.dtype, device=device),
        at_output=share.at_output,
        n_rows=(0,) * len(share.names),
    )
