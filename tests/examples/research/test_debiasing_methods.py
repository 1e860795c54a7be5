"""The examples about K-FAC and debiasing methods run at a small size and keep their promises."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import bench_kfac  # noqa: E402
import debiasing_methods  # noqa: E402


def test_debiasing_methods_on_digits_resumes_and_ranks_the_methods(tmp_path, capsys):
    argv = ["--budgets", "32", "--draws", "1", "--epochs", "30", "--output", str(tmp_path)]
    rows = debiasing_methods.main(argv)
    (tmp_path / "debiasing_methods_digits" / "oracle_32_0.json").unlink()  # stopped before the last
    resumed = debiasing_methods.main(argv)
    assert resumed[:-1] == rows[:-1]
    assert resumed[-1]["nll"] == pytest.approx(rows[-1]["nll"], rel=1e-4)
    assert json.loads((tmp_path / "debiasing_methods_digits.json").read_text()) == resumed
    assert (tmp_path / "debiasing_methods_digits.png").exists()
    assert "+ curvature sampling" in capsys.readouterr().out
    gap = {m: sum(r["nll"] for r in rows if r["method"] == m) for m in debiasing_methods.METHODS}
    assert gap["crossfit"] < 0.6 * gap["single"]
    for method in ("+ curvature sampling", "+ systematic", "+ one backward pass, 5 M"):
        assert gap[method] < 0.25 * gap["single"]


def test_bench_kfac_writes_its_table(tmp_path):
    output = tmp_path / "bench.json"
    case = "CNN 28x28, 32"
    table = bench_kfac.main(["--cases", case, "--repeats", "1", "--output", str(output)])
    assert json.loads(output.read_text()) == table
    assert set(table[case]) >= {"hooks", "ASDL", "curvlinops", "inputs only", "forward"}
    assert all(seconds > 0 for seconds in table[case].values())


@pytest.mark.parametrize("build", [bench_kfac.resnet20, bench_kfac.all_cnn_c])
def test_networks_of_the_benchmark_have_the_right_size(build):
    n = sum(p.numel() for p in build().parameters())
    assert n == {"resnet20": 269_722, "all_cnn_c": 1_369_738}[build.__name__]
