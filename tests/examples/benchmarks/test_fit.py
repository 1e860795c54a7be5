"""The benchmark of whole fits runs at a small size."""

import json

from examples.benchmarks import fit


def test_bench_fit_writes_its_ratios(tmp_path, capsys):
    output = tmp_path / "bench.json"
    flags = "--model convnet-1-4 --budget 8 --repeats 1".split()
    ratios = fit.main([*flags, "--output", str(output)])
    content = json.loads(output.read_text())
    assert content["ratios"] == ratios and all(ratio > 0 for ratio in ratios.values())
    assert (content["model"], content["budget"]) == ("convnet-1-4", 8)
    assert ratios["two-batch / single"] == (
        content["seconds"]["two-batch, 2 x M/2"] / content["seconds"]["single, M"]
    )
    assert "crossfit, curvature sampling, M" in capsys.readouterr().out
    off = content["distances"]
    assert off.keys() == content["seconds"].keys()
    assert 0 < off["auto, 9 M passes"] < off["single, M"]
