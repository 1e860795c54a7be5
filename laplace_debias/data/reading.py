"""THE reader: inputs and targets of mini-batches, from whatever a user hands over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from laplace_debias.data.inputs import (
    INPUT_TYPES,
    Batch,
    Inputs,
    on_device,
    ordinary,
    size_of,
    take,
    tensors_of,
)
from laplace_debias.data.loaders import as_batches, bar, described, n_own
from laplace_debias.data.processes import processes
from laplace_debias.data.targets import weighted

__all__ = ["MissingKeyError", "read", "unpack"]


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
    progress_bar: bool | None = True,
    key_w: str | None = None,
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
    progress_bar: bool | None = True,
    key_w: str | None = None,
) -> Iterator[tuple[Inputs, Tensor | None]]: ...


def read(
    loader: Iterable[Any],
    device: torch.device,
    key_y: str = "labels",
    *,
    labelled: bool = True,
    name: str = "loader",
    progress: str | None = None,
    progress_bar: bool | None = True,
    key_w: str | None = None,
) -> Iterator[tuple[Inputs, Any]]:
    """Read inputs and targets, mini-batch by mini-batch, from anything that holds data.

    Mini-batches without a row are skipped, and so are the data that a ``DistributedSampler``
    repeats. One of several processes may have no data.

    Args:
        loader: A loader, any iterable of mini-batches, or one mini-batch (see :func:`as_batches`).
        device: Device of the model.
        key_y: Key of the targets in mini-batches that are mappings.
        labelled: Whether every mini-batch must have targets; see :func:`unpack`.
        name: What error messages call the loader.
        progress: Title of a progress bar; none by default.
        progress_bar: Whether to show it; ``None`` for slow loaders on a terminal only.
        key_w: See :func:`unpack`.

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
    triples = key_w is not None
    batches, empty = as_batches(loader, labelled=labelled, name=name, triples=triples), True
    left = n_own(loader)
    for batch in bar(batches, progress, shown=False if progress is None else progress_bar):
        X, y = unpack(batch, device, key_y, labelled=labelled, key_w=key_w)
        n = size_of(X) if y is None else len(y)
        if n > left:
            own = slice(0, int(left))
            X, y, n = take(X, own), None if y is None else y[own], int(left)
        if n == 0:
            continue
        left -= n
        empty = False
        yield X, y
    if empty and processes() is None:  # among several, a share may be empty
        raise ValueError(
            f"Expected at least one {'labelled ' if labelled else ''}datum in `{name}`, got an "
            "empty loader. Remedy: check its dataset, that it is not an exhausted iterator, and "
            "`drop_last` with a `batch_size` larger than the dataset."
        )


def unpack(
    batch: Any,
    device: torch.device,
    dict_key_y: str,
    *,
    labelled: bool = True,
    key_w: str | None = None,
) -> tuple[Inputs, Any]:
    """Inputs and targets of a mini-batch, on the model's device.

    Args:
        batch: ``(X, y)``, or a mapping that holds the targets under ``dict_key_y``; ``X`` is a
            tensor, a mapping, or a tuple of positional arguments. Where targets are not needed
            also ``X``, ``(X,)``, a longer tuple, or a mapping without them.
        device: Device of the model.
        dict_key_y: Key of the targets in a mapping.
        labelled: Whether there must be targets.
        key_w: For fits: the key of sample weights in a mapping, if it has them; ``(X, y, w)`` is
            read as well then.

    Returns:
        ``X`` (the mapping itself for mappings, as laplace-torch hands it to the model) and ``y``,
        which is ``None`` if there need not be targets and are none, and
        :class:`~laplace_debias.data.targets.WeightedTargets` if there are sample weights.

    Raises:
        ValueError: If the mini-batch has another form, has no targets where it must, or its inputs
            hold NaN or Inf.

    Example:
        >>> X, y = unpack((torch.ones(2, 3), torch.zeros(2)), torch.device("cpu"), "labels")
        >>> X.shape, y.shape
        (torch.Size([2, 3]), torch.Size([2]))
    """
    w = None
    if key_w is not None and isinstance(batch, (tuple, list)) and len(batch) == 3:
        batch, w = batch[:2], batch[2]
    elif key_w is not None and isinstance(batch, MutableMapping):
        w = batch.get(key_w)
    X, y = _parts(batch, dict_key_y, labelled)
    if not isinstance(X, INPUT_TYPES):
        raise ValueError(
            "Expected the inputs of a mini-batch as a tensor, a mapping or a tuple, got "
            f"{described(X)}. Remedy: `torch.as_tensor(...)`, or a `DataLoader`, which makes "
            "tensors."
        )
    if isinstance(y, Tensor) and y.ndim > 0:
        whole = not (y.is_floating_point() or y.is_complex())
        y = ordinary(y.to(device, torch.long if whole else y.dtype))  # as losses want them
    elif not labelled:
        y = None
    elif y is None:
        _raise_unlabelled(batch, dict_key_y)
    else:
        raise ValueError(
            f"Expected the targets of a mini-batch as a tensor with one row per datum, got "
            f"{described(y)}. Remedy: a `DataLoader`, which makes mini-batches of tensors out of "
            "a dataset's items."
        )
    for value in tensors_of(X):
        if not value.is_floating_point():
            continue
        finite = torch.isfinite(value)
        if not finite.all():
            raise ValueError(
                f"Expected finite inputs, got {int((~finite).sum())} NaN or Inf of "
                f"{value.numel()} entries in a mini-batch. Remedy: clean the data, or drop these "
                "rows."
            )
    return on_device(X, device), y if w is None or y is None else weighted(y, w)


def _parts(batch: Any, dict_key_y: str, labelled: bool) -> tuple[Any, Any]:
    """Inputs and targets of a mini-batch as they come; ``None`` where there are no targets."""
    if isinstance(batch, MutableMapping):
        return batch, batch.get(dict_key_y)
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, (tuple, list)) and batch and (len(batch) <= 2 or not labelled):
        return batch[0], batch[1] if len(batch) == 2 else None
    raise ValueError(
        f"Expected mini-batches `(X, y)` or mappings, got {described(batch)}. Remedy: let the "
        "loader's `collate_fn` return a pair, for several inputs `((x1, x2), y)`; sample weights, "
        "`(X, y, w)`, are for fits."
    )


def _raise_unlabelled(batch: Any, dict_key_y: str) -> NoReturn:
    """Say where the targets of a mini-batch were expected."""
    if isinstance(batch, MutableMapping):
        raise MissingKeyError(
            f"Expected the targets under the key '{dict_key_y}' (`dict_key_y`), got the keys "
            f"{sorted(map(str, batch))}. Remedy: pass `dict_key_y=` to `Laplace`."
        )
    raise ValueError(
        f"Expected mini-batches `(X, y)` with targets, got {described(batch)} without any. "
        "Remedy: add them, as in `DataLoader(TensorDataset(X, y), ...)` or `[(X, y)]`."
    )
