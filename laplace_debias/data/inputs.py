"""Inputs of a network: a tensor, or a mapping or tuple of tensors with one row per datum."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

__all__ = [
    "Batch",
    "INPUT_TYPES",
    "Inputs",
    "Keys",
    "concatenate",
    "datum_shapes",
    "map_tensors",
    "on_device",
    "ordinary",
    "rows_of",
    "size_of",
    "take",
    "tensor_bytes",
    "tensors_of",
    "widen",
]

Inputs = Tensor | MutableMapping[str, Any] | tuple[Any, ...] | list[Any]
"""What a network takes: ``[n, ...]``, or a mapping or tuple of tensors and anything else."""
INPUT_TYPES = (Tensor, MutableMapping, tuple, list)
"""The same for ``isinstance``."""
Batch = tuple[Inputs, Tensor]
"""Inputs and targets of some data."""


Keys = str | tuple[str, ...]
"""The entry of a mapping whose rows are counted; or all entries that have one row per datum."""


def size_of(x: Inputs, key: Keys = "input_ids") -> int:
    """Number of data in the inputs.

    Args:
        x: A tensor ``[n, ...]``, or a mapping or tuple of tensors.
        key: The entry of a mapping whose rows are counted (of several, the first); the first tensor
            if it is missing.

    Returns:
        n.

    Raises:
        ValueError: If a mapping or tuple holds no tensor.

    Example:
        >>> size_of({"mask": torch.ones(1), "input_ids": torch.zeros(3, 7)})
        3
    """
    if isinstance(x, Tensor):
        return len(x)
    if isinstance(x, MutableMapping):
        for name in (key,) if isinstance(key, str) else key:
            if isinstance(x.get(name), Tensor):
                return len(x[name])
    for value in tensors_of(x):
        if value.ndim:
            return len(value)
    got = (
        f"the keys {sorted(map(str, x))}"
        if isinstance(x, MutableMapping)
        else f"{len(x)} items ({', '.join(type(value).__name__ for value in x[:3])})"
    )
    raise ValueError(
        f"Expected a mapping or tuple with at least one tensor, got {got} without any. Remedy: let "
        "the loader's `collate_fn` make tensors."
    )


def tensors_of(x: Inputs) -> list[Tensor]:
    """The tensors that inputs consist of.

    Args:
        x: A tensor, or a mapping or tuple of tensors and anything else.

    Returns:
        The tensors, in order.

    Example:
        >>> tensors_of((torch.ones(1), None, torch.zeros(1)))
        [tensor([1.]), tensor([0.])]
    """
    if isinstance(x, Tensor):
        return [x]
    values = x.values() if isinstance(x, MutableMapping) else x
    return [value for value in values if isinstance(value, Tensor)]


def take(x: Inputs, rows: slice | Tensor, key: Keys = "input_ids") -> Inputs:
    """Some of the data; of a mapping or tuple, those rows of every tensor with one row per datum.

    Which tensors these are is told by ``key`` if it names several; otherwise by their number of
    rows, which can deceive.

    Args:
        x: A tensor ``[n, ...]``, or a mapping or tuple of tensors.
        rows: Which data.
        key: See :func:`size_of`.

    Returns:
        Inputs in the form of ``x``.

    Example:
        >>> take({"input_ids": torch.arange(4), "scale": 2.0}, slice(1, 3))
        {'input_ids': tensor([1, 2]), 'scale': 2.0}
        >>> take({"x": torch.arange(3), "anchors": torch.zeros(3)}, slice(0, 1), ("x",))
        {'x': tensor([0]), 'anchors': tensor([0., 0., 0.])}
    """
    if isinstance(x, Tensor):
        return x[rows]
    if isinstance(x, (tuple, list)):
        n = size_of(x)
        return tuple(value[rows] if _has_rows(value, n) else value for value in x)
    part = copy.copy(x)
    for name in rows_of(x, key):
        part[name] = x[name][rows]
    return part


def rows_of(x: MutableMapping[str, Any], key: Keys = "input_ids") -> list[str]:
    """Names of the entries of a mapping that have one row per datum.

    Args:
        x: A mapping of tensors and anything else.
        key: See :func:`take`.

    Returns:
        The names that ``key`` lists; or, of a single one, those of all tensors with as many rows.

    Example:
        >>> rows_of({"x": torch.zeros(3), "anchors": torch.zeros(3), "scale": 1.0}, "x")
        ['x', 'anchors']
    """
    n = size_of(x, key)
    tensors = [name for name, value in x.items() if isinstance(value, Tensor) and value.ndim > 0]
    if not isinstance(key, str):
        return [name for name in tensors if name in key]
    return [name for name in tensors if len(x[name]) == n]


def datum_shapes(x: Inputs) -> tuple[object, ...]:
    """Shapes of a datum, by which inputs can be concatenated or not.

    Args:
        x: A tensor ``[n, ...]``, or a mapping or tuple of tensors.

    Returns:
        What is equal for inputs whose data have equal shapes.

    Example:
        >>> datum_shapes(torch.zeros(4, 2)) == datum_shapes(torch.zeros(1, 2))
        True
    """
    if not isinstance(x, MutableMapping):
        return tuple(value.shape[1:] for value in tensors_of(x))
    return tuple((k, v.shape[1:]) for k, v in x.items() if isinstance(v, Tensor) and v.ndim)


def concatenate(parts: Sequence[Inputs], key: Keys = "input_ids") -> Inputs:
    """Put inputs of several data together.

    Args:
        parts: Tensors, or mappings or tuples of tensors with one row per datum.
        key: See :func:`take`; what does not run over the data is the first one's.

    Returns:
        A tensor, or a mapping or tuple like the first one.

    Example:
        >>> concatenate([torch.zeros(1, 2), torch.ones(2, 2)]).shape
        torch.Size([3, 2])
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    if isinstance(first, (tuple, list)):
        n, same = size_of(first), [part for part in parts if isinstance(part, (tuple, list))]
        return tuple(
            torch.cat([part[i] for part in same]) if _has_rows(value, n) else value
            for i, value in enumerate(first)
        )
    whole = copy.copy(first)
    for name in rows_of(first, key):
        whole[name] = torch.cat([part[name] for part in parts if isinstance(part, MutableMapping)])
    return whole


