"""Input factors of few data, with output factors of the full batch."""

import pytest
import torch
from torch import nn

from examples.research import input_factors
from examples.research.input_factors import from_few, inputs_of, rows_of, with_inputs
from examples.research.inverse_lab import reference
from examples.research.inverse_problems import InverseProblem
from laplace_debias import posterior_distance
from laplace_debias.kfac.engine import Engine


@pytest.fixture
def problem():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)).double()
    size = (torch.randn(40, 2, 1, 1, dtype=torch.float64) / 2).exp()
    x, y = size * torch.randn(40, 2, 5, 5, dtype=torch.float64), torch.arange(40) % 3
    return InverseProblem("made", net, "classification", x, y, x[:6], (1.0,), (x[:6], y[:6]))


def test_all_data_are_the_full_batch_and_few_are_nearer_if_carried(problem):
    full, engine = reference(problem, 1.0), Engine(problem.model, "classification")
    whole = inputs_of(engine, problem.x)

    def distance(A):
        la = with_inputs(problem, full._posterior(), 1.0, A)
        return posterior_distance(la, full, problem.x_test)

    assert distance(list(whole.A)) < 1e-7
    found = {False: 0.0, True: 0.0}
    for rows in torch.randperm(40).split(10):
        few = inputs_of(engine, problem.x[rows])
        for carry in found:
            A = from_few(engine, few, whole, carry=carry)
            assert A[2] is whole.A[2]  # one row per datum is known of all
            found[carry] += distance(A)
    assert found[True] < found[False] / 2


def test_it_prints_a_table(problem, monkeypatch, capsys):
    lines = rows_of(problem, 1.0, (8, 20), 2)
    assert [line.split(" | ")[2] for line in lines] == ["8 of 40", "20 of 40"]
    monkeypatch.setitem(input_factors.PROBLEMS, "digits-cnn", lambda: problem)
    input_factors.main(["--problems", "digits-cnn", "--draws", "1", "--sizes", "8"])
    assert "| made | 1 | 8 of 40 |" in capsys.readouterr().out
