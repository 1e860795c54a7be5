"""Numbers, text and tensors in one file: JSON without tensors, ``.npz`` with them; no pickle."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laplace_debias.storage.atomic import write_atomically

__all__ = ["has_tensors", "read_content", "write_content"]

_META, _TENSOR = "meta", "tensor"


def write_content(path: str | Path, content: Any) -> Path:
    """Write content to a file, whole or not at all.

    Args:
        path: Ends in ``.json``, for content without tensors, or in ``.npz``.
        content: Mappings with string keys, sequences, numbers, strings, ``None`` and tensors.

    Returns:
        The path.

    Raises:
        TypeError: If the content holds anything else.
        ValueError: If the path ends otherwise, or in ``.json`` where there are tensors.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_content(folder + "/a.npz", {"x": torch.ones(2), "seed": 0})
        ...     read_content(path)
        {'x': tensor([1., 1.]), 'seed': 0}
    """
    path = Path(path)
    arrays: dict[str, Tensor] = {}
    text = _dumps(_split(content, arrays, _TENSOR))
    if path.suffix == ".npz":
        values: dict[str, Any] = {key: tensor.numpy() for key, tensor in arrays.items()}
        values[_META] = np.array(text)
        return write_atomically(path, lambda file: np.savez_compressed(file, **values))
    if path.suffix == ".json" and not arrays:
        return write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))
    expected = ".npz" if arrays else ".npz or .json"
    raise ValueError(f"Expected a path that ends in {expected}, got {path}. Remedy: rename it.")


def read_content(path: str | Path) -> Any:
    """Read what :func:`write_content` has written; tuples come back as lists, tensors on the CPU.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If the file is cut off, damaged or of another kind; the message names it.
    """
    path = Path(path)
    arrays: dict[str, Tensor] = {}
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                arrays = {key: torch.from_numpy(file[key]) for key in file.files if key != _META}
                text = str(file[_META])
        else:
            text = path.read_text(encoding="utf-8")
        return _join(json.loads(text), arrays)
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"Expected a whole file that this library wrote, got {path}, which cannot be read "
            f"({type(error).__name__}: {error}). Remedy: delete this file; it is made again by the "
            "call that made it."
        ) from error


def has_tensors(content: Any) -> bool:
    """Say whether there is a tensor in the content.

    Example:
        >>> has_tensors({"a": [1, 2]}), has_tensors({"a": [torch.ones(1)]})
        (False, True)
    """
    arrays: dict[str, Tensor] = {}
    _split(content, arrays, _TENSOR)
    return bool(arrays)


def _split(content: Any, arrays: dict[str, Tensor], place: str) -> Any:
    """Put the tensors of ``content`` into ``arrays``, and return it with their keys in place."""
    if isinstance(content, Tensor):
        while place in arrays:  # {"a/b": ...} beside {"a": {"b": ...}}
            place += "'"
        arrays[place] = content.detach().cpu()
        return {_TENSOR: place}
    if isinstance(content, Mapping):
        return {key: _split(value, arrays, f"{place}/{key}") for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_split(value, arrays, f"{place}/{i}") for i, value in enumerate(content)]
    return content


def _join(content: Any, arrays: Mapping[str, Tensor]) -> Any:
    """Undo :func:`_split`."""
    if isinstance(content, dict):
        if set(content) == {_TENSOR} and content[_TENSOR] in arrays:
            return arrays[content[_TENSOR]]
        return {key: _join(value, arrays) for key, value in content.items()}
    if isinstance(content, list):
        return [_join(value, arrays) for value in content]
    return content


def _dumps(content: Any) -> str:
    """JSON, or an error that says what can be written."""
    try:
        return json.dumps(content, indent=1)
    except TypeError as error:
        raise TypeError(
            f"Expected numbers, strings, None, tensors, and mappings and sequences of them, got "
            f"something else ({error}). Remedy: convert it, e.g. by `.tolist()` or `str()`."
        ) from error
