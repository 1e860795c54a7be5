"""Runtimes of every stage, on tiny made files and a tiny network."""

import json

import pytest

from examples.cifar10 import runtime


def test_runtimes_of_every_stage(files, arguments, tmp_path, capsys):
    more = "--budgets 8 --n-runs 2 --n-samples 3 --large-size".split()
    times = runtime.main(arguments(tmp_path, *more, 32))
    assert list(times) == ["single 8", "two-batch 2 x 4", "full"]
    assert set(times["two-batch 2 x 4"]) == {"construct", "decompose", "debias", "sample"}
    assert set(times["full"]) == {"construct", "decompose", "sample"}
    assert all(len(runs) == 2 and min(runs) > 0 for s in times.values() for runs in s.values())
    content = json.loads((tmp_path / "runtime.json").read_text())
    assert content["seconds"] == times and content["settings"]["n_samples"] == 3
    assert str(files) not in json.dumps(content)
    assert (tmp_path / "runtime.png").stat().st_size > 0
    assert "two-batch 2 x 4" in capsys.readouterr().out
    named = runtime.main(arguments(tmp_path, *more, 16, "--n-runs", 1))
    assert "large-batch 16" in named and "full" not in named
    with pytest.raises(ValueError, match="at most N = 32 training images"):
        runtime.main(arguments(tmp_path, *more, 33))
