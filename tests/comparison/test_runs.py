"""Runs of a comparison: against laplace-torch's own, by hand, and on every form of data."""

from __future__ import annotations

import math

import laplace
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, evaluate, sweep_prior_precision
from laplace_debias.comparison.runs import evaluate_sets, laplace_run, plain_run
from laplace_debias.data.reading import read
from laplace_debias.evaluation.table import metric_table

GRID = [0.5, 20.0]
NAMES = tuple(metric_table("classification"))


@pytest.fixture(scope="module")
def fitted():
    torch.manual_seed(0)
    X = torch.randn(30, 3, dtype=torch.float64)
    y = torch.randint(3, (30,))
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    las = []
    for part in (slice(0, 12), slice(12, 30)):
        la = Laplace(model, "classification", "all", "kron", debias="single")
        la.fit((X[part], y[part]), n_data=60)
        las.append(la)
    return model, las, X, y


def collect(run, loader, k):
    parts = [[] for _ in range(k)]
    run(loader, lambda i, prediction, y: parts[i].append(prediction[0].exp()))
    return [torch.cat(probs) for probs in parts]


def test_plain_predictions_are_the_networks(fitted):
    model, _, X, y = fitted
    noisy = nn.Sequential(model, nn.Dropout(0.5)).train()
    (probs,) = collect(plain_run(noisy), [(X[:20], y[:20]), (X[20:], y[20:])], 1)
    torch.testing.assert_close(probs, model(X).softmax(-1))
    assert noisy.training


def test_every_posterior_and_prior_precision_is_laplace_torchs(fitted):
    model, las, X, y = fitted
    run = laplace_run(las, GRID, "probit", n_samples=1, seed=0)
    found = collect(run, [(X[:17], y[:17]), (X[17:], y[17:])], len(las) * len(GRID))
    oracle = laplace.Laplace(model, "classification", "all", "kron")
    oracle.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y), 30))
    for number, la in enumerate(las):
        oracle.H = la.H
        for i, delta in enumerate(GRID):
            oracle.prior_precision = delta
            expected = oracle(X, pred_type="glm", link_approx="probit")
            torch.testing.assert_close(found[number * len(GRID) + i], expected, rtol=1e-6, atol=0)


def test_mc_uses_the_same_numbers_for_every_posterior_and_set(fitted):
    _, (la, other), X, y = fitted
    run = laplace_run([la, other, la], GRID, "mc", n_samples=5, seed=3)
    one, again = (collect(run, [(X, y)], 6) for _ in range(2))
    for i in range(6):
        assert torch.equal(one[i], again[i])
    for i in range(2):
        torch.testing.assert_close(one[i], one[4 + i])
    seed = collect(laplace_run([la], GRID, "mc", n_samples=5, seed=4), [(X, y)], 2)
    assert not torch.allclose(seed[0], one[0])


def test_posteriors_of_other_models_cannot_share_passes(fitted):
    _, (la, _), X, y = fitted
    other = Laplace(nn.Linear(3, 3).double(), "classification", "all", "kron", debias="single")
    other.fit((X, y), n_data=60)
    with pytest.raises(ValueError, match="same parameters of one model"):
        laplace_run([la, other], GRID, "probit", 1, 0)
    with pytest.raises(ValueError, match="at least one predictor"):
        laplace_run([], GRID, "probit", 1, 0)


def test_metrics_of_every_set_by_hand():
    probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 1])
    uniform = torch.full((2, 2), 0.5, dtype=torch.float64)

    def run(loader, update, **reading):
        for x, y in read(loader, torch.device("cpu"), **reading):
            for i in range(2):  # the second prediction knows nothing
                update(i, (x.log() if i == 0 else torch.full_like(x, 0.5).log(),), y)

    sets = {"": [(probs, labels)], "far": [(uniform, torch.tensor([0, 1]))], "bare": [uniform]}
    one, two = evaluate_sets(run, sets, 2, n_bins=10)
    assert one["accuracy"] == pytest.approx(2 / 3)
    nll = -torch.tensor([0.9, 0.4, 0.8], dtype=torch.float64).log().mean()
    assert one["nll"] == pytest.approx(nll.item())
    assert one["ece"] == pytest.approx((0.1 + 0.6 + 0.2) / 3)
    assert one["brier"] == pytest.approx((2 * 0.1**2 + 2 * 0.6**2 + 2 * 0.2**2) / 3)
    assert one["far_accuracy"] == 0.5 and one["far_auroc"] == one["bare_auroc"] == 1.0
    assert one["bare_mean_entropy"] == pytest.approx(torch.tensor(2.0).log().item())
    assert "bare_nll" not in one and "far_nll" in one
    assert two["far_auroc"] == 0.5 and two["nll"] == pytest.approx(torch.tensor(2.0).log().item())


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


def test_plain_is_the_evaluation_of_the_model(problem):
    model, X, y = problem
    (values,) = evaluate_sets(plain_run(model), {"": (X, y), "ood": 5 * X}, 1, 15)
    report = evaluate(model, (X, y), ood_loader=5 * X)
    assert {name: values[name] for name in NAMES} == {name: getattr(report, name) for name in NAMES}
    assert values["ood_auroc"] == report.ood.auroc
    assert values["ood_mean_entropy"] == report.ood.mean_entropy
    assert set(values) == {*NAMES, "ood_auroc", "ood_fpr95", "ood_mean_entropy"}


@pytest.mark.parametrize("gap", [1.0, 1e4], ids=["ordinary", "underflowing"])
def test_posteriors_have_the_sweeps_values(problem, gap):
    model, X, y = problem
    with torch.no_grad():
        model[2].weight *= gap
    la = posterior(model, X, y)
    grid = [delta * gap**2 for delta in GRID]
    values = evaluate_sets(laplace_run([la], grid, "probit", 1, 0), {"": [(X, y)]}, 2, 15)
    swept = sweep_prior_precision(la, [(X, y)], grid, metrics=NAMES).values
    for name in NAMES:
        assert [row[name] for row in values] == pytest.approx(swept[name], rel=1e-12)
    if gap > 1:
        assert 708 < values[-1]["nll"] < math.inf


def test_every_form_of_a_set_gives_the_same_values(problem):
    model, X, y = problem
    run = plain_run(model)
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
    for run in (plain_run(model), laplace_run([posterior(model, X, y)], [1.0], "probit", 1, 0)):
        with pytest.raises(ValueError, match=rf"Expected.*{message}.*Remedy"):
            evaluate_sets(run, sets(X, y), 1, 15)


def test_posteriors_are_numbered_one_after_the_other(problem):
    model, X, y = problem
    las = [posterior(model, X[:n], y[:n]) for n in (10, 30)]
    values = evaluate_sets(laplace_run(las, GRID, "mc", 5, 0), {"": (X, y)}, 4, 15)
    alone = [evaluate_sets(laplace_run([la], GRID, "mc", 5, 0), {"": (X, y)}, 2, 15) for la in las]
    for found, expected in zip(values, alone[0] + alone[1], strict=True):
        assert found == pytest.approx(expected, rel=1e-9)
