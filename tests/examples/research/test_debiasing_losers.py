"""The example about what lost runs at a small size, and resumes."""

from examples.research import debiasing_losers


def test_losers_run_and_resume(tmp_path, capsys):
    methods = ["two folds", "four random splits into two", "two folds, not monotone"]
    methods += ["Ledoit and Wolf 2020", "EKFAC, held-out half", "score: Frobenius norm"]
    methods += ["score: behind last layer", "n_pool = 4 M", "n_pool = all"]
    argv = ["--budgets", "16", "--draws", "1", "--epochs", "5", "--output", str(tmp_path)]
    rows = debiasing_losers.main([*argv, "--methods", *methods])
    assert [row["method"] for row in rows] == ["single", *methods]
    assert all(0 < row["nll"] < 10 for row in rows)
    assert debiasing_losers.main([*argv, "--methods", *methods]) == rows
    assert (tmp_path / "debiasing_losers.png").exists()
    assert "n_pool = 4 M" in capsys.readouterr().out
