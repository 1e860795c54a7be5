r"""Which outputs are contracted together: all of them, a few at a time, or position by position.

Covariances are wanted between the outputs of one position only (a datum without positions is one):
``[C, C]`` for each, never ``[T C, T C]``. So every position takes passes of its own. Where the
gradients of a position's outputs do not fit into memory at once, the covariances of outputs in
different parts take their passes once per pair of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["grouped_moments"]


def grouped_moments(
    moments: Callable[[Tensor, bool], list[Tensor]],
    classes: Tensor,
    mode: str,
    group: int,
    at_once: int | None = None,
    *,
    apart: bool = False,
) -> list[Tensor]:
    """Moments of all outputs of a datum.

    Args:
        moments: Contracts some outputs; the second argument says whether they are the last.
        classes: Numbers of the outputs, ``[n, F]``, position by position.
        mode: ``"variance"``, ``"covariance"`` or ``"joint"``.
        group: Number C of outputs of a position.
        at_once: Most outputs to contract at once; all by default.
        apart: Whether moments have a leading dimension of blocks.

    Returns:
        Per posterior ``[n, F, k]``, ``[n, F / C, C, C, k]`` or what ``"joint"`` gives.

    Example:
        >>> def moments(classes, last):
        ...     one = classes.double()
        ...     return [(one.unsqueeze(2) * one.unsqueeze(1)).unsqueeze(-1)]
        >>> grouped_moments(moments, torch.arange(6).expand(2, 6), "covariance", 3)[0].shape
        torch.Size([2, 2, 3, 3, 1])
    """
    F = classes.shape[1]
    if mode == "joint":
        return moments(classes, True)
    if mode == "variance":
        parts = classes.split(at_once or F, dim=1)
        pieces = [moments(part, i + 1 == len(parts)) for i, part in enumerate(parts)]
        if len(pieces) == 1:
            return pieces[0]
        return [torch.cat(c, dim=1 + apart) for c in zip(*pieces, strict=True)]
    found = []
    positions = classes.split(group, dim=1)
    for i, own in enumerate(positions):
        last = i + 1 == len(positions)
        if at_once is None or at_once >= own.shape[1]:
            found.append(moments(own, last))
        else:
            found.append(_by_pairs(moments, own.split(max(1, at_once // 2), dim=1), last))
    return [torch.stack(c, dim=1 + apart) for c in zip(*found, strict=True)]


def _by_pairs(
    moments: Callable[[Tensor, bool], list[Tensor]], parts: Sequence[Tensor], last: bool
) -> list[Tensor]:
    """Covariances of all outputs from those of any two parts of them."""
    rows: list[list[list[Tensor]]] = []  # [part][other part][posterior]
    for i, one in enumerate(parts):
        rows.append([[t.transpose(1, 2) for t in rows[j][i]] for j in range(i)])
        for j, two in enumerate(parts[i:], i):
            both = moments(
                one if i == j else torch.cat([one, two], dim=1), last and i + 1 == len(parts)
            )
            m = one.shape[1]
            rows[i].append([t if i == j else t[:, :m, m:] for t in both])
    n_posteriors = len(rows[0][0])
    return [
        torch.cat([torch.cat([piece[p] for piece in row], dim=2) for row in rows], dim=1)
        for p in range(n_posteriors)
    ]
