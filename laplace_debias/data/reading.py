"""THE reader: inputs and targets of mini-batches, from whatever a user hands over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor
from tqdm import tqdm

from laplace_debias.data.inputs import Batch, Inputs, size_of

__all__ = ["MissingKeyError", "as_batches", "check_targets", "read", "unpack"]


class MissingKeyError(KeyError, ValueError):
    """A mapping without a key that it must have: laplace-torch raises a ``KeyError`` for it."""

    def __str__(self) -> str:
        """The message as it is; a ``KeyError`` would put quotation marks around it."""
        return str(self.args[0])


@overload
def read(
    loader: Iterable[Any],
    device: torch.device,
    key_y: str = "labels",
    *,
    labelled: Literal[True] = True,
    name: str = "loader",
    progress: str | None = None,
) -> Iterator[Batch]: ...


@overload
def read(
    loader: Iterable[Any],
    device: torch.device,
    key_y: str = "labels",
    *,
    labelled: bool,
    name: str = "loader",
    progress: str | None = None,
) -> Iterator[tuple[Inputs, Tensor | None]]: ...


def read(
    loader: Iterable[Any],
    device: torch.device,
    key_y: str = "labels",
    *,
    labelled: bool = True,
    name: str = "loader",
    progress: str | None = None,
) -> Iterator[tuple[Inputs, Any]]:
    """Read inputs and targets, mini-batch by mini-batch, from anything that holds data.

    Mini-batches without a row are skipped.

    Args:
        loader: A loader, any iterable of mini-batches, or one mini-batch (see :func:`as_batches`).
        device: Device of the model.
        key_y: Key of the targets in mini-batches that are mappings.
        labelled: Whether every mini-batch must have targets; see :func:`unpack`.
        name: What error messages call the loader.
        progress: Title of a progress bar; none by default.

    Yields:
        ``(X, y)`` as :func:`unpack` gives them.

    Raises:
        ValueError: If there is no datum, or :func:`unpack` refuses a mini-batch.

    Example:
        >>> batch = (torch.ones(2, 3), torch.zeros(2))
        >>> cpu = torch.device("cpu")
        >>> [len(y) for _, y in read(batch, cpu)], [len(y) for _, y in read([batch] * 3, cpu)]
        ([2], [2, 2, 2])
        >>> [y for _, y in read([torch.ones(2, 3)], cpu, labelled=False)]
        [None]
    """
    batches, empty = as_batches(loader, labelled=labelled, name=name), True
    for batch in tqdm(batches, progress, disable=progress is None):
        X, y = unpack(batch, device, key_y, labelled=labelled)
        if (size_of(X) if y is None else len(y)) == 0:
            continue
        empty = False
        yield X, y
    if empty:
        raise ValueError(
            f"Expected at least one {'labelled ' if labelled else ''}datum in `{name}`, got an "
            "empty loader. Remedy: check its dataset, that it is not an exhausted iterator, and "
            "`drop_last` with a `batch_size` larger than the dataset."
        )


def unpack(
    batch: Any, device: torch.device, dict_key_y: str, *, labelled: bool = True
) -> tuple[Inputs, Tensor | None]:
    """Inputs and targets of a mini-batch, on the model's device.

    Args:
        batch: ``(X, y)``, or a mapping that holds the targets under ``dict_key_y``. Where targets
            are not needed also ``X``, ``(X,)``, a longer tuple, or a mapping without them.
        device: Device of the model.
        dict_key_y: Key of the targets in a mapping.
        labelled: Whether there must be targets.

    Returns:
        ``X`` (the mapping itself for mappings, as laplace-torch hands it to the model) and ``y``,
        which is ``None`` if there need not be targets and are none.

    Raises:
        ValueError: If the mini-batch has another form, has no targets where it must, or its inputs
            hold NaN or Inf.

    Example:
        >>> X, y = unpack((torch.ones(2, 3), torch.zeros(2)), torch.device("cpu"), "labels")
        >>> X.shape, y.shape
        (torch.Size([2, 3]), torch.Size([2]))
    """
    X, y = _parts(batch, dict_key_y, labelled)
    if not isinstance(X, (Tensor, MutableMapping)):
        raise ValueError(
            f"Expected the inputs of a mini-batch as a tensor or a mapping, got {_described(X)}. "
            "Remedy: `torch.as_tensor(...)`, or a `DataLoader`, which makes tensors."
        )
    if isinstance(y, Tensor) and y.ndim > 0:
        whole = not (y.is_floating_point() or y.is_complex())
        y = y.to(device, torch.long if whole else y.dtype)  # losses take no other integers
    elif not labelled:
        y = None
    elif y is None:
        _raise_unlabelled(batch, dict_key_y)
    else:
        raise ValueError(
            f"Expected the targets of a mini-batch as a tensor with one row per datum, got "
            f"{_described(y)}. Remedy: a `DataLoader`, which makes mini-batches of tensors out of "
            "a dataset's items."
        )
    inputs = X.values() if isinstance(X, MutableMapping) else [X]
    for value in inputs:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        finite = torch.isfinite(value)
        if not finite.all():
            raise ValueError(
                f"Expected finite inputs, got {int((~finite).sum())} NaN or Inf of "
                f"{value.numel()} entries in a mini-batch. Remedy: clean the data, or drop these "
                "rows."
            )
    return X.to(device) if isinstance(X, Tensor) else X, y


def _parts(batch: Any, dict_key_y: str, labelled: bool) -> tuple[Any, Any]:
    """Inputs and targets of a mini-batch as they come; ``None`` where there are no targets."""
    if isinstance(batch, MutableMapping):
        return batch, batch.get(dict_key_y)
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, (tuple, list)) and batch and (len(batch) <= 2 or not labelled):
        return batch[0], batch[1] if len(batch) == 2 else None
    raise ValueError(
        f"Expected mini-batches `(X, y)` or mappings, got {_described(batch)}. Remedy: let the "
        "loader's `collate_fn` return a pair."
    )


def _raise_unlabelled(batch: Any, dict_key_y: str) -> NoReturn:
    """Say where the targets of a mini-batch were expected."""
    if isinstance(batch, MutableMapping):
        raise MissingKeyError(
            f"Expected the targets under the key '{dict_key_y}' (`dict_key_y`), got the keys "
            f"{sorted(map(str, batch))}. Remedy: pass `dict_key_y=` to `Laplace`."
        )
    raise ValueError(
        f"Expected mini-batches `(X, y)` with targets, got {_described(batch)} without any. "
        "Remedy: add them, as in `DataLoader(TensorDataset(X, y), ...)` or `[(X, y)]`."
    )


def _described(value: Any) -> str:
    """Say what something is, for error messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        kinds = ", ".join(type(part).__name__ for part in value[:3])
        return f"a {type(value).__name__} of {len(value)} ({kinds}{', ...' * (len(value) > 3)})"
    return type(value).__name__


