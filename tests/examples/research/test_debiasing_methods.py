"""The example about debiasing methods runs at a small size and keeps its promises."""

import json

import pytest

from examples.research import debiasing_methods


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


def test_cifar10_runs_and_leaves_out_budgets_that_are_too_large(cifar10_folder, tmp_path, capsys):
    argv = ["--data", "cifar10", "--folder", str(cifar10_folder), "--train-size", "40"]
    argv += ["--epochs", "1", "--budgets", "8", "20", "40", "1024", "--draws", "1"]
    argv += ["--methods", "single", "+ systematic", "+ one backward pass, 5 M"]
    rows = debiasing_methods.main([*argv, "--output", str(tmp_path / "out")])
    assert [(row["method"], row["m"]) for row in rows] == [
        (method, m) for m in (8, 20) for method in argv[-3:]
    ]
    said = capsys.readouterr().out
    for m in (40, 1024):
        assert f"Budget {m} left out: the training set has 40 data." in said
    other = ["--train-size", "30", "--output", str(tmp_path / "out")]
    with pytest.raises(ValueError, match="train_size: 40 there, 30 now"):
        debiasing_methods.main([*argv, *other])


def test_the_baseline_cannot_be_left_out(capsys):
    with pytest.raises(SystemExit):
        debiasing_methods.main(["--methods", "oracle"])
    assert "must include single" in capsys.readouterr().err
