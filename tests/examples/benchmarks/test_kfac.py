"""The benchmark of K-FAC's factors runs at a small size."""

import json

from examples.benchmarks import kfac


def test_bench_kfac_writes_its_table(tmp_path):
    output = tmp_path / "bench.json"
    case = "CNN 28x28, 32"
    table = kfac.main(["--cases", case, "--repeats", "1", "--output", str(output)])
    assert json.loads(output.read_text()) == table
    assert set(table[case]) >= {"hooks", "ASDL", "curvlinops", "inputs only", "forward"}
    assert all(seconds > 0 for seconds in table[case].values())