def check_targets(y: Tensor, output_shape: torch.Size, likelihood: str) -> None:
    """Raise unless the targets fit the model's outputs.

    Args:
        y: Targets of a mini-batch of m data: for a classification class indices ``[m, ...]``, or
            probabilities of the classes ``[m, ..., C]`` (soft labels).
        output_shape: Shape of the model's output for one datum or more, ``[., ..., C]``.
        likelihood: ``"classification"`` or ``"regression"``.

    Raises:
        ValueError: If shape, dtype, class indices or probabilities are wrong.

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
    if C == 1:
        raise ValueError(
            "Expected a model with at least two outputs for a classification, whose softmax of a "
            "single logit is one whatever the data, got one output. Remedy: for a binary "
            "classifier with the logit f let the model return `torch.cat([torch.zeros_like(f), f], "
            "-1)`, and pass its labels as `y.squeeze(-1).long()`."
        )
    if y.is_floating_point() and y.shape[1:] == output_shape[1:]:
        _check_probabilities(y)
        return
    if y.is_floating_point() or y.is_complex() or y.shape[1:] != output_shape[1:-1]:
        raise ValueError(
            f"Expected class indices of an integer dtype and shape {['m', *output_shape[1:-1]]}, "
            f"or class probabilities of a floating-point dtype and shape "
            f"{['m', *output_shape[1:]]}, got {y.dtype} of shape {list(y.shape)}. Remedy: for "
            "one-hot integers pass `y.argmax(-1)`, for indices as floats `y.long()`."
        )
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= C:
        raise ValueError(
            f"Expected class indices in [0, {C - 1}] for a model with {C} outputs, got values in "
            f"[{low}, {high}]. Remedy: re-index the classes from 0, or widen the last layer."
        )


def _check_probabilities(y: Tensor) -> None:
    """Raise unless soft labels are probabilities: the Hessian is the softmax's only then."""
    off = float((y.double().sum(-1) - 1).abs().max())
    low = float(y.min())
    tolerance = max(1e-4, 8 * torch.finfo(y.dtype).eps)
    if not (off <= tolerance and low >= 0):  # also for NaN
        raise ValueError(
            "Expected class probabilities, which are not negative and sum to one for every datum, "
            f"got a smallest entry of {low:.4g} and a sum off by {off:.4g}. Remedy: "
            "`y / y.sum(-1, keepdim=True)` for non-negative weights, `y.softmax(-1)` for scores."
        )


def as_batches(
    loader: Iterable[Any], *, labelled: bool = True, name: str = "loader"
) -> Iterable[Any]:
    """Take a bare mini-batch for a loader of one.

    Args:
        loader: A loader, any iterable of mini-batches, or one mini-batch: a mapping, or a pair
            ``(X, y)``. Where targets are not needed also a tensor ``X``; a *list* of two tensors
            then holds two mini-batches of inputs, unless their data differ in shape.
        labelled: Whether mini-batches must have targets.
        name: What error messages call the loader.

    Returns:
        The loader itself, or a list of the one mini-batch.

    Raises:
        ValueError: If it cannot be iterated, or holds no targets where it must.

    Example:
        >>> len(as_batches((torch.zeros(5, 2), torch.zeros(5))))
        1
    """
    if isinstance(loader, MutableMapping):
        return [loader]
    if isinstance(loader, Tensor):
        if labelled:
            raise ValueError(
                f"Expected mini-batches with targets in `{name}`, got {_described(loader)}. "
                "Remedy: pass `(X, y)`, or a loader of such pairs."
            )
        return [loader]
    if isinstance(loader, (tuple, list)) and len(loader) == 2:
        if all(isinstance(part, Tensor) for part in loader):
            X, y = loader
            two = not labelled and isinstance(loader, list) and X.shape[1:] == y.shape[1:]
            return loader if two else [loader]
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise ValueError(
            f"Expected a loader, an iterable of mini-batches or one mini-batch `(X, y)` as "
            f"`{name}`, got {_described(loader)}. Remedy: `DataLoader(TensorDataset(X, y), ...)`."
        )
    return loader
