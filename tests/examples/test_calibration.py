"""The digits demo runs at a small size, and its result is complete."""

from examples import calibration


def test_calibration_example(tmp_path, capsys):
    result = calibration.main(["--small", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "NLL gap ratio" in printed
    assert set(result.methods) == {"plain", "single", "two-batch", "full"}
    assert len({row.prior_precision for row in result.select("full")}) == 14
    assert {"calibration.png", "calibration_corrupted.png", "reliability.png"} <= {
        path.name for path in tmp_path.iterdir()
    }
