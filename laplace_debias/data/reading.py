"""Which mini-batches serve which role, how many data each holds, and what N is."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler

__all__ = [
    "CURVATURES",
    "DIRECTIONS",
    "as_batches",
    "check_targets",
    "role_batches",
    "training_size",
    "unpack",
    "warn_if_sequential",
]

DIRECTIONS = "directions"
"""Role of the data whose factors' eigenvectors are kept."""
CURVATURES = "curvatures"
"""Role of the data that measure the curvature along these eigenvectors."""


def role_batches(
    train_loader: Iterable[Any], curvature_loader: Iterable[Any] | None, two_roles: bool
) -> Iterator[tuple[str, Any]]:
    """Hand out mini-batches with their roles, lazily.

    With one loader and two roles its first mini-batch gives the directions and its second the
    curvatures, from one pass, so that they share no datum. With two loaders, all of the first
    gives the directions and all of the second the curvatures. With one role, everything in the
    loader gives both.

    Args:
        train_loader: A loader, any iterable of mini-batches, or one mini-batch ``(X, y)``.
        curvature_loader: The same for the curvatures, or ``None``.
        two_roles: Whether curvatures are measured on data of their own.

    Yields:
        Pairs of role and mini-batch.

    Raises:
        ValueError: If a loader is empty, or if one loader has to serve two roles and has fewer
            than two mini-batches.

    Example:
        >>> [role for role, _ in role_batches([("X0", 0), ("X1", 1), ("X2", 2)], None, True)]
        ['directions', 'curvatures']
    """
    if curvature_loader is not None:
        if curvature_loader is train_loader:
            warnings.warn(
                "The same loader serves directions and curvatures, so the curvatures are measured "
                "on the very data that chose the directions: this is plain K-FAC, not debiased. "
                "Pass a loader over other data as `curvature_loader`.",
                stacklevel=3,
            )
        yield from _all_of(train_loader, DIRECTIONS, "train_loader")
        yield from _all_of(curvature_loader, CURVATURES, "curvature_loader")
    elif not two_roles:
        yield from _all_of(train_loader, DIRECTIONS, "train_loader")
    else:
        warn_if_sequential(train_loader)
        batches = iter(as_batches(train_loader))
        for count, role in enumerate((DIRECTIONS, CURVATURES)):
            try:
                yield role, next(batches)
            except StopIteration:
                raise ValueError(
                    "Expected a loader with at least two mini-batches (the first for the "
                    f"directions, the second for the curvatures), got {count}. Remedy: use a "
                    "smaller `batch_size`, or pass a second loader as `curvature_loader`."
                ) from None


def warn_if_sequential(loader: Iterable[Any]) -> None:
    """Warn about a loader that reads its data in order, where only its first ones are used.

    Args:
        loader: A loader, or any iterable.

    Example:
        >>> warn_if_sequential([])
    """
    if isinstance(getattr(loader, "sampler", None), SequentialSampler):
        warnings.warn(
            "The loader reads its data in order (SequentialSampler), and only its first "
            "mini-batches are used: on sorted data they do not represent the training set. Build "
            "it with `DataLoader(..., shuffle=True)`.",
            stacklevel=4,
        )


def training_size(
    train_loader: Iterable[Any], curvature_loader: Iterable[Any] | None, n_data: int | None
) -> int:
    """Number N of training data that the mini-batches stand for.

    Args:
        train_loader: Loader of the directions.
        curvature_loader: Loader of the curvatures, or ``None``.
        n_data: N as the user gave it, or ``None`` for ``len(train_loader.dataset)``.

    Returns:
        N.

    Raises:
        ValueError: If N is not given and cannot be read off, or is not a positive whole number.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> training_size(DataLoader(range(10), batch_size=2), None, None)
        10
    """
    if n_data is not None:
        if isinstance(n_data, bool) or int(n_data) != n_data or n_data < 1:
            raise ValueError(
                f"Expected `n_data` to be a positive whole number, got {n_data!r}. Remedy: pass "
                "the number of training data."
            )
        return int(n_data)
    remedy = "Remedy: pass the number of training data as `n_data`."
    dataset = getattr(train_loader, "dataset", None)
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
        kind = "no `.dataset`" if dataset is None else f"a {type(dataset).__name__} without length"
        raise ValueError(
            f"Expected a loader whose dataset has a length, or `n_data`; got {kind} and "
            f"`n_data=None`. {remedy}"
        ) from None


