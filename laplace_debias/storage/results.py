"""Results that save to one ``.npz`` file and load again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from laplace_debias.storage.export import ExportedResult
from laplace_debias.storage.files import read_content, write_content

__all__ = ["SavedResult"]

Result = TypeVar("Result", bound="SavedResult")


class SavedResult(ExportedResult):
    """Gives a frozen dataclass of tensors and plain values ``save`` and ``load``.

    A subclass that says its ``rows`` has the ways out of every other result, too.

    Fields may be tensors, plain values (numbers, strings, tuples of them, ``None``) or tuples of
    other results. Nothing is pickled.

    Example:
        >>> import tempfile, torch
        >>> @dataclasses.dataclass(frozen=True)
        ... class Curve(SavedResult):
        ...     name: str
        ...     values: torch.Tensor
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Curve.load(Curve("loss", torch.ones(2)).save(folder + "/curve.npz"))
        Curve(name='loss', values=tensor([1., 1.]))
    """

    def save(self, path: str | Path) -> Path:
        """Write the result to ``path`` (``.npz``), whole or not at all; return the path.

        Args:
            path: The file; its folder is made if missing.

        Raises:
            ValueError: If the path does not end in ``.npz``.
        """
        if Path(path).suffix != ".npz":
            raise ValueError(f"Expected a path that ends in .npz, got {path}. Remedy: rename it.")
        return write_content(path, _content(self))

    @classmethod
    def load(cls: type[Result], path: str | Path) -> Result:
        """Read a result that :meth:`save` has written.

        Args:
            path: The file.

        Raises:
            ValueError: If the file holds a result of another type, or is damaged.
        """
        content = read_content(path)
        kind = content.get("type", "other data") if isinstance(content, dict) else "other data"
        if kind != cls.__name__:
            raise ValueError(
                f"Expected a saved {cls.__name__} in {path}, got {kind}. Remedy: load it with the "
                "class that saved it."
            )
        result: Result = _result(content)
        return result


def _content(result: SavedResult) -> dict[str, Any]:
    """A result as nested mappings."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(result):  # type: ignore[arg-type]  # subclasses are dataclasses
        value = getattr(result, field.name)
        if isinstance(value, tuple) and value and isinstance(value[0], SavedResult):
            value = [_content(part) for part in value]
        fields[field.name] = value
    return {"type": type(result).__name__, "fields": fields}


def _result(content: dict[str, Any]) -> Any:
    """Undo :func:`_content`."""
    fields: dict[str, Any] = {}
    for name, value in content["fields"].items():
        if isinstance(value, list):
            is_result = bool(value) and isinstance(value[0], dict) and "fields" in value[0]
            value = tuple(_result(part) if is_result else part for part in value)
        fields[name] = value
    return {cls.__name__: cls for cls in _subclasses(SavedResult)}[content["type"]](**fields)


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    """All classes below a class."""
    below: type[Any]
    for below in cls.__subclasses__():
        yield below
        yield from _subclasses(below)
