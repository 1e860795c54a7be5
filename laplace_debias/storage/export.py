"""Results as text: JSON without ``NaN``, CSV, and data frames; to a file where a path is given."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from laplace_debias.storage.atomic import write_atomically

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = [
    "ExportedResult",
    "number_from_json",
    "rows_to_csv",
    "rows_to_dataframe",
    "text_table",
    "tidy",
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


def tidy(
    labels: Mapping[str, Sequence[Any]], columns: Mapping[str, Tensor]
) -> tuple[list[str], list[list[Any]]]:
    """Return tensors of one shape as rows, one for each entry, with what the entry belongs to.

    Args:
        labels: For every dimension its name, and a label for each of its indices.
        columns: Tensors by name.

    Returns:
        Names of columns, and rows.

    Example:
        >>> import torch
        >>> tidy({"draw": range(1), "size": (8, 32)}, {"loss": torch.tensor([[0.5, 0.25]])})
        (['draw', 'size', 'loss'], [[0, 8, 0.5], [0, 32, 0.25]])
    """
    values = zip(*(column.flatten().tolist() for column in columns.values()), strict=True)
    places = itertools.product(*labels.values())
    rows = [[*place, *row] for place, row in zip(places, values, strict=True)]
    return [*labels, *columns], rows


def text_table(header: Sequence[str], rows: Sequence[Sequence[Any]], limit: int = 40) -> str:
    """Return rows as aligned text, the first ones if there are many.

    Args:
        header: Names of the columns.
        rows: One value for each column; numbers are shown with six digits.
        limit: How many rows at most.

    Example:
        >>> print(text_table(("method", "nll"), [("plain", 0.5), ("two-batch", 0.123456789)]))
           method       nll
            plain       0.5
        two-batch  0.123457
    """
    lines = [[str(name) for name in header]]
    for row in rows[:limit]:
        lines.append([f"{v:.6g}" if isinstance(v, float) else str(v) for v in row])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    more = len(rows) - limit
    return "\n".join([*text, f"... {more} more rows"] if more > 0 else text)


class ExportedResult:
    """Gives a dataclass that says its :meth:`rows` the same ways out as every other result.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Losses(ExportedResult):
        ...     values: tuple[float, ...]
        ...     def rows(self):
        ...         return ["step", "loss"], [[i, v] for i, v in enumerate(self.values)]
        >>> print(Losses((0.5, 0.25)))
        step  loss
           0   0.5
           1  0.25
        >>> print(Losses((0.5,)).to_csv())
        step,loss
        0,0.5
    """

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """Return names of columns, and rows of numbers and text."""
        raise NotImplementedError

    def to_json(self, path: str | Path | None = None) -> str:
        """Return everything as JSON, and write it to ``path`` if one is given.

        Args:
            path: The file. See :func:`to_json_text` for ``NaN`` and infinities.
        """
        return write_text(to_json_text(self), path)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return :meth:`rows` as CSV with a header, and write it to ``path`` if one is given.

        Args:
            path: The file.
        """
        return rows_to_csv(*self.rows(), path)

    def to_dataframe(self) -> DataFrame:
        """Return :meth:`rows` as a pandas data frame.

        Raises:
            ImportError: If pandas, which is optional, is not installed.
        """
        return rows_to_dataframe(*self.rows())

    def __str__(self) -> str:
        """Return :meth:`rows` as a table, the first ones if there are many."""
        return text_table(*self.rows())


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
