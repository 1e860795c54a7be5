"""Products that are symmetric: half of the work."""

from __future__ import annotations

from torch import Tensor

__all__ = ["add_gram_", "mirror_"]

# Above this dimension a Gram matrix is built in halves, which skips its redundant upper triangle.
_HALVE_ABOVE = 384


def add_gram_(out: Tensor, rows: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> None:
    """Set the lower triangle of ``out`` to ``beta * out + alpha * rows^T rows``.

    The matrix is split into halves recursively: the two diagonal blocks, and the block below them.
    Large Gram matrices so cost little more than half of the full product. Above the diagonal
    ``out`` is undefined until ``mirror_``.

    Args:
        out: Square matrix ``[d, d]``, changed in place.
        rows: Matrix ``[r, d]``, of any strides.
        alpha: Factor of the product.
        beta: Factor of what was there before; with 0 it may be uninitialised.

    Example:
        >>> import torch
        >>> rows, out = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.empty(2, 2)
        >>> add_gram_(out, rows, alpha=0.5, beta=0.0)
        >>> out.tril()
        tensor([[ 5.,  0.], [ 7., 10.]])
    """
    d = rows.shape[1]
    if d <= _HALVE_ABOVE:
        out.addmm_(rows.T, rows, alpha=alpha, beta=beta)
        return
    h = d // 2
    add_gram_(out[:h, :h], rows[:, :h], alpha=alpha, beta=beta)
    add_gram_(out[h:, h:], rows[:, h:], alpha=alpha, beta=beta)
    out[h:, :h].addmm_(rows[:, h:].T, rows[:, :h], alpha=alpha, beta=beta)


def mirror_(out: Tensor) -> Tensor:
    """Complete in place what ``add_gram_`` has built, block by block.

    Args:
        out: Square matrix ``[d, d]`` from ``add_gram_``.

    Returns:
        The same matrix, symmetric.

    Example:
        >>> import torch
        >>> out = torch.empty(500, 500)
        >>> add_gram_(out, torch.ones(2, 500), beta=0.0)
        >>> bool((mirror_(out) == 2).all())
        True
    """
    d = len(out)
    if d > _HALVE_ABOVE:
        h = d // 2
        mirror_(out[:h, :h])
        mirror_(out[h:, h:])
        out[:h, h:] = out[h:, :h].T
    return out
