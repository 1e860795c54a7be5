"""Baselines beside the methods, for classification and regression."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, evaluate
from laplace_debias.comparison import compare
from laplace_debias.comparison.baselines import BASELINES, best_temperature, check_baselines

GRID = (0.4, 4.0, 40.0)


def _problem(regression=False, n=40):
    torch.manual_seed(0)
    X = torch.randn(n, 3, dtype=torch.float64)
    y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
    y = X @ torch.randn(3, 2).double() + 0.3 * torch.randn(n, 2) if regression else y
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2 if regression else 3)).double()
    return net, DataLoader(TensorDataset(X, y), batch_size=7), (X + 0.1, y), (2 * X, y)


def test_every_baseline_has_its_rows():
    net, train, test, val = _problem()
    result = compare(
        net, train, test, methods=("single", "full"), baselines=BASELINES, val_loader=val,
        ood_loader=5 * test[0], budgets=(8,), n_draws=1, prior_precisions=GRID,
    )  # fmt: skip
    assert result.methods == ("single", "full", *BASELINES)
    assert [len(result.select(name)) for name in BASELINES] == [1, 1, 3, 3, 3]
    (plain,), (scaled,) = result.select("plain"), result.select("temperature")
    assert plain.metrics["nll"] == pytest.approx(evaluate(net, test).nll)
    T = best_temperature(net, val)
    with torch.no_grad():
        nll = nn.functional.cross_entropy(net(test[0]) / T, test[1]).item()
    assert scaled.metrics["nll"] == pytest.approx(nll)
    assert scaled.metrics["val_nll"] <= plain.metrics["val_nll"] + 1e-9
    last = Laplace(net, "classification", "last_layer", "kron", debias="single")
    last.fit(train, n_data=40)
    for row in result.select("last-layer"):
        last.prior_precision = row.prior_precision
        assert row.metrics["nll"] == pytest.approx(evaluate(last, test).nll)
    assert result.select("diagonal")[0].budget == 40 and result.select("prior-only")[0].budget == 0
    costs = {name: result.select(name)[0].cost for name in result.methods}
    assert costs["single"]["backward"] == 8 * 2 and costs["diagonal"]["backward"] == 40 * 2
    assert costs["full"]["seconds"] > 0 and costs["plain"]["backward"] == 0
    assert all("ood_fpr95" in row.metrics for row in result.rows)
    assert "prior-only" not in result.table() and "single" in str(result)


def test_prior_precisions_are_chosen_on_validation_data():
    net, train, test, val = _problem()
    result = compare(
        net, train, test, methods=("single",), baselines=("plain",), val_loader=val,
        budgets=(8, 16), n_draws=2, prior_precisions=GRID,
    )  # fmt: skip
    tuned = result.tuned()
    assert [(row.method, row.budget, row.draw) for row in tuned] == [
        ("single", 8, 0), ("single", 8, 1), ("single", 16, 0), ("single", 16, 1), ("plain", 0, 0),
    ]  # fmt: skip
    for row in tuned:
        rivals = [r for r in result.select(row.method, row.budget) if r.draw == row.draw]
        assert row.metrics["val_nll"] == min(r.metrics["val_nll"] for r in rivals)
    with pytest.raises(ValueError, match="Expected a metric among"):
        compare(net, train, test, methods=("plain",), budgets=(8,)).tuned()


def test_regression():
    net, train, test, shifted = _problem(regression=True)
    result = compare(
        net, train, test, methods=("single", "two-batch", "full"),
        baselines=("plain", "last-layer", "prior-only", "diagonal"), likelihood="regression",
        laplace={"sigma_noise": 0.3}, ood_loader=shifted, budgets=(8,), n_draws=2,
        prior_precisions=GRID,
    )  # fmt: skip
    plain = evaluate(net, test, likelihood="regression", sigma_noise=0.3)
    (row,) = result.select("plain")
    assert row.metrics["nll"] == pytest.approx(plain.nll)
    assert row.metrics["crps"] == pytest.approx(plain.crps)
    assert row.metrics["coverage_90"] == pytest.approx(plain.coverage[0.9])
    la = Laplace(net, "regression", "all", "kron", debias="single", sigma_noise=0.3)
    la.fit(train, n_data=40)
    for row in result.select("full"):
        la.prior_precision = row.prior_precision
        report = evaluate(la, test)
        assert row.metrics["nll"] == pytest.approx(report.nll, rel=1e-6)
        assert row.metrics["sharpness"] == pytest.approx(report.sharpness, rel=1e-6)
        assert row.metrics["ood_nll"] == pytest.approx(evaluate(la, shifted).nll, rel=1e-6)
    assert 0 < result.gap_ratio("nll")[8] < math.inf
    sharp = {name: result.select(name)[0].metrics["sharpness"] for name in result.methods}
    assert sharp["plain"] == pytest.approx(0.3)
    assert sharp["prior-only"] > sharp["diagonal"] > sharp["plain"]


def test_what_cannot_be_made_is_refused():
    with pytest.raises(ValueError, match=r"baselines among \['plain'"):
        check_baselines(["swag"], "classification", None)
    with pytest.raises(ValueError, match="with a `val_loader`"):
        check_baselines(["temperature"], "classification", None)
    with pytest.raises(ValueError, match="for a classification"):
        check_baselines(["temperature"], "regression", [])


def test_baselines_resume(tmp_path):
    net, train, test, val = _problem()
    options = {"methods": ("single",), "budgets": (8,), "n_draws": 1, "val_loader": val}
    first = compare(net, train, test, folder=tmp_path, baselines=("diagonal",), **options)
    second = compare(net, train, test, folder=tmp_path, baselines=("diagonal",), **options)
    assert first.rows == second.rows and second.rows[-1].cost == first.rows[-1].cost
