"""Who reads what: the shares of several processes in one training set.

Each process has a loader of its own; together they read the training set. A ``DistributedSampler``
deals one dataset out to all of them and repeats data where it does not come out even: the repeats
are dropped by the reader, not counted.
"""

from __future__ import annotations

import math
from typing import Any

from torch.utils.data import DistributedSampler

from laplace_debias.data.processes import processes

__all__ = ["agreed_size", "deals_out", "n_own"]


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
