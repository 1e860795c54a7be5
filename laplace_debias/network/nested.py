"""Changes that several calls share: the first one makes a change, the last one undoes it.

A module's mode, a parameter's ``requires_grad`` and PyTorch's switches belong to the process, not
to a call. If every call put back what it found, two threads whose calls overlap would leave behind
what the other one had set. So calls are counted, and what was there before the first is put back
after the last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Change", "held"]


@dataclass(frozen=True)
class Change:
    """Something to be switched for as long as any call needs it.

    Attributes:
        key: What is switched: the kind of change, and the ``id`` of the object if there is one.
        make: Makes the change and returns what undoes it. What it returns must keep the object
            alive, so that its ``id`` stays its own.
    """

    key: Hashable
    make: Callable[[], Callable[[], None]]


@dataclass
class _Held:
    """A change that some calls hold."""

    undo: Callable[[], None]
    n_calls: int = 0


_lock = threading.RLock()
_held: dict[Hashable, _Held] = {}


@contextmanager
def held(changes: Iterable[Change]) -> Iterator[None]:
    """Hold changes inside a block, in any number of threads at once.

    Args:
        changes: What to change; the same key in two overlapping blocks is the same change.

    Yields:
        Nothing; every change holds inside the ``with`` block.

    Example:
        >>> lamp = {"on": False}
        >>> def switch_on():
        ...     before = lamp["on"]
        ...     lamp["on"] = True
        ...     return lambda: lamp.update(on=before)
        >>> with held([Change("lamp", switch_on)]):
        ...     with held([Change("lamp", switch_on)]):
        ...         pass
        ...     lamp["on"]
        True
        >>> lamp["on"]
        False
    """
    taken: list[Hashable] = []
    try:
        with _lock:
            for change in changes:
                if change.key not in _held:
                    _held[change.key] = _Held(change.make())
                _held[change.key].n_calls += 1
                taken.append(change.key)
        yield
    finally:
        with _lock:
            for key in reversed(taken):
                _held[key].n_calls -= 1
                if not _held[key].n_calls:
                    _held.pop(key).undo()
