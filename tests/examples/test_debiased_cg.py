"""The example on debiased CG runs at a small size, draws, and resumes."""

import pytest

from examples import debiased_cg


def test_debiased_cg(tmp_path, capsys):
    options = "--batch-sizes 128 --draws 2 --iterations 30 --epochs 60 --width 128"
    flags = ["--out", str(tmp_path), *options.split()]
    debiased_cg.main(flags)
    first = capsys.readouterr().out
    assert "debiased lower in 2 of 2" in first
    assert (tmp_path / "debiased_cg-digits-with-0-random-labels" / "cg.png").stat().st_size > 10_000
    debiased_cg.main(flags)  # from the file
    assert capsys.readouterr().out == first


def test_a_subset_is_evaluated_and_a_run_goes_on_from_its_products(tmp_path, monkeypatch, capsys):
    options = "--batch-sizes 128 --draws 1 --iterations 30 --epochs 60 --width 128"
    flags = ["--out", str(tmp_path), *options.split(), "--eval-images", "256"]
    product, made = debiased_cg.Quadratic.__matmul__, []

    def interrupted(self, V):
        if len(made) == 40:  # within the debiased run
            raise InterruptedError
        made.append(len(V))
        return product(self, V)

    with monkeypatch.context() as patch:
        patch.setattr(debiased_cg.Quadratic, "__matmul__", interrupted)
        with pytest.raises(InterruptedError):
            debiased_cg.main(flags)
    counted = []
    count = lambda self, V: counted.append(1) or product(self, V)  # noqa: E731
    monkeypatch.setattr(debiased_cg.Quadratic, "__matmul__", count)
    debiased_cg.main(flags)
    assert len(counted) == 30 + 60 - 40
    out = capsys.readouterr().out
    assert "debiased lower in 1 of 1" in out and out.count("M = ") == 1  # no run on all data
    folder = tmp_path / "debiased_cg-digits-with-0-random-labels"
    assert not list((folder / "products").glob("*/*"))
