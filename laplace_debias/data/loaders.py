"""What a loader is: one mini-batch, an order, a share of several processes; bars along it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    DistributedSampler,
    SequentialSampler,
)
from tqdm import tqdm  # the automatic one iterates a loader twice, and so moves its random numbers

__all__ = [
    "DELAY",
    "as_batches",
    "bar",
    "deals_out",
    "described",
    "draws_with_replacement",
    "in_order",
    "is_main",
    "n_own",
    "warn_if_replacing",
    "warn_if_sequential",
]


DELAY = 3.0
"""Seconds after which a bar appears that nobody asked for."""


def deals_out(loader: Any) -> bool:
    """Whether a loader reads its process's share of a dataset that all processes have.

    Args:
        loader: A loader, or anything else.

    Returns:
        True if its sampler knows ``num_replicas``, as ``DistributedSampler`` does.

    Example:
        >>> deals_out([])
        False
    """
    return getattr(getattr(loader, "sampler", None), "num_replicas", None) is not None


def n_own(loader: Any) -> float:
    """How many data of a loader are its own; those after them repeat others' data.

    Args:
        loader: A loader, or anything else.

    Returns:
        A number of data; infinite without a ``DistributedSampler`` that repeats data.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> data = range(5)
        >>> samplers = [DistributedSampler(data, 3, rank) for rank in range(3)]
        >>> [n_own(DataLoader(data, 2, sampler=sampler)) for sampler in samplers]
        [2, 2, 1]
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return math.inf
    n, replicas = len(sampler.dataset), sampler.num_replicas  # type: ignore[arg-type]  # map-style
    return len(range(sampler.rank, n, replicas))  # every `replicas`-th of n, from `rank` on


def described(value: Any) -> str:
    """Say what something is, for error messages.

    Args:
        value: Anything.

    Example:
        >>> described([1, 2.0])
        'a list of 2 (int, float)'
    """
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        kinds = ", ".join(type(part).__name__ for part in value[:3])
        return f"a {type(value).__name__} of {len(value)} ({kinds}{', ...' * (len(value) > 3)})"
    return type(value).__name__


def as_batches(
    loader: Iterable[Any], *, labelled: bool = True, name: str = "loader", triples: bool = False
) -> Iterable[Any]:
    """Take a bare mini-batch for a loader of one.

    Args:
        loader: A loader, any iterable of mini-batches, or one mini-batch: a mapping, or a pair
            ``(X, y)``, where ``X`` may be a tuple or mapping. Where targets are not needed also a
            tensor ``X``; a *list* of two tensors then holds two mini-batches of inputs, unless
            their data differ in shape.
        labelled: Whether mini-batches must have targets.
        name: What error messages call the loader.
        triples: Whether ``(X, y, w)`` is one mini-batch as well.

    Returns:
        The loader itself, or a list of the one mini-batch.

    Raises:
        ValueError: If it cannot be iterated, or holds no targets where it must.

    Example:
        >>> import torch
        >>> len(as_batches((torch.zeros(5, 2), torch.zeros(5))))
        1
    """
    if isinstance(loader, MutableMapping):
        return [loader]
    if isinstance(loader, Tensor):
        if labelled:
            raise ValueError(
                f"Expected mini-batches with targets in `{name}`, got {described(loader)}. "
                "Remedy: pass `(X, y)`, or a loader of such pairs."
            )
        return [loader]
    if triples and isinstance(loader, (tuple, list)) and len(loader) == 3:
        if all(isinstance(part, Tensor) for part in loader[1:]) and loader[2].ndim == 1:
            return [loader]
    if isinstance(loader, (tuple, list)) and len(loader) == 2 and isinstance(loader[1], Tensor):
        X, y = loader
        if isinstance(X, (tuple, list, MutableMapping)):
            return [loader]
        if isinstance(X, Tensor):
            two = not labelled and isinstance(loader, list) and X.shape[1:] == y.shape[1:]
            return loader if two else [loader]
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise ValueError(
            f"Expected a loader, an iterable of mini-batches or one mini-batch `(X, y)` as "
            f"`{name}`, got {described(loader)}. Remedy: `DataLoader(TensorDataset(X, y), ...)`."
        )
    return loader


def warn_if_sequential(loader: Iterable[Any]) -> None:
    """Warn about a loader that reads its data in order, where only its first ones are used.

    Args:
        loader: A loader, or any iterable.

    Example:
        >>> warn_if_sequential([])
    """
    if is_main() and isinstance(getattr(loader, "sampler", None), SequentialSampler):
        warnings.warn(
            "The loader reads its data in order (SequentialSampler), and only its first "
            "mini-batches are used: on sorted data they do not represent the training set. Build "
            "it with `DataLoader(..., shuffle=True)`.",
            stacklevel=5,
        )


def draws_with_replacement(loader: Any) -> bool:
    """Whether a loader's sampler may draw a datum several times.

    Args:
        loader: A loader, or anything else.

    Returns:
        What its sampler says of itself; ``False`` without one.

    Example:
        >>> draws_with_replacement([])
        False
    """
    return bool(getattr(getattr(loader, "sampler", None), "replacement", False))


def warn_if_replacing(loader: Iterable[Any]) -> None:
    """Warn about a loader whose mini-batches may share data, where they must not.

    Args:
        loader: A loader, or any iterable.

    Example:
        >>> warn_if_replacing([])
    """
    if is_main() and draws_with_replacement(loader):
        warnings.warn(
            "The loader draws with replacement, so that data which choose the directions may "
            "measure the curvatures as well: part of the bias stays. Build it with "
            "`DataLoader(..., shuffle=True)`, or pass disjoint data as `curvature_loader`.",
            stacklevel=5,
        )


def is_main() -> bool:
    """Whether this process speaks for all: rank 0, or the only one.

    Example:
        >>> is_main()
        True
    """
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def bar(
    batches: Any = None,
    title: str | None = None,
    *,
    shown: bool | None = None,
    total: int | None = None,
    unit: str = "it",
) -> tqdm:
    """Make a progress bar.

    Args:
        batches: What to run over; ``None`` to advance the bar by hand.
        title: What stands before it.
        shown: ``True`` shows it at once, ``False`` never; ``None`` after three seconds, and only
            on a terminal. Of several processes only rank 0 shows any.
        total: Number of steps, if ``batches`` does not tell.
        unit: What a step is.

    Returns:
        The bar, to be iterated or entered.

    Example:
        >>> list(bar([1, 2], shown=False))
        [1, 2]
    """
    shown = shown if is_main() else False
    if shown is None:
        return tqdm(batches, title, total, disable=None, delay=DELAY, unit=unit)
    return tqdm(batches, title, total, disable=not shown, unit=unit)


def in_order(numbers: list[Tensor], parts: list[Tensor]) -> Tensor:
    """Rows of several processes, in the order of their numbers.

    Args:
        numbers: Numbers of each process's rows.
        parts: The rows.

    Example:
        >>> in_order([torch.tensor([2]), torch.tensor([0, 1])], [torch.ones(1), torch.zeros(2)])
        tensor([0., 0., 1.])
    """
    return torch.cat(parts)[torch.cat(numbers).argsort()]
