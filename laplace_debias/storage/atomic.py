"""Files that appear whole or not at all, also when several processes write them at once."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> Path:
    """Let ``write`` make a temporary file beside ``path``, then move it there.

    The temporary name is new on every call, so threads and processes that write the same file at
    the same time do not meet: each of them moves a whole file, and the last one stays. If ``write``
    raises, ``path`` is as it was and nothing is left beside it.

    Args:
        path: The file to write; its folder is made if missing.
        write: Gets the path of the temporary file, which does not exist yet and has the suffix of
            ``path``.

    Returns:
        The path.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_atomically(folder + "/a.txt", lambda file: file.write_text("whole"))
        ...     path.read_text(), [other.name for other in path.parent.iterdir()]
        ('whole', ['a.txt'])
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}-{uuid.uuid4().hex}{path.suffix}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
