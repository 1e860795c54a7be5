"""Results as text: JSON without ``NaN``, CSV, and data frames; to a file where a path is given."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laplace_debias.storage.atomic import write_atomically

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = [
    "aligned",
    "number_from_json",
    "rows_to_csv",
    "rows_to_dataframe",
    "to_json_text",
    "write_text",
]


def write_text(text: str, path: str | Path | None) -> str:
    """Return ``text``, and write it to ``path`` if there is one, whole or not at all.

    Args:
        text: What to write, in UTF-8 and as it is.
        path: The file; its folder is made if missing. ``None`` writes nothing.

    Example:
        >>> write_text("accuracy 0.9", None)
        'accuracy 0.9'
    """
    if path is not None:
        write_atomically(path, lambda file: file.write_bytes(text.encode()))
    return text


def to_json_text(content: Any) -> str:
    """Write a result as JSON that every reader takes: the standard has no ``NaN`` or ``Infinity``.

    ``NaN`` becomes ``null``, and the infinities the strings ``"inf"`` and ``"-inf"``;
    :func:`number_from_json` reads them back. Tuples become lists, as do tensors and arrays;
    dataclasses become mappings of their fields.

    Args:
        content: Mappings, sequences, dataclasses, tensors, numbers, strings, ``None``, nested.

    Example:
        >>> print(to_json_text({"nll": (float("nan"), float("inf"), 0.5)}))
        {
          "nll": [
            null,
            "inf",
            0.5
          ]
        }
    """
    return json.dumps(_plain(content), indent=2, allow_nan=False)


def number_from_json(value: float | str | None) -> float:
    """Read a number that :func:`to_json_text` wrote.

    Example:
        >>> number_from_json(None), number_from_json("-inf"), number_from_json(0.5)
        (nan, -inf, 0.5)
    """
    return math.nan if value is None else float(value)


def rows_to_csv(
    header: Sequence[str], rows: Iterable[Sequence[Any]], path: str | Path | None = None
) -> str:
    """Return rows as CSV with a header, and write it to ``path`` if there is one.

    Args:
        header: Names of the columns.
        rows: One value for each column; ``None`` becomes an empty field, ``NaN`` and the
            infinities ``nan``, ``inf`` and ``-inf``.
        path: See :func:`write_text`.

    Example:
        >>> print(rows_to_csv(("method", "nll"), [("plain", 0.5), ("single", None)]))
        method,nll
        plain,0.5
        single,
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return write_text(buffer.getvalue(), path)


def rows_to_dataframe(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> DataFrame:
    """Return rows as a pandas data frame.

    Args:
        header: Names of the columns.
        rows: One value for each column.

    Raises:
        ImportError: If pandas, which is optional, is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError(
            "Expected pandas, which data frames need, got no such package. Remedy: `pip install "
            "'laplace-debias[pandas]'`, or take `to_csv()`."
        ) from error
    return pandas.DataFrame([tuple(row) for row in rows], columns=list(header))


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as columns, aligned to the right.

    Args:
        lines: The same number of cells in each.

    Example:
        >>> print(aligned([("metric", "gap"), ("nll", "0.1234")]))
        metric     gap
           nll  0.1234
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in lines
    )


def _plain(content: Any) -> Any:
    """Content in the types of JSON."""
    if isinstance(content, float):
        if math.isnan(content):
            return None
        return content if math.isfinite(content) else str(content)
    if dataclasses.is_dataclass(content) and not isinstance(content, type):
        content = {f.name: getattr(content, f.name) for f in dataclasses.fields(content)}
    if isinstance(content, Mapping):
        return {key: _plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_plain(value) for value in content]
    if hasattr(content, "tolist"):  # tensors, arrays and numpy's numbers
        return _plain(content.tolist())
    return content
