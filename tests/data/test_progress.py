"""When a progress bar is shown: asked for, never, or by itself on a terminal."""

import io
import sys

import pytest

from laplace_debias.data import progress
from laplace_debias.data.progress import bar


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("shown", "terminal", "delay", "expected"),
    [
        (True, False, 3.0, True),
        (False, True, 0.0, False),
        (None, True, 0.0, True),
        (None, True, 60.0, False),  # the call is over before
        (None, False, 0.0, False),
    ],
)
def test_when_it_is_shown(monkeypatch, shown, terminal, delay, expected):
    stream = _Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "DELAY", delay)
    assert list(bar([1, 2, 3], "reading", shown=shown)) == [1, 2, 3]
    assert ("reading" in stream.getvalue()) is expected


def test_it_knows_its_total(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    list(bar([1, 2, 3], shown=True))
    with bar(title="cells", shown=True, total=7) as cells:
        cells.update(7)
    assert "3/3" in stream.getvalue()
    assert "7/7" in stream.getvalue()


def test_what_it_runs_over_is_iterated_once():
    class Loader:
        started = 0

        def __iter__(self):
            self.started += 1
            return iter([1, 2])

    loader = Loader()
    assert list(bar(loader, shown=False)) == [1, 2]
    assert loader.started == 1
