"""Which data stand for the training set, in which role, and how many N they stand for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from laplace_debias.data.inputs import Batch, Inputs, Keys
from laplace_debias.data.loaders import (
    as_batches,
    deals_out,
    draws_with_replacement,
    is_main,
    warn_if_replacing,
    warn_if_sequential,
)
from laplace_debias.data.processes import processes, together
from laplace_debias.data.reading import read
from laplace_debias.data.targets import WeightedTargets

__all__ = ["CURVATURES", "DIRECTIONS", "TrainingData", "agreed_size", "training_size"]

DIRECTIONS = "directions"
"""Role of the data whose factors' eigenvectors are kept."""
CURVATURES = "curvatures"
"""Role of the data that measure the curvature along these eigenvectors."""


@dataclass(frozen=True)
class TrainingData:
    """The loaders of a fit, and how to read them.

    Attributes:
        loader: A loader, any iterable of mini-batches, or one mini-batch.
        curvature_loader: The same for the curvatures alone, or ``None``.
        n_data: Number N of training data that they stand for.
        device: Where the network is.
        key_x: Key of the inputs in mini-batches that are mappings, or of all that run over data.
        key_y: Key of the targets in them.
        key_w: Key of the sample weights in them, if they have any.
        cast: Changes the type of inputs and targets, if need be.
        check: Called once, with the inputs of the first mini-batch that is read.
    """

    loader: Any
    curvature_loader: Any
    n_data: int
    device: torch.device
    key_x: Keys = "input_ids"
    key_y: str = "labels"
    cast: Callable[[Any], Any] | None = None
    check: Callable[[Inputs], None] | None = None
    key_w: str = "sample_weight"
    _checked: list[bool] = field(default_factory=list, repr=False)

    def read(
        self, batches: Iterable[Any] | None = None, name: str = "train_loader"
    ) -> Iterator[Batch]:
        """Inputs and targets of mini-batches on the device, checked; by default the loader's.

        Targets are :class:`~laplace_debias.data.targets.WeightedTargets` if a mini-batch has
        sample weights; their length and their slices are those of plain ones.
        """
        batches = self.loader if batches is None else batches
        for X, y in read(batches, self.device, self.key_y, name=name, key_w=self.key_w):
            assert y is not None  # the reader refuses mini-batches without targets
            if self.cast is not None:
                given: Any = y
                weighty = isinstance(given, WeightedTargets)
                X, y = self.cast(X), given.mapped(self.cast) if weighty else self.cast(y)
            if self.check is not None and not self._checked:
                self.check(X)
                self._checked.append(True)
            yield X, y

    def n_batches(self) -> int | None:
        """Number of mini-batches of all loaders, ``None`` where one does not tell."""
        loaders = [part for part in (self.loader, self.curvature_loader) if part is not None]
        if not all(hasattr(part, "__len__") for part in loaders):
            return None
        try:
            return sum(len(cast(Sized, as_batches(part))) for part in loaders)
        except TypeError:  # the length of a loader over an iterable dataset raises
            return None

    def in_roles(self) -> Iterator[tuple[str, Batch]]:
        """Hand out mini-batches with their roles, lazily.

        With one loader its first mini-batch gives the directions and its second the curvatures,
        from one pass, so that they share no datum. With two loaders, all of the first gives the
        directions and all of the second the curvatures.

        Yields:
            Pairs of role and mini-batch.

        Raises:
            ValueError: If a loader is empty, or the only one has fewer than two mini-batches.

        Example:
            >>> batches = [(torch.zeros(2, 1), torch.zeros(2)) for _ in range(3)]
            >>> data = TrainingData(batches, None, 6, torch.device("cpu"))
            >>> [role for role, _ in data.in_roles()]
            ['directions', 'curvatures']
        """
        if self.curvature_loader is not None:
            if self.curvature_loader is self.loader and is_main():
                warnings.warn(
                    "The same loader serves directions and curvatures, so the curvatures are "
                    "measured on the very data that chose the directions: this is plain K-FAC, not "
                    "debiased. Pass a loader over other data as `curvature_loader`.",
                    stacklevel=4,
                )
            yield from ((DIRECTIONS, batch) for batch in self.read())
            second = self.read(self.curvature_loader, "curvature_loader")
            yield from ((CURVATURES, batch) for batch in second)
            return
        warn_if_sequential(self.loader)
        warn_if_replacing(self.loader)
        batches = self.read()
        for count, role in enumerate((DIRECTIONS, CURVATURES)):
            batch = next(batches, None)
            if batch is None and processes() is not None:
                return  # a small share; the others may have more
            if batch is None:
                raise ValueError(
                    "Expected a loader with at least two mini-batches (the first for the "
                    f"directions, the second for the curvatures), got {count}. Remedy: use a "
                    "smaller `batch_size`, or pass a second loader as `curvature_loader`."
                )
            yield role, batch

    def check_seen(self, counts: dict[str, int], *, disjoint: bool) -> None:
        """Raise if more data were seen than there are training data, or none at all.

        A loader that draws with replacement may see a datum several times, so nothing follows from
        its number of data.

        Args:
            counts: Numbers of data by role.
            disjoint: Whether the roles are known to share no datum.

        Raises:
            ValueError: If the roles hold more data (together if disjoint, else one of them) than N,
                or none.

        Example:
            >>> data = TrainingData([], None, 6, torch.device("cpu"))
            >>> data.check_seen({"directions": 6}, disjoint=True)
        """
        if not any(counts.values()):
            raise ValueError(
                "Expected at least one labelled datum in `train_loader`, got an empty loader. "
                "Remedy: check its dataset, and `drop_last` with a large `batch_size`."
            )
        if draws_with_replacement(self.loader) or draws_with_replacement(self.curvature_loader):
            return
        seen = sum(counts.values()) if disjoint else max(counts.values())
        if seen > self.n_data:
            raise ValueError(
                f"Expected `n_data` of at least {seen}, the number of data seen ({counts}), got "
                f"{self.n_data}. Remedy: pass the number of data in the whole training set as "
                "`n_data`."
            )


