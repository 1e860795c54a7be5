"""The example on the bias of mini-batch quadratics runs at a small size, and draws."""

from examples import quadratic_bias


def test_quadratic_bias(tmp_path, capsys):
    flags = f"--out {tmp_path} --k 4 --draws 1 --epochs 50 --width 96 --batch-size 128"
    more = "--report-sizes 32 --kfac-sizes 4 16 --widths 16"
    quadratic_bias.main([*flags.split(), *more.split()])
    printed = capsys.readouterr().out
    assert "9 pictures" in printed and "Top curvature is over-estimated" in printed
    folder = tmp_path / "quadratic_bias-digits-with-50-random-labels-ggn"
    assert len(list(folder.glob("*.png"))) == 9
    assert all(picture.stat().st_size > 10_000 for picture in folder.glob("*.png"))