def _has_rows(value: Any, n: int) -> bool:
    """Whether an item of a tuple has one row per datum."""
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == n


def map_tensors(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to a tensor, or to every tensor of a mapping or tuple, which is copied.

    Args:
        x: A tensor, a mapping, a tuple, or anything else, which stays as it is.
        change: What happens to tensors.

    Returns:
        Inputs in the form of ``x``.

    Example:
        >>> map_tensors({"x": torch.ones(1), "name": "a"}, torch.neg)
        {'x': tensor([-1.]), 'name': 'a'}
    """
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, MutableMapping):
        changed = copy.copy(x)
        for key in x:
            changed[key] = map_tensors(x[key], change)
        return changed
    if isinstance(x, (tuple, list)):
        return tuple(map_tensors(value, change) for value in x)
    return x


def widen(x: Any) -> Any:
    """Cast half-precision tensors to float32, also inside a mapping.

    Args:
        x: A tensor, a mapping, or anything else.

    Returns:
        The same with no half-precision tensor in it.

    Example:
        >>> widen(torch.ones(1).half()).dtype, widen(torch.ones(1, dtype=torch.long)).dtype
        (torch.float32, torch.int64)
    """
    return map_tensors(x, lambda t: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t)


def tensor_bytes(tensor: Tensor) -> Any:
    """Return a tensor's content, of any dtype, as a buffer.

    Example:
        >>> tensor_bytes(torch.ones(2, dtype=torch.int16)).tolist()
        [1, 0, 1, 0]
    """
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def on_device(x: Inputs, device: torch.device) -> Inputs:
    """Inputs whose tensors are on a device and can be used outside of inference mode.

    Args:
        x: A tensor, or a mapping or tuple of tensors and anything else.
        device: The device.

    Returns:
        The same inputs, copied only where need be.

    Example:
        >>> x = {"x": torch.ones(1)}
        >>> on_device(x, torch.device("cpu")) is x
        True
    """
    if any(value.device != device or value.is_inference() for value in tensors_of(x)):
        return cast(Inputs, map_tensors(x, lambda value: ordinary(value.to(device))))
    return x


def ordinary(value: Tensor) -> Tensor:
    """A tensor that autograd takes: one of inference mode is copied.

    Args:
        value: Any tensor.

    Example:
        >>> x = torch.ones(1)
        >>> ordinary(x) is x
        True
    """
    with torch.inference_mode(False):
        return value.clone() if value.is_inference() else value
