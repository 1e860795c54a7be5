"""Runs of a comparison: the same metrics as an evaluation, on every form of data."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, evaluate, sweep_prior_precision
from laplace_debias.comparison.runs import evaluate_sets, laplace_run, vanilla_run

GRID = [0.4, 4.0, 40.0]
NAMES = ("accuracy", "nll", "ece", "brier", "mean_entropy")


@pytest.fixture
def problem():
    torch.manual_seed(0)
    X = torch.randn(30, 2, dtype=torch.float64)
    y = (X[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    return model, X, y


def posterior(model, X, y):
    la = Laplace(model, "classification", "all", "kron", debias="single")
    la.fit((X, y), n_data=100)
    return la


def test_vanilla_is_the_evaluation_of_the_model(problem):
    model, X, y = problem
    (values,) = evaluate_sets(vanilla_run(model), {"": (X, y), "ood": 5 * X}, 1, 15)
    report = evaluate(model, (X, y), ood_loader=5 * X)
    assert {name: values[name] for name in NAMES} == {name: getattr(report, name) for name in NAMES}
    assert values["ood_auroc"] == report.ood.auroc
    assert values["ood_mean_entropy"] == report.ood.mean_entropy
    assert set(values) == {*NAMES, "ood_auroc", "ood_mean_entropy"}


@pytest.mark.parametrize("gap", [1.0, 1e4], ids=["ordinary", "underflowing"])
def test_posteriors_have_the_sweeps_values(problem, gap):
    model, X, y = problem
    with torch.no_grad():
        model[2].weight *= gap
    la = posterior(model, X, y)
    grid = [delta * gap**2 for delta in GRID]
    values = evaluate_sets(laplace_run([la], grid, "probit", 1, 0), {"": [(X, y)]}, 3, 15)
    swept = sweep_prior_precision(la, [(X, y)], grid, metrics=NAMES).values
    for name in NAMES:
        assert [row[name] for row in values] == pytest.approx(swept[name], rel=1e-12)
    if gap > 1:
        assert 708 < values[-1]["nll"] < math.inf


def test_every_form_of_a_set_gives_the_same_values(problem):
    model, X, y = problem
    run = vanilla_run(model)
    (expected,) = evaluate_sets(run, {"": [(X, y)], "ood": [(5 * X, y)]}, 1, 15)
    data = TensorDataset(X, y)
    for test, ood in (((X, y), (5 * X, y)), (DataLoader(data, 30), [[5 * X, y]])):
        assert evaluate_sets(run, {"": test, "ood": ood}, 1, 15) == [expected]
    unlabelled = DataLoader(TensorDataset(5 * X), batch_size=30)
    (found,) = evaluate_sets(run, {"": (X, y), "ood": unlabelled}, 1, 15)
    assert found["ood_auroc"] == expected["ood_auroc"] and "ood_nll" not in found


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (lambda X, y: {"": []}, "at least one labelled datum in `test_loader`"),
        (lambda X, y: {"": [X]}, "with targets, got a tensor of shape"),
        (lambda X, y: {"": (X, y), "far": []}, r"at least one datum in `ood_loader\['far'\]`"),
        (lambda X, y: {"": (X * math.nan, y)}, "finite inputs, got 60"),
        (lambda X, y: {"": (X, y + 5)}, "class indices in"),
    ],
)
def test_bad_sets_are_refused_with_a_remedy(problem, sets, message):
    model, X, y = problem
    for run in (vanilla_run(model), laplace_run([posterior(model, X, y)], [1.0], "probit", 1, 0)):
        with pytest.raises(ValueError, match=rf"Expected.*{message}.*Remedy"):
            evaluate_sets(run, sets(X, y), 1, 15)


def test_posteriors_are_numbered_one_after_the_other(problem):
    model, X, y = problem
    las = [posterior(model, X[:n], y[:n]) for n in (10, 30)]
    values = evaluate_sets(laplace_run(las, GRID, "mc", 5, 0), {"": (X, y)}, 6, 15)
    alone = [evaluate_sets(laplace_run([la], GRID, "mc", 5, 0), {"": (X, y)}, 3, 15) for la in las]
    for found, expected in zip(values, alone[0] + alone[1], strict=True):
        assert found == pytest.approx(expected, rel=1e-9)
