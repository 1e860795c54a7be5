"""The benchmark of quadratics runs at a small size."""

from examples.benchmarks import quadratics


def test_bench_runs_quickly(tmp_path):
    rows = quadratics.main(["--quick", "--K", "5", "--out", str(tmp_path)])
    assert (tmp_path / "bench_quadratics.json").exists() and len(rows) == 2
    assert all(row["a"] > 0 and row["b"] > 0 for row in rows)
