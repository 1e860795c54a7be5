"""The quickstart runs, and what it asserts holds."""

import runpy


def test_quickstart(capsys):
    runpy.run_module("examples.quickstart", run_name="__main__")
    assert "at the same 64 data" in capsys.readouterr().out
