"""Where the data of a cross-fitted posterior come from: a dataset by index, or a stream.

Map-style: the positions that the loader's sampler yields are the pool, and drawn data are fetched
again by index. Stream: whatever else can be iterated, in one pass, which keeps only what its
reservoirs hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from laplace_debias.data.inputs import Batch, Inputs, Keys, concatenate, datum_shapes, take
from laplace_debias.data.loaders import is_map_style
from laplace_debias.data.roles import TrainingData

__all__ = ["MapStyle", "Pool", "segments"]


class MapStyle:
    """One epoch's order of a map-style loader, readable by position.

    Args:
        loader: A ``DataLoader`` over a map-style dataset. Its sampler is asked for one epoch, so a
            shuffled loader gives a random pool and a sampler over a subset stays within it.
        limit: How many data the pool holds at most.
        generator: Seeds the workers that read, if any; the global one by default.

    Example:
        >>> pool = MapStyle(DataLoader(range(10), batch_size=4), limit=6)
        >>> len(pool), [batch.tolist() for batch in pool.read()]
        (6, [[0, 1, 2, 3], [4, 5]])
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        limit: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.loader, self.generator = loader, generator
        self.positions: list[Any] = []  # whatever the sampler yields and the dataset takes
        self.batch_size = 0
        for batch in loader.batch_sampler or ():
            self.batch_size = self.batch_size or len(batch)
            self.positions += batch
            if limit is not None and len(self.positions) >= limit:
                self.positions = self.positions[:limit]
                break

    def __len__(self) -> int:
        """Number of data in the pool."""
        return len(self.positions)

    def read(self, rows: Sequence[int] | None = None, at_once: int = 1) -> Iterator[Any]:
        """Read mini-batches of some rows of the pool, or of all, as the loader would.

        Args:
            rows: Rows of the pool, in the order wanted.
            at_once: How many mini-batches of the loader make one.

        Returns:
            An iterator over mini-batches.
        """
        positions = self.positions if rows is None else [self.positions[i] for i in rows]
        return iter(
            DataLoader(
                Subset(self.loader.dataset, positions),
                batch_size=at_once * self.batch_size,
                num_workers=self.loader.num_workers,
                collate_fn=self.loader.collate_fn,
                pin_memory=self.loader.pin_memory,
                generator=self.generator,
            )
        )


def segments(
    batches: Iterable[Batch], sizes: Sequence[int], key: Keys
) -> Iterator[tuple[int, Inputs, Tensor]]:
    """Cut a stream of mini-batches into consecutive segments of given sizes.

    What comes after the last segment gets the number ``len(sizes)``.

    Args:
        batches: Mini-batches ``(X, y)``.
        sizes: Numbers of data in the segments.
        key: Key of the inputs in a mapping.

    Yields:
        Segment number, inputs and targets of pieces, in order.

    Example:
        >>> stream = [(torch.arange(3), torch.arange(3)), (torch.arange(3), torch.arange(3))]
        >>> [(i, y.tolist()) for i, _, y in segments(stream, [2, 2], "x")]
        [(0, [0, 1]), (1, [2]), (1, [0]), (2, [1, 2])]
    """
    bounds, seen = torch.tensor([0, *sizes]).cumsum(0).tolist(), 0
    for X, y in batches:
        cuts = [0, *(b - seen for b in bounds[1:] if 0 < b - seen < len(y)), len(y)]
        for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
            number = sum(seen + start >= b for b in bounds[1:])
            rows = slice(start, stop)
            yield number, take(X, rows, key), y[rows]
        seen += len(y)


class Pool:
    """Data that were read once and can be fetched again by their number, more of them on demand.

    A map-style loader is asked for its order, and data are read again by position. A stream can be
    read but once: its data are kept.

    Args:
        data: The loader and how to read it.
        generator: Seeds the workers of a map-style loader, if any.

    Attributes:
        size: Number of data read so far.
        ended: Whether there are no more.

    Example:
        >>> batches = [(torch.zeros(4, 1), torch.zeros(4)), (torch.ones(4, 1), torch.ones(4))]
        >>> pool = Pool(TrainingData(batches, None, 8, torch.device("cpu")))
        >>> [len(y) for _, y in pool.grow(3)], pool.size, pool.ended
        ([4], 4, False)
        >>> [(rows.tolist(), len(y)) for rows, (_, y) in pool.fetch(torch.tensor([2, 0]))]
        [([0, 1], 2)]
    """

    def __init__(self, data: TrainingData, generator: torch.Generator | None = None) -> None:
        self.data, self.size, self.ended = data, 0, False
        self.map = MapStyle(data.loader, None, generator) if is_map_style(data.loader) else None
        self._stream = iter(data.read()) if self.map is None else None
        self._kept: list[Batch] = []
        self._starts: list[int] = []

    def grow(self, size: int) -> Iterator[Batch]:
        """Read on until the pool has at least so many data, or there are no more.

        Args:
            size: Number of data; a stream's last mini-batch is read as a whole.

        Yields:
            The new mini-batches.
        """
        if self.map is not None:
            new = range(self.size, min(size, len(self.map)))
            for X, y in self.data.read(self.map.read(new)) if new else ():
                self.size += len(y)
                yield X, y
            self.ended = self.size >= len(self.map)
            return
        while self.size < size and not self.ended:
            batch = next(self._stream, None) if self._stream is not None else None
            if batch is None:
                self.ended = True
                return
            self._starts.append(self.size)
            self._kept.append(batch)
            self.size += len(batch[1])
            yield batch

    def fetch(self, rows: Tensor) -> Iterator[tuple[Tensor, Batch]]:
        """Read data of the pool again.

        Args:
            rows: Their numbers ``[m]``; one may occur several times.

        Yields:
            Which of the ``rows`` a mini-batch holds, and the mini-batch.
        """
        if self.map is not None:
            start = 0
            for X, y in self.data.read(self.map.read(rows.tolist())):
                yield torch.arange(start, start + len(y)), (X, y)
                start += len(y)
            return
        key, size = self.data.key_x, max(len(y) for _, y in self._kept)
        starts = torch.tensor(self._starts)
        alike: dict[object, list[int]] = {}  # mini-batches may be padded to different lengths
        which = torch.searchsorted(starts, rows.cpu(), right=True) - 1
        for i, b in enumerate(which.tolist()):
            alike.setdefault(datum_shapes(self._kept[b][0]), []).append(i)
        for numbers in alike.values():
            for part in torch.tensor(numbers).split(size):
                found = [(int(which[i]), int(rows[i] - starts[which[i]])) for i in part]
                X = concatenate(
                    [take(self._kept[b][0], slice(j, j + 1), key) for b, j in found], key
                )
                yield part, (X, torch.cat([self._kept[b][1][j : j + 1] for b, j in found]))
