"""Predictions of every datum against evaluations that keep averages only."""

import pytest
import torch
from torch import nn

from laplace_debias import Laplace, evaluate
from laplace_debias.evaluation.metrics import entropy_auroc
from laplace_debias.reporting.predictions import halves, predict


def _fitted(kind):
    torch.manual_seed(0)
    X, net = torch.randn(40, 3), nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    y = torch.arange(40) % 2 if kind == "classification" else torch.randn(40, 2)
    la = Laplace(net, kind, "all", "kron", debias="single", sigma_noise=1.0)
    la.fit((X, y), n_data=40)
    return la, X, y


@pytest.mark.parametrize("plain", [True, False])
def test_classification_agrees_with_evaluate(plain):
    la, X, y = _fitted("classification")
    who = la.model if plain else la
    found = predict(who, [(X[:30], y[:30]), (X[30:], y[30:])], "classification")
    report = evaluate(who, (X, y), ood_loader=5 * X)
    assert found.reliability().calibration_error == pytest.approx(report.ece, abs=1e-6)
    assert found.risk_coverage().area == pytest.approx(report.aurc, abs=1e-6)
    far = predict(who, [5 * X], "classification")
    auroc = entropy_auroc(found.uncertainty, far.uncertainty)
    assert far.targets is None and auroc == pytest.approx(report.ood.auroc)


def test_regression_agrees_with_evaluate():
    la, X, y = _fitted("regression")
    found, report = predict(la, (X, y), "regression"), evaluate(la, (X, y))
    assert found.coverage([0.5, 0.9]) == pytest.approx([report.coverage[0.5], report.coverage[0.9]])
    assert found.uncertainty.mean().item() == pytest.approx(report.sharpness, rel=1e-5)
    assert found.risk_coverage().at(1.0) == pytest.approx(report.rmse**2, rel=1e-5)


def test_halves_share_no_datum():
    X, cpu = torch.arange(10.0)[:, None], torch.device("cpu")
    first, second = halves([(X[:5], X[:5]), (X[5:], X[5:])], cpu)
    parts = [torch.cat([y for _, y in half]).flatten().tolist() for half in (first, second)]
    assert sorted(parts[0] + parts[1]) == list(range(10)) and not set(parts[0]) & set(parts[1])
    (batch, *_), _ = halves([{"x": X[:4], "labels": torch.arange(4)}], cpu)
    assert batch["labels"].tolist() == [0, 2] and len(batch["x"]) == 2
    with pytest.raises(ValueError, match="at least two data"):
        halves([(X[:1], X[:1])], cpu)
