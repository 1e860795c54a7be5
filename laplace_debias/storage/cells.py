"""Finished pieces of a long run, one small file each, so that it goes on after an interruption."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from torch import Tensor, nn

from laplace_debias.storage.files import has_tensors, read_content, write_content
from laplace_debias.storage.fingerprints import fingerprint

__all__ = ["CellStore"]

_CONFIG = "config"
_SUFFIXES = (".json", ".npz")


class CellStore:
    """A folder of finished cells that belong to one configuration.

    ``config.json`` holds the configuration; each cell is a file named after it, ``.npz`` if it
    holds tensors and ``.json`` if not. Files are written beside their place and moved there, so an
    interruption never leaves half a cell, and several processes may work on one folder.

    Args:
        folder: Where to keep the cells; made if missing. ``None`` keeps them in memory only.
        config: Everything that decides a cell's content beside its name, JSON-compatible; see
            :meth:`for_run`. ``None`` takes the folder's own, to look at what is there.

    Raises:
        ValueError: If the folder holds cells of another configuration.

    Example:
        >>> store = CellStore(None, {"seed": 0})
        >>> store.get("a", lambda: 1), store.get("a", lambda: 2), "b" in store
        (1, 1, False)
    """

    def __init__(self, folder: str | Path | None, config: Mapping[str, Any] | None = None) -> None:
        """Open the folder, or start it."""
        self.folder = None if folder is None else Path(folder)
        self._memory: dict[str, Any] = {}
        self._only_looking = config is None
        path = None if self.folder is None else self.folder / f"{_CONFIG}.json"
        if config is None:
            config = {} if path is None else read_content(path)
        self.config: dict[str, Any] = _as_read(config)
        if path is not None and path.exists():
            self.config = self._checked(read_content(path), path)
        elif path is not None:
            write_content(path, self.config)
        text = json.dumps(self.config, sort_keys=True)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]

    @classmethod
    def for_run(
        cls,
        folder: str | Path | None,
        model: nn.Module | Mapping[str, nn.Module],
        data: Mapping[str, Iterable[Any]],
        *,
        loss: nn.Module | None = None,
        options: Mapping[str, Any] | None = None,
        data_id: str | None = None,
    ) -> CellStore:
        """Open the folder of a run, whose configuration is its fingerprint.

        Without a folder nothing has to be recognised, and the data are not read.

        Args:
            folder: See the class.
            model: See :func:`~laplace_debias.storage.fingerprints.fingerprint`, as for the others.
            data: All data that decide the numbers, by name.
            loss: The loss, if there is one.
            options: Everything else that decides the numbers.
            data_id: Stands for the data.
        """
        if folder is None:
            return cls(None, {})
        config = fingerprint(model, data, loss=loss, options=options, data_id=data_id)
        return cls(folder, config)

    def _checked(self, theirs: dict[str, Any], path: Path) -> dict[str, Any]:
        """Return the folder's configuration; raise if it is another, and say what differs."""
        there, now = dict(_flat(theirs)), dict(_flat(self.config))
        differing = [key for key in sorted({*there, *now}) if there.get(key) != now.get(key)]
        if not differing:
            return theirs
        detail = "; ".join(
            f"{key}: {there.get(key)!r} there, {now.get(key)!r} now" for key in differing
        )
        hint = (
            " (Data that are shuffled or augmented at random differ from reading to reading: "
            "`data_id=` can stand for them.)"
            if any(key.split(".")[0] == "data" for key in differing)
            else ""
        )
        raise ValueError(
            f"Expected a folder of this configuration, got {path} with another ({detail}). "
            f"Remedy: use another folder, or delete this one.{hint}"
        )

    def __contains__(self, name: str) -> bool:
        """Say whether a cell is finished."""
        return name in self._memory or self._finished(name) is not None

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the finished cells, sorted."""
        files = () if self.folder is None else self.folder.iterdir()
        names = {
            unquote(file.stem)
            for file in files
            if file.suffix in _SUFFIXES and not file.name.startswith(".")  # still being written
        }
        return iter(sorted((names | set(self._memory)) - {_CONFIG}))

    def __getitem__(self, name: str) -> Any:
        """Return a finished cell; see :meth:`get`."""

        def missing() -> Any:
            raise KeyError(
                f"Expected a finished cell, got {name!r}, which is not there. Remedy: choose from "
                f"{list(self)}, or make it by `get`."
            )

        return self.get(name, missing)

    def get(
        self, name: str, make: Callable[[], Any], settings: Mapping[str, Any] | None = None
    ) -> Any:
        """Return a cell, from its file or by making (and keeping) it.

        Args:
            name: Name of the cell.
            make: Computes the cell's content if it is not there yet: mappings with string keys,
                sequences, numbers, strings, ``None`` and tensors.
            settings: What decides this cell beside the configuration; a finished cell has to have
                been made with the same.

        Returns:
            The content as it comes back from a file: tuples as lists, tensors on the CPU.

        Raises:
            ValueError: If the file is damaged, or of another configuration or other settings.
        """
        if name not in self._memory:
            path = self._finished(name)
            if path is None:
                return self.put(name, make(), settings)
            self._memory[name] = self._read(path, settings)
        return self._memory[name]

    def put(self, name: str, content: Any, settings: Mapping[str, Any] | None = None) -> Any:
        """Keep a finished cell, and return its content as :meth:`get` does.

        Args:
            name: Name of the cell.
            content: See :meth:`get`.
            settings: See :meth:`get`.
        """
        content = _as_read(content)
        if self.folder is not None:
            cell: dict[str, Any] = {"fingerprint": self.fingerprint}
            if settings:
                cell["settings"] = dict(settings)
            suffix = ".npz" if has_tensors(content) else ".json"
            write_content(self._path(name, suffix), cell | {"content": content})
        self._memory[name] = content
        return content

    def _read(self, path: Path, settings: Mapping[str, Any] | None) -> Any:
        """Content of a finished cell, which has to be this run's."""
        cell = read_content(path)
        if not isinstance(cell, dict) or not {"fingerprint", "content"} <= set(cell):
            raise ValueError(
                f"Expected a finished cell with its fingerprint, got {path} without. Remedy: "
                "delete this file; the same call makes it again."
            )
        if cell["fingerprint"] != self.fingerprint:
            raise ValueError(
                f"Expected a cell of this configuration ({self.fingerprint}), got {path} of "
                f"another ({cell['fingerprint']}). Remedy: delete it."
            )
        wanted, got = _as_read(dict(settings or {})), cell.get("settings", {})
        if got != wanted and not self._only_looking:
            raise ValueError(
                f"Expected a cell made with the settings {wanted}, got {path} made with {got}. "
                "Remedy: use another folder, or delete this file."
            )
        return cell["content"]

    def _finished(self, name: str) -> Path | None:
        """File of a finished cell, if there is one."""
        if self.folder is None:
            return None
        paths = (self._path(name, suffix) for suffix in _SUFFIXES)
        return next((path for path in paths if path.exists()), None)

    def _path(self, name: str, suffix: str) -> Path:
        """Where a cell belongs."""
        if name == _CONFIG:
            raise ValueError(
                f"Expected another name of a cell than {_CONFIG!r}, which the folder's own file "
                "has, got it. Remedy: rename the cell."
            )
        assert self.folder is not None
        quoted = quote(name, safe=" +=,()[]")
        if quoted.startswith("."):  # files that are being written do
            quoted = "%2E" + quoted[1:]
        return self.folder / (quoted + suffix)


def _as_read(content: Any) -> Any:
    """Content as it comes back from a file."""
    if isinstance(content, Tensor):
        return content.detach().cpu()
    if isinstance(content, Mapping):
        return {key: _as_read(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_as_read(value) for value in content]
    return content


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Entries of nested mappings by dotted keys."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
