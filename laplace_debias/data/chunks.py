"""Data of a quadratic as re-iterable chunks: the whole training set is just a larger batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from laplace_debias.data.inputs import Batch, Inputs, Keys, concatenate, size_of, take

__all__ = ["Chunk", "Chunks", "gather", "in_pieces", "partition"]

Chunk = Batch
"""Inputs and targets of the data that go through the model at once."""


class Chunks:
    """Data as pairs ``(X, y)`` of at most ``chunk_size`` rows that can be iterated again and again.

    Args:
        data: A pair ``(X, y)`` of one mini-batch, or a re-iterable of such pairs (a list, a
            ``DataLoader``). A loader may shuffle, but it has to give the same data every time.
        chunk_size: Largest number of data that go through the model at once. ``None`` leaves the
            chunks as they come.

    Raises:
        TypeError: If ``data`` can be iterated only once.
        ValueError: If there are no data, or inputs and targets differ in number.

    Example:
        >>> chunks = Chunks((torch.zeros(5, 2), torch.zeros(5)), chunk_size=2)
        >>> [len(y) for _, y in chunks], chunks.n_data
        ([2, 2, 1], 5)
    """

    def __init__(self, data: Chunk | Iterable[Chunk], chunk_size: int | None = None):
        """Check the data once, by one pass over them."""
        if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Tensor):
            data = [data]
        if isinstance(data, Iterator):
            raise TypeError(
                f"Expected data that can be iterated many times, got the iterator "
                f"{type(data).__name__}. Remedy: pass a pair (X, y), a list of pairs or a "
                "DataLoader."
            )
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(
                f"Expected chunk_size >= 1, got {chunk_size}. "
                "Remedy: leave it out, or pass e.g. 256."
            )
        self._data = data
        self._chunk_size = chunk_size
        self.n_data = 0
        for X, y in data:
            if size_of(X) != len(y):
                raise ValueError(
                    f"Expected as many targets as inputs, got {size_of(X)} inputs and {len(y)} "
                    "targets. Remedy: pass pairs (X, y) that agree in their first dimension."
                )
            self.n_data += len(y)
        if self.n_data == 0:
            raise ValueError(
                "Expected at least one datum, got none. Remedy: pass a non-empty (X, y)."
            )

    def __iter__(self) -> Iterator[Chunk]:
        """Yield the chunks."""
        for X, y in self._data:
            step = self._chunk_size or len(y)
            for start in range(0, len(y), step):
                rows = slice(start, start + step)
                yield take(X, rows), y[rows]


def partition(
    data: Chunk | Iterable[Chunk],
    batch_size: int,
    *,
    generator: torch.Generator | None = None,
    n_batches: int | None = None,
) -> list[Chunk]:
    """Shuffle the data and cut them into disjoint mini-batches of equal size.

    Data that do not fill a last mini-batch are left out, so that averages over the mini-batches
    are averages over the data they hold.

    Args:
        data: A pair ``(X, y)``, or a re-iterable of such pairs, with tensor inputs.
        batch_size: Number of data per mini-batch.
        generator: Where the permutation comes from; ``None`` keeps the order of the data.
        n_batches: How many mini-batches at most.

    Returns:
        A list of pairs ``(X, y)`` with ``batch_size`` rows each.

    Raises:
        ValueError: If there are fewer data than ``batch_size``.

    Example:
        >>> batches = partition((torch.arange(7), torch.arange(7)), 3)
        >>> [y.tolist() for _, y in batches]
        [[0, 1, 2], [3, 4, 5]]
    """
    X, y = gather(data)
    total = len(y) // batch_size if batch_size > 0 else 0
    if total == 0:
        raise ValueError(
            f"Expected 1 <= batch_size <= {len(y)} (the number of data), got {batch_size}. "
            "Remedy: pass a batch_size in this range, or more data."
        )
    order = (
        torch.arange(len(y))
        if generator is None
        else torch.randperm(len(y), generator=generator, device=generator.device)
    )
    total = total if n_batches is None else min(total, n_batches)
    rows = order[: total * batch_size].to(y.device).split(batch_size)
    return [(take(X, index), y[index]) for index in rows]


def gather(data: Chunk | Iterable[Chunk]) -> Chunk:
    """Concatenate all chunks to one pair ``(X, y)``.

    Args:
        data: A pair ``(X, y)``, or a re-iterable of such pairs.

    Returns:
        One pair with all the data.

    Example:
        >>> X, y = gather([(torch.zeros(2, 3), torch.zeros(2)), (torch.ones(1, 3), torch.ones(1))])
        >>> X.shape, y.shape
        (torch.Size([3, 3]), torch.Size([3]))
    """
    chunks = list(Chunks(data))
    return concatenate([X for X, _ in chunks]), torch.cat([y for _, y in chunks])


def in_pieces(
    x: Inputs, targets: Any, weights: Tensor | None, key: Keys, n: int, most: int
) -> Iterator[tuple[Inputs, Any, Tensor | None]]:
    """Cut n data into pieces of at most so many.

    Args:
        x: Inputs of n data.
        targets: Their targets, or ``None``.
        weights: Their weights, or ``None``.
        key: See :func:`take`.
        n: Number of data.
        most: Size of the pieces.

    Yields:
        Inputs, targets and weights of a piece.

    Example:
        >>> [len(x) for x, _, _ in in_pieces(torch.ones(5, 1), None, None, "x", 5, 2)]
        [2, 2, 1]
    """
    for start in range(0, n, most):
        at = slice(start, min(start + most, n))
        y, w = (part if part is None else part[at] for part in (targets, weights))
        yield take(x, at, key), y, w
