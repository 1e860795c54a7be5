"""THE reader: inputs and targets of mini-batches, from whatever a user hands over."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_batches", "check_targets", "unpack"]


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