def training_size(
    train_loader: Iterable[Any], curvature_loader: Iterable[Any] | None, n_data: int | None
) -> int:
    """Number N of training data that the mini-batches (of all processes) stand for.

    Args:
        train_loader: Loader of the directions.
        curvature_loader: Loader of the curvatures, or ``None``.
        n_data: N as the user gave it, or ``None`` for ``len(train_loader.dataset)``, which several
            processes add up unless a ``DistributedSampler`` deals one dataset out to them.

    Returns:
        N.

    Raises:
        ValueError: If N is not given and cannot be read off, or is not a positive whole number.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> training_size(DataLoader(range(10), batch_size=2), None, None)
        10
    """
    with together("reading off its number of data"):
        own = _own_size(train_loader, curvature_loader, n_data)
    return agreed_size(own, whole=n_data is not None or deals_out(train_loader))


def _own_size(
    train_loader: Iterable[Any], curvature_loader: Iterable[Any] | None, n_data: int | None
) -> int:
    """The same, of one process."""
    if n_data is not None:
        if isinstance(n_data, bool) or int(n_data) != n_data or n_data < 1:
            raise ValueError(
                f"Expected `n_data` to be a positive whole number, got {n_data!r}. Remedy: pass "
                "the number of training data."
            )
        return int(n_data)
    remedy = "Remedy: pass the number of training data as `n_data`."
    dataset: Any = getattr(train_loader, "dataset", None)
    if curvature_loader is not None and getattr(curvature_loader, "dataset", None) is not dataset:
        raise ValueError(
            "Expected `n_data`, because the two loaders read different datasets and neither need "
            f"be the whole training set; got `n_data=None`. {remedy}"
        )
    try:
        return len(dataset)
    except TypeError:
        if isinstance(train_loader, Dataset):
            raise ValueError(
                f"Expected a loader of mini-batches, got the dataset {type(train_loader).__name__} "
                "itself. Remedy: `DataLoader(dataset, batch_size=..., shuffle=True)`."
            ) from None
        if hasattr(train_loader, "shape"):
            raise ValueError(
                f"Expected a loader of mini-batches (x, y), got a {type(train_loader).__name__} of "
                f"shape {list(train_loader.shape)}. Remedy: `DataLoader(TensorDataset(X, y), "
                "batch_size=..., shuffle=True)`, with X and y as tensors."
            ) from None
        kind = f"a {type(dataset).__name__} without length"
        if dataset is None:
            kind = f"a {type(train_loader).__name__} without `.dataset`"
        raise ValueError(
            f"Expected a loader whose dataset has a length, or `n_data`; got {kind} and "
            f"`n_data=None`. {remedy}"
        ) from None


def agreed_size(n_data: int, *, whole: bool) -> int:
    """Number N of training data of all processes together.

    Args:
        n_data: What this process knows.
        whole: Whether that is the whole training set (the user said so, or a sampler deals it
            out), or the process's share of it.

    Returns:
        N: what all of them know, or the sum of their shares.

    Raises:
        ValueError: If they do not agree.

    Example:
        >>> agreed_size(100, whole=False)
        100
    """
    group = processes()
    if group is None:
        return n_data
    known = group.gather((n_data, whole))
    if not any(is_whole for _, is_whole in known):
        return sum(n for n, _ in known)
    if len(set(known)) > 1:
        raise ValueError(
            "Expected the same `n_data` (or datasets dealt out by a `DistributedSampler`) in every "
            f"process, got (number, whether of the whole training set) by rank: {known}. Remedy: "
            "pass the size of the whole training set as `n_data` everywhere."
        )
    return n_data
