"""Every example runs, and what it asserts holds."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_quickstart(capsys):
    runpy.run_path(str(EXAMPLES / "quickstart.py"), run_name="__main__")
    assert "at the same 64 data" in capsys.readouterr().out
