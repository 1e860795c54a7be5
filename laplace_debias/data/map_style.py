"""One epoch's order of a map-style loader, whose data can be fetched again by position."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from laplace_debias.data.loaders import n_own

__all__ = ["MapStyle", "is_map_style"]


def is_map_style(loader: Iterable[Any]) -> bool:
    """Whether drawn data can be fetched again by their position in a dataset.

    Args:
        loader: A loader, or any iterable of mini-batches.

    Returns:
        ``True`` for a ``DataLoader`` over a map-style dataset that makes mini-batches itself.

    Example:
        >>> is_map_style(DataLoader(range(4), batch_size=2)), is_map_style([])
        (True, False)
    """
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


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
        most = min(math.inf if limit is None else limit, n_own(loader))  # no datum twice
        self.positions: list[Any] = []  # whatever the sampler yields and the dataset takes
        self.batch_size = 0
        for batch in loader.batch_sampler or ():
            self.batch_size = self.batch_size or len(batch)
            self.positions += batch
            if len(self.positions) >= most:
                self.positions = self.positions[: int(most)]
                break

    def __len__(self) -> int:
        """Number of data in the pool."""
        return len(self.positions)

    def keep(self, limit: int) -> None:
        """Leave out all data but the first so many."""
        del self.positions[limit:]

    def first(self) -> Iterator[Any]:
        """The first mini-batch alone, if there is one; it comes again."""
        data = Subset(self.loader.dataset, self.positions[: self.batch_size])
        collate, own = self.loader.collate_fn, torch.Generator()  # the other one is not drawn from
        return iter(DataLoader(data, max(1, len(data)), collate_fn=collate, generator=own))

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