def unpack(
    batch: Any, device: torch.device, dict_key_y: str
) -> tuple[Tensor | MutableMapping[str, Any], Tensor]:
    """Inputs and targets of a mini-batch, on the model's device.

    Args:
        batch: ``(X, y)``, or a mapping that holds the targets under ``dict_key_y``.
        device: Device of the model.
        dict_key_y: Key of the targets in a mapping.

    Returns:
        ``X`` (the mapping itself for mappings, as laplace-torch hands it to the model) and ``y``.

    Raises:
        ValueError: If the mini-batch is neither, or its inputs hold NaN or Inf.

    Example:
        >>> X, y = unpack((torch.ones(2, 3), torch.zeros(2)), torch.device("cpu"), "labels")
        >>> X.shape, y.shape
        (torch.Size([2, 3]), torch.Size([2]))
    """
    if isinstance(batch, MutableMapping):
        if dict_key_y not in batch:
            raise ValueError(
                f"Expected the targets under the key '{dict_key_y}' (`dict_key_y`), got the keys "
                f"{sorted(map(str, batch))}. Remedy: pass `dict_key_y=` to `Laplace`."
            )
        X, y = batch, batch[dict_key_y].to(device)
        inputs = [value for value in batch.values() if isinstance(value, Tensor)]
    else:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(
                "Expected mini-batches `(X, y)` or mappings, got "
                f"{type(batch).__name__}. Remedy: let the loader's `collate_fn` return a pair."
            )
        for part in batch:
            if not isinstance(part, Tensor):
                raise ValueError(
                    f"Expected mini-batches of tensors, got {type(part).__name__}. Remedy: "
                    "`torch.as_tensor(...)`, or a `DataLoader`, which makes tensors."
                )
        X, y = batch[0].to(device), batch[1].to(device)
        inputs = [X]
    for value in inputs:
        if value.is_floating_point() and not torch.isfinite(value).all():
            bad = int((~torch.isfinite(value)).sum())
            raise ValueError(
                f"Expected finite inputs, got {bad} NaN or Inf of {value.numel()} entries in a "
                "mini-batch. Remedy: clean the data, or drop these rows."
            )
    return X, y


def check_targets(y: Tensor, output_shape: torch.Size, likelihood: str) -> None:
    """Raise unless the targets fit the model's outputs.

    Args:
        y: Targets of a mini-batch of m data.
        output_shape: Shape of the model's output for one datum or more, ``[., ..., C]``.
        likelihood: ``"classification"`` or ``"regression"``.

    Raises:
        ValueError: If shape, dtype or class indices are wrong.

    Example:
        >>> check_targets(torch.tensor([0, 2]), torch.Size([1, 3]), "classification")
    """
    C = output_shape[-1]
    if output_shape[0] not in (1, len(y)):
        raise ValueError(
            f"Expected {output_shape[0]} targets for as many data, got {len(y)}. Remedy: pass one "
            "target per datum."
        )
    if likelihood == "regression":
        if y.shape[1:] != output_shape[1:]:
            raise ValueError(
                f"Expected regression targets of shape {['m', *output_shape[1:]]}, as the model's "
                f"outputs, got {list(y.shape)}. Remedy: reshape the targets, e.g. "
                "`y.unsqueeze(-1)` for a single output."
            )
        if not torch.isfinite(y).all():
            raise ValueError(
                "Expected finite regression targets, got NaN or Inf. Remedy: drop these rows."
            )
        return
    if y.is_floating_point() or y.is_complex() or y.shape[1:] != output_shape[1:-1]:
        raise ValueError(
            f"Expected class indices of an integer dtype and shape {['m', *output_shape[1:-1]]}, "
            f"got {y.dtype} of shape {list(y.shape)}. Remedy: for one-hot targets pass "
            "`y.argmax(-1)`, for floats `y.long()`."
        )
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= C:
        raise ValueError(
            f"Expected class indices in [0, {C - 1}] for a model with {C} outputs, got values in "
            f"[{low}, {high}]. Remedy: re-index the classes from 0, or widen the last layer."
        )


def as_batches(loader: Iterable[Any]) -> Iterable[Any]:
    """Take a bare mini-batch for a loader of one.

    Args:
        loader: A loader, any iterable of mini-batches, or one mini-batch.

    Returns:
        The loader itself, or a list of the one mini-batch.

    Example:
        >>> len(as_batches((torch.zeros(5, 2), torch.zeros(5))))
        1
    """
    if isinstance(loader, MutableMapping):
        return [loader]
    if isinstance(loader, (tuple, list)) and len(loader) == 2:
        if all(isinstance(part, Tensor) for part in loader):
            return [loader]
    return loader


def _all_of(loader: Iterable[Any], role: str, name: str) -> Iterator[tuple[str, Any]]:
    """All mini-batches of a loader in one role; an error if there is none."""
    empty = True
    for batch in as_batches(loader):
        empty = False
        yield role, batch
    if empty:
        raise ValueError(
            f"Expected at least one mini-batch in `{name}`, got an empty loader. Remedy: check "
            "its dataset, and `drop_last` with a `batch_size` larger than the dataset."
        )
