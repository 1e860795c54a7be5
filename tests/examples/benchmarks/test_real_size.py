"""The benchmark at real size runs at a small one, and goes on from its products."""

import pytest

from examples.benchmarks import real_size

FLAGS = "wrn-10-1 --images 6 --image-size 8 --chunk-size 4".split()


def test_it_runs_and_resumes(tmp_path, monkeypatch):
    flags = [*FLAGS, "--out", str(tmp_path)]
    product, made = real_size.Quadratic.__matmul__, []

    def interrupted(self, V):
        if len(made) == 3:
            raise InterruptedError
        made.append(1)
        return product(self, V)

    with monkeypatch.context() as patch:
        patch.setattr(real_size.Quadratic, "__matmul__", interrupted)
        with pytest.raises(InterruptedError):
            real_size.main(flags)
    row = real_size.main(flags)
    assert row["eigenvectors_products_now"] == row["eigenvectors_products"] - 3
    assert row["cg_products_now"] == row["cg_products"] == 3
    assert row["eigenvalues"][0] >= row["eigenvalues"][1] > 0
    assert row["peak_memory_gb"] >= row["memory_before_gb"] > 0
    again = real_size.main(flags)
    assert again["eigenvectors_products_now"] == again["cg_products_now"] == 0
    assert again["eigenvalues"] == row["eigenvalues"]
    assert (tmp_path / "real_size-wrn-10-1.json").exists()
