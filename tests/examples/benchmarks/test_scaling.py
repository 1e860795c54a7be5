"""The benchmark of several processes runs at a small size."""

import json

import pytest

from examples.benchmarks import scaling


def test_bench_scaling_writes_its_ratios(tmp_path, capsys):
    output = tmp_path / "bench.json"
    flags = "--model convnet-1-4 --budget 8".split()
    found = scaling.main([*flags, "--output", str(output)])
    assert json.loads(output.read_text())["strong"] == found["strong"]
    strong, paper = found["strong"], found["on paper"]
    assert strong["1"]["trace"] == pytest.approx(strong["2"]["trace"], rel=1e-5)  # one posterior
    # the data do not travel: twice as many change bytes only where rows became a matrix
    assert 0 < found["weak"]["2"]["bytes"] < 1.3 * strong["2"]["bytes"]
    assert "2 processes" in capsys.readouterr().out
    assert paper[1]["carried"] == 2 * paper[0]["carried"] > paper[0]["factors"]
