"""The CIFAR example's experiment, whole, on tiny made files and a tiny network."""

import pytest

from examples.cifar10 import draws
from examples.cifar10 import laplace_experiment as experiment

EXPERIMENT = "--budgets 8 16 --n-test 6 --n-train 4 --n-corrupted 3 --severities 1".split()


def test_experiment_from_data_to_figure(arguments, library, tmp_path, capsys):
    more = [*EXPERIMENT, "--n-draws", 2, "--reference-size", 24, "--crossfit"]
    argv = arguments(tmp_path, *more)
    result = experiment.main(argv)
    assert result.reference == "large-batch" and result.budgets("large-batch") == (24,)
    assert result.methods == (
        "plain",
        "large-batch",
        "single",
        "two-batch",
        "crossfit-curvature",
    )
    assert len(result.rows) == 1 + 14 * (1 + 3 * 2 * 2)
    assert result.n_data == 32
    betas = sorted({row.prior_precision / 32 for row in result.select("single")})
    assert betas[0] == pytest.approx(1e-4) and betas[-1] == pytest.approx(10)
    assert {"train_nll", "c1_nll", "c1_auroc"} < set(result.metrics)
    printed = capsys.readouterr().out
    assert "Gap ratio two-batch / single" in printed and "c1     ece" in printed
    ratio = result.gap_ratio("c1_nll")[16]
    line = next(line for line in printed.splitlines() if line.startswith("c1     nll"))
    assert line.split()[-1] == f"{ratio:.2f}"
    figures = {path.name for path in tmp_path.glob("*.png")}
    assert figures == {"figure.png", "figure_sets.png"}
    made = len(library)
    assert made == 3

    again = experiment.run(experiment.parse(argv))
    assert again == result and len(library) == made  # corrupted images come from their file
    for path in tmp_path.glob("*.png"):
        path.unlink()
    redrawn = experiment.main(["--out", str(tmp_path), "--redraw"])
    assert {path.name for path in tmp_path.glob("*.png")} == figures
    assert redrawn.gap_ratio("nll") == result.gap_ratio("nll")
    assert sorted(redrawn.to_csv().splitlines()) == sorted(result.to_csv().splitlines())


def test_experiment_goes_on_after_an_interruption(arguments, tmp_path, monkeypatch):
    small = "--budgets 8 --n-test 4 --n-train 0 --n-corrupted 0 --n-shared 2 --n-draws 2".split()
    expected = experiment.main(arguments(tmp_path / "whole", *small))
    assert expected.reference == "full"

    argv = arguments(tmp_path / "cut", *small)
    assert experiment.main([*argv, "--max-images", "20"]) is None  # the reference is not complete
    fitted = []
    originals = {name: getattr(draws.NestedDraws, name) for name in ("single", "two_batch")}

    def spy(name, stop):
        def fit(self, budget, draw):
            if len(fitted) == stop:
                raise KeyboardInterrupt
            fitted.append((name, budget, draw))
            return originals[name](self, budget, draw)

        return fit

    for stop in (2, None):
        for name in originals:
            monkeypatch.setattr(draws.NestedDraws, name, spy(name, stop))
        if stop is not None:
            with pytest.raises(KeyboardInterrupt):
                experiment.main(argv)
    result = experiment.main(argv)
    assert len(result.rows) == len(expected.rows)
    for row, other in zip(result.rows, expected.rows, strict=True):
        assert row.metrics == pytest.approx(other.metrics, rel=1e-4)
    # full + single-0 were finished together; two-batch-0 was fitted, but its group was cut
    assert fitted.count(("single", 8, 0)) == 1
    assert fitted.count(("two_batch", 8, 0)) == 2
    assert len(fitted) == 2 + 3


def test_experiment_wants_its_inputs(tmp_path, capsys):
    with pytest.raises(SystemExit):
        experiment.main(["--out", str(tmp_path)])
    assert "expected --data and --weights" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="run the experiment first"):
        experiment.main(["--out", str(tmp_path), "--redraw"])
