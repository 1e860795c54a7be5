"""Where the data of a cross-fitted posterior come from: a dataset by index, or a stream.

Map-style: the positions that the loader's sampler yields are the pool, and drawn data are fetched
again by index. Stream: whatever else can be iterated, in one pass, which keeps only what its
reservoirs hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from laplace_debias.data.inputs import Batch, Inputs, Keys, concatenate, datum_shapes, take
from laplace_debias.data.loaders import in_order
from laplace_debias.data.map_style import MapStyle, is_map_style
from laplace_debias.data.processes import processes, together
from laplace_debias.data.roles import TrainingData

__all__ = ["Pool", "given_scores", "segments"]


def segments(
    batches: Iterable[Batch], sizes: Sequence[int], key: Keys, seen: int = 0
) -> Iterator[tuple[int, Inputs, Tensor]]:
    """Cut a stream of mini-batches into consecutive segments of given sizes.

    What comes after the last segment gets the number ``len(sizes)``.

    Args:
        batches: Mini-batches ``(X, y)``.
        sizes: Numbers of data in the segments.
        key: Key of the inputs in a mapping.
        seen: Number of data of the stream before these.

    Yields:
        Segment number, inputs and targets of pieces, in order.

    Example:
        >>> stream = [(torch.arange(3), torch.arange(3)), (torch.arange(3), torch.arange(3))]
        >>> [(i, y.tolist()) for i, _, y in segments(stream, [2, 2], "x")]
        [(0, [0, 1]), (1, [2]), (1, [0]), (2, [1, 2])]
    """
    bounds = torch.tensor([0, *sizes]).cumsum(0).tolist()
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

    Several processes have one pool: the k-th mini-batches of all of them, in the order of ranks,
    are its k-th. Each reads, keeps and fetches its own data; numbers and sizes are those of all.

    Args:
        data: The loader and how to read it.
        generator: Seeds the workers of a map-style loader, if any.
        keeps: Whether data of a stream are to be fetched again.

    Attributes:
        size: Number of data read so far, by all processes.
        n_read: Number of data that this one of several has read.
        first_size: Size of the first mini-batch of several processes together.
        ended: Whether there are no more.

    Example:
        >>> batches = [(torch.zeros(4, 1), torch.zeros(4)), (torch.ones(4, 1), torch.ones(4))]
        >>> pool = Pool(TrainingData(batches, None, 8, torch.device("cpu")))
        >>> [len(y) for _, y in pool.grow(3)], pool.size, pool.ended
        ([4], 4, False)
        >>> [(rows.tolist(), len(y)) for rows, (_, y) in pool.fetch(torch.tensor([2, 0]))]
        [([0, 1], 2)]
    """

    def __init__(
        self,
        data: TrainingData,
        generator: torch.Generator | None = None,
        *,
        keeps: bool = True,
    ) -> None:
        self.data, self.size, self.ended, self.keeps = data, 0, False, keeps
        self.first_size, self._group = 0, processes()
        if self._group is not None and generator is not None:
            # how often workers are seeded differs between processes, what is drawn must not
            generator = torch.Generator().manual_seed(generator.initial_seed())
        self.map = MapStyle(data.loader, None, generator) if is_map_style(data.loader) else None
        if self.map is None:
            self._stream: Iterator[Batch] | None = iter(data.read())
        elif self._group is None:
            self._stream = None
        else:  # mini-batch by mini-batch, as the others
            self._stream = iter(data.read(self.map.read())) if len(self.map) else iter(())
        self._kept: list[Batch] = []
        self._starts: list[int] = []
        self._own: list[Tensor] = []  # numbers of own data, of a map-style loader all of them
        self.n_read = 0
        self._numbered = False
        if self._group is not None:
            size = None if self.map is None else (len(self.map), self.map.batch_size)
            sizes = self._group.gather(size)
            if None not in sizes:  # all can be numbered before they are read
                self._own, self._numbered = [self._numbers(sizes)], True

    def first(self) -> Batch | None:
        """The first mini-batch of this process, before anything else is read; it comes again."""
        if self.map is not None and self._group is None:
            new = range(min(max(self.map.batch_size, 1), len(self.map)))
            return next(iter(self.data.read(self.map.read(new))), None) if new else None
        batch = next(self._stream, None) if self._stream is not None else None
        if batch is not None and self._stream is not None:
            self._stream = chain([batch], self._stream)
        return batch

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

    def _numbers(self, all_sizes: list[tuple[int, int]]) -> Tensor:
        """Numbers of a map-style loader's data, if the mini-batches of all processes take turns."""
        assert self._group is not None
        sizes = [[min(b, n - at) for at in range(0, n, max(b, 1))] for n, b in all_sizes]
        own, start = [torch.zeros(0, dtype=torch.long)], 0
        for turn in range(max(map(len, sizes))):
            for rank, parts in enumerate(sizes):
                m = parts[turn] if turn < len(parts) else 0
                if rank == self._group.rank:
                    own.append(torch.arange(start, start + m))
                start += m
        return torch.cat(own)

    def own(self) -> Tensor:
        """Numbers of this process's data, ascending, of which the first ``n_read`` were read."""
        if self._group is None:
            return torch.arange(self.size)
        self._own = [torch.cat([torch.zeros(0, dtype=torch.long), *self._own])]
        return self._own[0]

    def grow_together(self, size: int, use: Callable[[int, Batch], None], work: str) -> None:
        """Read on, as :meth:`grow` does, in step with all other processes.

        Mini-batches are taken as a whole.

        Args:
            size: Number of data of all processes.
            use: Called with every new mini-batch of this one, and the number of its first datum;
                what it raises, all raise.
            work: What that is, for messages.
        """
        assert self._group is not None and self._stream is not None
        while self.size < size and not self.ended:
            with together("reading its data"):
                batch = next(self._stream, None)
            n = 0 if batch is None else len(batch[1])
            sizes = self._group.gather(n)
            start = self.size + sum(sizes[: self._group.rank])
            self.first_size = self.first_size or sum(sizes)
            if batch is not None and self.map is None and self.keeps:
                self._starts.append(self.n_read)
                self._kept.append(batch)
            if not self._numbered:
                self._own.append(torch.arange(start, start + n))
            self.n_read += n
            self.size += sum(sizes)
            self.ended = sum(sizes) == 0
            with together(work):
                if batch is not None:
                    use(start, batch)

    def fetch(self, rows: Tensor) -> Iterator[tuple[Tensor, Batch]]:
        """Read data of the pool again; of several processes each reads its own.

        Args:
            rows: Their numbers ``[m]``; one may occur several times.

        Yields:
            Which of the ``rows`` a mini-batch holds, and the mini-batch.
        """
        if self._group is None:
            yield from self._fetch(rows)
            return
        rows, own = rows.cpu(), self.own()
        if not len(own):
            return
        at = torch.searchsorted(own, rows).clamp(max=len(own) - 1)
        mine = (own[at] == rows).nonzero().squeeze(1)
        if len(mine):
            for part, batch in self._fetch(at[mine]):
                yield mine[part], batch

    def _fetch(self, rows: Tensor) -> Iterator[tuple[Tensor, Batch]]:
        """Read data of this process again, by their numbers among these."""
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


def given_scores(pool: Pool, given: Tensor) -> Tensor:
    """Scores from training of the pool's data, of all processes, in its order.

    Args:
        pool: The pool of a map-style loader.
        given: One score for each datum of its dataset.

    Returns:
        Scores ``[n]``.

    Raises:
        ValueError: For a stream, or if the scores do not fit the dataset.
    """
    with together("looking up its scores"):
        if pool.map is None:
            raise ValueError(
                "Expected no `scores` with a stream, whose data have no positions, got some. "
                "Remedy: pass a DataLoader over a map-style dataset, or leave `scores` out."
            )
        n = len(pool.data.loader.dataset)
        if len(given) != n:
            raise ValueError(
                f"Expected one score for each of the {n} data of the dataset, got {len(given)}. "
                "Remedy: keep the scores in the order of the dataset."
            )
        scores = given.cpu()[torch.tensor(pool.map.positions, dtype=torch.long)]
    group = processes()
    if group is None:
        return scores
    numbers, parts = zip(*group.gather((pool.own(), scores)), strict=True)
    return in_order(list(numbers), list(parts))
