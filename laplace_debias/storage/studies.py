"""Results that save to one ``.npz`` file and load again, and studies that resume from one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from laplace_debias.data.chunks import Chunk, Chunks

Result = TypeVar("Result", bound="SavedResult")
_META = "meta"


class SavedResult:
    """Gives a frozen dataclass of tensors and plain values ``save`` and ``load``.

    Fields may be tensors, plain values (numbers, strings, tuples of them, ``None``) or tuples of
    other results. Nothing is pickled.
    """

    def save(self, path: str | Path) -> Path:
        """Write the result to ``path`` (``.npz``), whole or not at all; return the path."""
        arrays: dict[str, Tensor] = {}
        meta = _flatten_result(self, "", arrays)
        return write_arrays(path, arrays, meta)

    @classmethod
    def load(cls: type[Result], path: str | Path) -> Result:
        """Read a result that :meth:`save` has written.

        Raises:
            ValueError: If the file holds a result of another type.
        """
        arrays, meta = read_arrays(path)
        if meta.get("type") != cls.__name__:
            raise ValueError(
                f"Expected a saved {cls.__name__} in {path}, got {meta.get('type', 'other data')}. "
                "Load it with the class that saved it."
            )
        return _build_result(meta, "", arrays)


def _flatten_result(result: SavedResult, prefix: str, arrays: dict[str, Tensor]) -> dict[str, Any]:
    """Put the tensors of a result into ``arrays`` and return the rest."""
    meta: dict[str, Any] = {"type": type(result).__name__, "values": {}, "results": {}}
    for field in dataclasses.fields(result):
        value, key = getattr(result, field.name), prefix + field.name
        if isinstance(value, Tensor):
            arrays[key] = value
        elif isinstance(value, tuple) and value and isinstance(value[0], SavedResult):
            meta["results"][field.name] = [
                _flatten_result(part, f"{key}.{i}.", arrays) for i, part in enumerate(value)
            ]
        else:
            meta["values"][field.name] = value
    return meta


def _build_result(meta: dict[str, Any], prefix: str, arrays: dict[str, Tensor]) -> Any:
    """Build a result from what :func:`_flatten_result` gave."""
    cls = {sub.__name__: sub for sub in SavedResult.__subclasses__()}[meta["type"]]
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in meta["values"].items()}
    for name, parts in meta["results"].items():
        values[name] = tuple(
            _build_result(part, f"{prefix}{name}.{i}.", arrays) for i, part in enumerate(parts)
        )
    for field in dataclasses.fields(cls):
        if field.name not in values:
            values[field.name] = arrays[prefix + field.name]
    return cls(**values)


def write_arrays(path: str | Path, arrays: Mapping[str, Tensor], meta: dict[str, Any]) -> Path:
    """Write tensors and JSON-serialisable ``meta`` to an ``.npz`` file, whole or not at all.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_arrays(folder + "/a.npz", {"x": torch.ones(2)}, {"seed": 0})
        ...     read_arrays(path)
        ({'x': tensor([1., 1.])}, {'seed': 0})
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"Expected a path that ends in .npz, got {path}. Remedy: rename it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.npz")
    content = {key: value.detach().cpu().numpy() for key, value in arrays.items()}
    try:
        np.savez_compressed(temporary, **content, **{_META: np.array(json.dumps(meta))})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_arrays(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`write_arrays` has written."""
    with np.load(path, allow_pickle=False) as file:
        if _META not in file:
            raise ValueError(
                f"Expected a file written by this library, got {path}. "
                "Remedy: choose another path, or remove the file."
            )
        arrays = {key: torch.from_numpy(file[key]) for key in file.files if key != _META}
        return arrays, json.loads(str(file[_META]))


def fingerprint(
    models: Iterable[nn.Module], data: Iterable[Chunk], settings: Mapping[str, Any]
) -> str:
    """Hash parameters, buffers, data and settings, to tell whether saved work belongs to them.

    Args:
        models: The networks.
        data: Pairs ``(X, y)`` in a fixed order.
        settings: Everything else the numbers depend on; its ``repr`` counts.

    Returns:
        A hexadecimal digest.

    Example:
        >>> model, data = nn.Linear(1, 1), [(torch.zeros(1, 1), torch.zeros(1))]
        >>> fingerprint([model], data, {"k": 1}) == fingerprint([model], data, {"k": 2})
        False
    """
    digest = hashlib.sha256(repr(sorted(settings.items())).encode())
    for model in models:
        for name, tensor in model.state_dict().items():
            digest.update(name.encode())
            _update(digest, tensor)
    for X, y in Chunks(data):
        for tensor in (*(X.values() if isinstance(X, Mapping) else (X,)), y):
            _update(digest, tensor)
    return digest.hexdigest()


def _update(digest: Any, tensor: Tensor) -> None:
    """Add a tensor's type, shape and bytes to a hash."""
    digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


class Study:
    """Finished parts of a long study, kept in memory or in a file from which it resumes.

    Args:
        path: An ``.npz`` file, read if it exists and rewritten after every part; ``None`` keeps
            the parts in memory only.
        fingerprint: What the parts belong to; see :func:`fingerprint`.

    Raises:
        ValueError: If the file belongs to another model, other data or other settings.

    Example:
        >>> study = Study(None, "")
        >>> "a" in study, study.add("a", {"x": torch.ones(1)}), study["a"]
        (False, {'x': tensor([1.])}, {'x': tensor([1.])})
    """

    def __init__(self, path: str | Path | None, fingerprint: str):
        """Read the finished parts, if any."""
        self._path, self._fingerprint = path, fingerprint
        self._parts: dict[str, dict[str, Tensor]] = {}
        if path is None or not Path(path).exists():
            return
        arrays, meta = read_arrays(path)
        if meta.get("fingerprint") != fingerprint:
            raise ValueError(
                f"Expected {path} to hold parts of this study, but it was made with another model, "
                "other data or other settings. Choose another path, or remove the file."
            )
        for key, value in arrays.items():
            part, name = key.rsplit("/", 1)
            self._parts.setdefault(part, {})[name] = value

    def __contains__(self, part: str) -> bool:
        """Say whether a part is finished."""
        return part in self._parts

    def __getitem__(self, part: str) -> dict[str, Tensor]:
        """Return a finished part."""
        return self._parts[part]

    def add(self, part: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keep a finished part, and write the file; return the part (on the CPU)."""
        self._parts[part] = {name: value.detach().cpu() for name, value in arrays.items()}
        if self._path is not None:
            flat = {f"{p}/{n}": v for p, values in self._parts.items() for n, v in values.items()}
            write_arrays(self._path, flat, {"fingerprint": self._fingerprint})
        return self._parts[part]
