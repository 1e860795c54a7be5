"""The benchmark of K-FAC's factors runs at a small size."""

import json

import torch

from examples.benchmarks import kfac


def test_bench_kfac_writes_its_table(tmp_path):
    output = tmp_path / "bench.json"
    case = "CNN 28x28, 32"
    table = kfac.main(["--cases", case, "--repeats", "1", "--output", str(output)])
    assert json.loads(output.read_text()) == table
    assert set(table[case]) >= {"hooks", "ASDL", "curvlinops", "inputs only", "forward"}
    assert all(seconds > 0 for seconds in table[case].values())


def test_refinement_reaches_double_precision_where_gaps_are_wide():
    lam = torch.arange(1.0, 21.0, dtype=torch.float64)
    Q = torch.linalg.qr(torch.randn(20, 20, dtype=torch.float64))[0]
    M = Q * lam @ Q.T
    values, X = (part.double() for part in torch.linalg.eigh(M.float()))
    errors = [float((values - lam).abs().max())]
    for _ in range(2):
        values, X = kfac.refined(M, X)
        errors.append(float((values - lam).abs().max()))
    assert errors[0] > 1e-7 and errors[2] < 1e-12
    assert set(kfac.decompositions(12)) > {"float64", "float32"}


def test_sums_take_as_many_bytes_as_they_have_entries():
    found = kfac.sums([40, 80], n_rows=1, chunks=1)
    rows = 4 * 80 / 2**20
    full = 4 * (40**2 + 80**2) / 2**20
    assert full <= found["squares"]["MiB"] <= full + 3 * rows
    assert 10 / 16 * full <= found["in_blocks"]["MiB"] <= 10 / 16 * full + 3 * rows
    assert found["packed"]["MiB"] > found["in_blocks"]["MiB"]  # the square before it is packed
