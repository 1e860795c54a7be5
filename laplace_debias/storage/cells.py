"""Finished pieces of a long run as small JSON files, so that it goes on after an interruption."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["CellStore"]


class CellStore:
    """A folder of finished cells that belong to one configuration.

    ``config.json`` holds the configuration; each cell is a file named after it. Files are written
    beside their place and moved there, so an interruption never leaves half a cell.

    Args:
        folder: Where to keep the cells; made if missing. ``None`` keeps them in memory only.
        config: Everything that decides a cell's content beside its name; JSON-compatible.

    Raises:
        ValueError: If the folder holds cells of another configuration.

    Example:
        >>> store = CellStore(None, {"seed": 0})
        >>> store.get("a", lambda: 1), store.get("a", lambda: 2)
        (1, 1)
    """

    def __init__(self, folder: str | Path | None, config: Mapping[str, Any]) -> None:
        """Open the folder, or start it."""
        self.folder = None if folder is None else Path(folder)
        self.config = json.loads(json.dumps(dict(config)))
        text = json.dumps(self.config, sort_keys=True)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._memory: dict[str, Any] = {}
        if self.folder is None:
            return
        path = self.folder / "config.json"
        if path.exists():
            self._check(json.loads(path.read_text()), path)
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(path, self.config)

    def _check(self, theirs: dict[str, Any], path: Path) -> None:
        """Raise if the folder belongs to another configuration, and say what differs."""
        keys = sorted({*theirs, *self.config})
        differing = [key for key in keys if theirs.get(key) != self.config.get(key)]
        if differing:
            detail = "; ".join(
                f"{key}: {theirs.get(key)!r} there, {self.config.get(key)!r} now"
                for key in differing
            )
            raise ValueError(
                f"Expected a folder of this configuration, got {path} with another ({detail}). "
                "Remedy: use another folder, or delete this one."
            )

    def __contains__(self, name: str) -> bool:
        """Say whether a cell is finished."""
        if name in self._memory:
            return True
        return self.folder is not None and self._path(name).exists()

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a cell, from its file or by making (and keeping) it.

        Args:
            name: Name of the cell; letters, digits, ``-``, ``_`` and ``.``.
            make: Computes the cell's JSON-compatible content if it is not there yet.
        """
        if name in self._memory:
            return self._memory[name]
        if name in self:
            cell = json.loads(self._path(name).read_text())
            if cell["fingerprint"] != self.fingerprint:
                raise ValueError(
                    f"Expected a cell of this configuration ({self.fingerprint}), got "
                    f"{self._path(name)} of another ({cell['fingerprint']}). Remedy: delete it."
                )
            content = cell["content"]
        else:
            content = json.loads(json.dumps(make()))
            if self.folder is not None:
                self._write(self._path(name), {"fingerprint": self.fingerprint, "content": content})
        self._memory[name] = content
        return content

    def _path(self, name: str) -> Path:
        """File of a cell."""
        return self.folder / f"{name}.json"

    @staticmethod
    def _write(path: Path, content: Any) -> None:
        """Write JSON atomically."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(content, indent=1))
        os.replace(partial, path)
