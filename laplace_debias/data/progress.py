"""One habit for all progress bars: on a terminal, for calls that take more than a few seconds."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm  # the automatic one iterates a loader twice, and so moves its random numbers

from laplace_debias.data.processes import is_main

__all__ = ["DELAY", "bar"]

DELAY = 3.0
"""Seconds after which a bar appears that nobody asked for."""


def bar(
    batches: Any = None,
    title: str | None = None,
    *,
    shown: bool | None = None,
    total: int | None = None,
    unit: str = "it",
) -> tqdm:
    """Make a progress bar.

    Args:
        batches: What to run over; ``None`` to advance the bar by hand.
        title: What stands before it.
        shown: ``True`` shows it at once, ``False`` never; ``None`` after three seconds, and only
            on a terminal. Of several processes only rank 0 shows any.
        total: Number of steps, if ``batches`` does not tell.
        unit: What a step is.

    Returns:
        The bar, to be iterated or entered.

    Example:
        >>> list(bar([1, 2], shown=False))
        [1, 2]
    """
    shown = shown if is_main() else False
    if shown is None:
        return tqdm(batches, title, total, disable=None, delay=DELAY, unit=unit)
    return tqdm(batches, title, total, disable=not shown, unit=unit)
