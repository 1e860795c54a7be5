"""The map of biases runs at a tiny size, resumes, and keeps its promise on a network."""

import pytest
import torch

from examples.research import bias_map, bias_map_report
from tests.examples.research.made_problem import made_problem

ARGV = ["--batch-sizes", "16", "--draws", "2", "--posterior-draws", "1", "--test-size", "10"]


def test_bias_map_runs_and_resumes(tmp_path, capsys, monkeypatch):
    argv = [*ARGV, "--networks", "MLP", "tokens", "--epochs", "3", "--output", str(tmp_path)]
    factors, posteriors = bias_map.main(argv)
    assert (tmp_path / "bias_map.png").exists()
    kept = tmp_path / "tokens" / "factors expand exact 16.json"
    before = kept.stat().st_mtime_ns
    (tmp_path / "tokens" / "posteriors reduce label 16.json").unlink()
    again, posteriors_again = bias_map.main(argv)
    with monkeypatch.context() as patch:  # what is there needs no training
        patch.setattr(bias_map, "trained_problem", None)
        assert bias_map.main(argv)[0] == factors
    assert kept.stat().st_mtime_ns == before and again == factors
    for one, two in zip(posteriors, posteriors_again, strict=True):
        assert two == {k: v if isinstance(v, str) else pytest.approx(v) for k, v in one.items()}
    assert len(posteriors) == 4 + 3 * 4  # one approximation for the MLP, three for tokens
    assert "held out" in capsys.readouterr().out
    good, low, high = bias_map_report.verdict(factors, "all")
    assert good >= 0.95 and 0.5 < low < high < 2
    biased = [row for row in factors if bias_map_report.overestimation(row, "all") > 1.2]
    assert len(biased) >= 10  # so that the line above says something
    kept.unlink()  # what is not complete can be left out
    redrawn, _ = bias_map.main([*argv, "--redraw"])
    left_out = ("tokens", "exact")
    assert redrawn == [row for row in factors if (row["network"], row["fisher"]) != left_out]
    assert not kept.exists()


def test_shares_by_hand():
    E = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))
    others = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    found = bias_map.shares(E, others)
    assert found == pytest.approx(
        {"top": 0.75, "top, others": 0.5, "all": 10 / 16, "all, others": 0.5}
    )


def test_factors_are_compared_with_the_data_outside_the_mini_batch():
    problem = made_problem()
    rows = bias_map.factor_cell(bias_map.Source(problem), "expand", "exact", 5, 1)
    batch = torch.randperm(12, generator=torch.Generator().manual_seed(5000))[:5]
    rest = torch.tensor([i for i in range(12) if i not in batch.tolist()])
    one, two = (bias_map.factors_of(problem, part, "expand", "exact") for part in (batch, rest))
    for row in rows:
        i = one.names.index(row["layer"])
        expected = bias_map.shares(*(getattr(f, row["factor"])[i].double() for f in (one, two)))
        for key, value in expected.items():
            assert row["draws"][0][key] == pytest.approx(value, rel=1e-4)


def test_the_random_matrix_formula_holds_for_equal_gaussian_rows():
    generator = torch.Generator().manual_seed(0)
    s = torch.cat([torch.tensor([6.0]), torch.ones(59)]).double()
    measured = predicted = 0.0
    for _ in range(50):
        X = torch.randn(80, 60, dtype=s.dtype, generator=generator) * s.sqrt()
        lam, Q = torch.linalg.eigh(X.T @ X / 80)
        measured += Q[:, -1].square() @ s / 50
        predicted += lam[-1] / bias_map.random_matrix(X.T @ X, 80) / 50
    assert float(predicted) == pytest.approx(float(measured), rel=0.05)
