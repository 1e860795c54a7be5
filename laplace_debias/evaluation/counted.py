"""Which predictions count: each datum, or each position (token, pixel) with a label."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from laplace_debias.data.targets import IGNORED

__all__ = ["counted_rows", "ignore_index_of"]


def ignore_index_of(la: Any) -> int:
    """The label of positions that do not count, for a Laplace approximation of any kind.

    Args:
        la: A Laplace approximation, ours or laplace-torch's.

    Example:
        >>> ignore_index_of(object())
        -100
    """
    return int(getattr(getattr(la, "objective", None), "ignore_index", IGNORED))


def counted_rows(
    values: Tensor, labels: Tensor, ignore_index: int = IGNORED, leading: int = 0
) -> tuple[Tensor, Tensor]:
    """One row for each datum, or for each position that counts.

    Args:
        values: ``[n, C]`` or ``[n, *positions, C]``, with further dimensions before.
        labels: Class indices ``[n, *positions]``, or class probabilities ``[n, *positions, C]``,
            which all count.
        ignore_index: The label of positions that do not count; every datum of ``[n, C]`` does.
        leading: How many dimensions ``values`` has before the data.

    Returns:
        Rows ``[..., m, C]``, and their labels ``[m]`` or ``[m, C]``.

    Example:
        >>> import torch
        >>> rows, labels = counted_rows(torch.zeros(1, 3, 2), torch.tensor([[0, -100, 1]]))
        >>> rows.shape, labels
        (torch.Size([2, 2]), tensor([0, 1]))
    """
    soft = labels.is_floating_point()
    labels = labels.to(values.device) if soft else labels.to(values.device).long()
    if values.ndim - leading == 2:
        return values, labels
    rows = values.flatten(leading, -2)
    if soft:
        return rows, labels.flatten(0, -2)
    flat = labels.flatten()
    keep = flat != ignore_index
    return rows.movedim(leading, 0)[keep].movedim(0, leading), flat[keep]
