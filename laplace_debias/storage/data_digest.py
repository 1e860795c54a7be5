"""A digest of data: of every datum, whatever the order in which a loader shuffles them.

Which data a loader reads matters, how it cuts them into mini-batches does not.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, Subset

from laplace_debias.data.inputs import tensor_bytes
from laplace_debias.data.loaders import as_batches
from laplace_debias.data.map_style import is_map_style

__all__ = ["data_hash"]

_N_CHECKED = 64  # data that are read twice
Reader = Callable[[], Iterator[Any]]


def data_hash(data: Iterable[Any], name: str = "data") -> str:
    """Number of data and digest of all of them, whatever their mini-batches' size.

    A loader over a map-style dataset that shuffles is read in the order of its dataset, everything
    else as it comes. Some data are read twice, to find out whether they are always the same.
    Reading changes neither the global random numbers nor the generators of a loader.

    Args:
        data: A loader, any iterable of mini-batches that can be read again, or one mini-batch.
        name: What to call the data in errors.

    Returns:
        E.g. ``"60 data, 0123456789abcdef"``.

    Raises:
        ValueError: If data differ from reading to reading, or can be read only once.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> X, y = torch.arange(6.0).view(3, 2), torch.arange(3)
        >>> data_hash((X, y)) == data_hash(DataLoader(TensorDataset(X, y), 2, shuffle=True))
        True
    """
    remedy = (
        "Remedy: pass `data_id=`, a string that stands for the data (change it when they "
        "change), or read them"
    )
    if isinstance(data, Iterator):
        raise ValueError(
            f"Expected {name!r} to be data that can be read again, got the iterator "
            f"{type(data).__name__}. {remedy} through a list or a DataLoader."
        )
    with _randomness_kept(data):
        read, sample = _readers(data, name, remedy)
        if _digest(sample(), name) != _digest(sample(), name):
            raise ValueError(
                f"Expected {name!r} to be the same data whenever they are read, got others on a "
                f"second reading, as under random augmentation. {remedy} without randomness."
            )
        n, digest = _digest(read(), name)
    return f"{n} data, {digest}"


def _readers(data: Iterable[Any], name: str, remedy: str) -> tuple[Reader, Reader]:
    """Functions that read all mini-batches, and some of them."""
    if not is_map_style(data):
        batches = as_batches(data, labelled=False, name=name)
        return lambda: iter(batches), lambda: islice(batches, 1)
    assert isinstance(data, DataLoader)
    one, two = ([i for batch in data.batch_sampler or () for i in batch] for _ in range(2))
    # two shuffles of few data may agree by chance, so the sampler is asked as well
    if one != two or isinstance(data.sampler, RandomSampler):
        one, two = sorted(one), sorted(two)
    if one != two:
        raise ValueError(
            f"Expected {name!r} to hold the same data in every epoch, got a loader whose sampler "
            f"chooses others each time. {remedy} by a sampler that takes all of them."
        )
    step = max(1, len(one) // _N_CHECKED)
    return (
        lambda: iter(_in_order(data, one, data.num_workers)),
        lambda: iter(_in_order(data, one[::step][:_N_CHECKED], 0)),
    )


def _in_order(loader: DataLoader[Any], positions: list[Any], num_workers: int) -> DataLoader[Any]:
    """The data at some positions of a loader's dataset, as it would collate them."""
    return DataLoader(
        Subset(loader.dataset, positions),
        batch_size=loader.batch_size or _N_CHECKED,
        num_workers=num_workers,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if num_workers else None,
    )


def _digest(batches: Iterable[Any], name: str) -> tuple[int, str]:
    """Number of data in mini-batches, and a digest that does not depend on the batch size."""
    parts: dict[str, tuple[Any, str]] = {}  # of each part of a mini-batch: digest, last row's type
    n = 0

    def add(part: Any, place: str) -> int | None:
        """Add a part of a mini-batch; return its number of rows, if it has rows."""
        if isinstance(part, np.ndarray):
            part = torch.from_numpy(np.ascontiguousarray(part))
        if isinstance(part, Mapping):
            rows = [add(value, f"{place}/{key}") for key, value in part.items()]
            return next((row for row in rows if row is not None), None)
        if isinstance(part, (list, tuple)):
            plain = all(isinstance(value, (str, bytes, int, float, type(None))) for value in part)
            rows = [add(value, place if plain else f"{place}/{i}") for i, value in enumerate(part)]
            return next((row for row in rows if row is not None), len(part) if plain else None)
        if not isinstance(part, (Tensor, str, bytes, int, float, type(None))):
            raise ValueError(
                f"Expected mini-batches of tensors, numbers and text in {name!r}, got "
                f"{type(part).__name__}. Remedy: let `collate_fn` make tensors, or pass `data_id=`."
            )
        digest, last = parts.get(place, (hashlib.sha256(), ""))
        if isinstance(part, Tensor):
            kind, content = f"{part.dtype} {tuple(part.shape[1:])}", tensor_bytes(part)
        else:
            kind, content = type(part).__name__, f"{part!r};".encode()
        if kind != last:  # not for each row, lest the batch size counts
            digest.update(kind.encode())
        digest.update(content)
        parts[place] = digest, kind
        return len(part) if isinstance(part, Tensor) and part.ndim else None

    for batch in batches:
        n += add(batch, "") or 0
    whole = hashlib.sha256()
    for place in sorted(parts):
        whole.update(f"{place} {parts[place][0].hexdigest()}".encode())
    return n, whole.hexdigest()[:16]


@contextmanager
def _randomness_kept(data: Any) -> Iterator[None]:
    """Leave the global random states, and the generators of a loader, as they were."""
    owners, wrapped = [], data
    while wrapped is not None:  # a loader, its dataset, the dataset of which that is a subset
        owners += [wrapped, getattr(wrapped, "batch_sampler", None)]
        wrapped = getattr(wrapped, "dataset", None)
    owners += [getattr(owner, "sampler", None) for owner in owners]
    generators = {
        id(value): value
        for owner in owners
        for value in getattr(owner, "__dict__", {}).values()
        if isinstance(value, torch.Generator)
    }
    states = [(generator, generator.get_state()) for generator in generators.values()]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in states:
            generator.set_state(state)
