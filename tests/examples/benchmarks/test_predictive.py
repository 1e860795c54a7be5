"""The benchmark of predictions runs at a small size, and its memory in a fresh process."""

import json

import pytest

from examples.benchmarks import predictive


def test_bench_predictive_writes_its_table(tmp_path, capsys):
    output = tmp_path / "bench.json"
    results = predictive.main(["--quick", "--output", str(output)])
    assert json.loads(output.read_text()) == results
    printed = capsys.readouterr().out
    base = min(way["seconds_per_image"] for way in results["cnn"]["upstream"].values())
    for k in (1, 14, 100):
        sweep = results["cnn"][f"sweep_{k}"]
        ratio = k * base / sweep["seconds_per_image"]
        assert sweep["times_faster_than_upstream"] == pytest.approx(ratio)
        assert f"cnn: {k} points, times faster" in printed
    errors = results["cnn"]["relative_error"]
    assert errors["float32"] < 1e-4 and errors["float64"] < 1e-10


@pytest.mark.filterwarnings("ignore:BatchNorm unsupported for Kron")
def test_predictions_of_resnet20_are_those_of_laplace_torch():
    errors = predictive.errors("resnet20", n=2)
    assert errors["float32"] < 1e-4 and errors["float64"] < 1e-10


def test_memory_is_measured_in_a_fresh_process():
    measured = predictive.peak_memory("sweep:2")
    assert measured["n"] == 2 and measured["peak_mb"] > measured["beyond_start_mb"] > 0
