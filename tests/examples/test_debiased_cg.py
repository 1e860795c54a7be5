"""The example on debiased CG runs at a small size, draws, and resumes."""

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
