"""Sweeps and their results against slow loops that are plainly right."""

from __future__ import annotations

import csv
import io
import json
import math
import warnings

import pytest
import torch
import torchmetrics
from laplace.baselaplace import KronLaplace
from laplace.lllaplace import KronLLLaplace
from torch import nn
from torch.utils.data import DataLoader

from laplace_debias.evaluation.sweep import default_grid, sweep_prior_precision
from laplace_debias.evaluation.sweep_metrics import GaussianNLL
from laplace_debias.evaluation.sweep_result import SweepResult
from tests.fitted_predictive import (
    double_precision,  # noqa: F401
    fitted_mlp,
    slow_nll,
)

GRID = [0.05, 1.0, 30.0]

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.mark.parametrize("cls", [KronLaplace, KronLLLaplace])
@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm"])
def test_classification_agrees_with_a_slow_loop(cls, link):
    la, loader = fitted_mlp(cls)
    la.prior_precision = 3.0
    result = sweep_prior_precision(la, loader, GRID, link_approx=link)
    assert la.prior_precision.tolist() == [3.0]
    assert result.values["nll"] == pytest.approx(slow_nll(la, loader, GRID, link), rel=1e-10)
    assert result.n_data == 20


@pytest.mark.parametrize("cls", [KronLaplace, KronLLLaplace])
def test_regression_agrees_with_a_slow_loop(cls):
    la, loader = fitted_mlp(cls, "regression", sigma_noise=0.4)
    result = sweep_prior_precision(la, loader, GRID, metrics=["nll", "mse"])
    assert result.values["nll"] == pytest.approx(slow_nll(la, loader, GRID), rel=1e-10)
    x, y = loader.dataset.tensors
    mse = (la.model(x) - y).square().mean().item()
    assert result.values["mse"] == pytest.approx([mse] * 3)
    assert result.link_approx is None


def test_layerwise_grid():
    la, loader = fitted_mlp()
    grid = torch.rand(3, 4) + 0.1
    result = sweep_prior_precision(la, loader, grid)
    assert result.prior_precisions.shape == (3, 4)
    assert result.values["nll"] == pytest.approx(slow_nll(la, loader, grid), rel=1e-10)
    assert result.best("nll").shape == (4,)


def test_mc_link_converges_to_upstreams_and_follows_the_generator():
    la, loader = fitted_mlp()
    seeded = [
        sweep_prior_precision(
            la,
            loader,
            GRID,
            link_approx="mc",
            n_samples=20,
            generator=torch.Generator().manual_seed(seed),
        ).values["nll"]
        for seed in (0, 0, 1)
    ]
    assert seeded[0] == seeded[1] != seeded[2]
    torch.manual_seed(0)
    many = sweep_prior_precision(la, loader, GRID, link_approx="mc", n_samples=20_000)
    sampled = sweep_prior_precision(
        la, loader, GRID, link_approx="mc", n_samples=20_000, method="samples"
    )
    expected = []
    for delta in GRID:
        la.prior_precision = delta
        total = 0.0
        for x, y in loader:
            probs = la.predictive_samples(x, n_samples=20_000).mean(0)
            total -= probs[range(len(y)), y].log().sum().item()
        expected.append(total / 20)
    assert many.values["nll"] == pytest.approx(expected, rel=5e-3)
    assert sampled.values["nll"] == pytest.approx(expected, rel=5e-3)


def test_metrics_are_fresh_for_every_point_and_the_users_is_untouched():
    la, loader = fitted_mlp()
    mine = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
    mine.update(torch.tensor([0, 0]), torch.tensor([1, 1]))
    result = sweep_prior_precision(la, loader, GRID, metrics={"mine": mine})
    by_name = sweep_prior_precision(la, loader, GRID, metrics=["accuracy", "ece"])
    assert result.values["mine"] == by_name.values["accuracy"]
    assert result.higher_is_better == {"mine": True}
    assert by_name.higher_is_better == {"accuracy": True, "ece": False}
    assert mine.compute().item() == 0.0
    again = sweep_prior_precision(la, loader, [1.0, 1.0, 1.0], metrics=["nll"])
    assert len(set(again.values["nll"])) == 1


def test_batch_size_and_budget_do_not_change_the_values():
    la, loader = fitted_mlp()
    one = DataLoader(loader.dataset, batch_size=20)
    expected = sweep_prior_precision(la, one, GRID, metrics=["nll", "ece"])
    got = sweep_prior_precision(la, loader, GRID, metrics=["nll", "ece"], memory_budget=1)
    assert got.values["nll"] == pytest.approx(expected.values["nll"], rel=1e-12)
    assert got.values["ece"] == pytest.approx(expected.values["ece"], rel=1e-6)


def test_default_grid_is_the_papers():
    la, loader = fitted_mlp()
    result = sweep_prior_precision(la, loader)
    expected = [30 * 10 ** (-4 + i / 3) for i in range(13)] + [300.0]
    assert result.prior_precisions.tolist() == pytest.approx(expected)
    assert torch.equal(default_grid(30), 30 * default_grid(1))


def test_mappings_in_the_loader():
    class Net(nn.Sequential):
        def forward(self, batch):
            return super().forward(batch["input_ids"])

    la, loader = fitted_mlp()
    expected = sweep_prior_precision(la, loader, GRID).values["nll"]
    la.model = Net(*la.model)
    mappings = [{"input_ids": x, "labels": y} for x, y in loader]
    assert sweep_prior_precision(la, mappings, GRID).values["nll"] == pytest.approx(expected)


def test_gaussian_nll_is_nan_without_a_density():
    metric = GaussianNLL(0.1)
    metric.update(torch.zeros(1, 2), -torch.eye(2).unsqueeze(0), torch.zeros(1, 2))
    assert math.isnan(metric.compute())


def test_nan_points_are_reported_and_never_chosen():
    nan = float("nan")
    grid = torch.tensor([0.1, 1.0, 10.0, 100.0])
    result = SweepResult(grid, {"nll": (nan, 0.5, 0.4, 0.6)}, {"nll": False}, 1, "probit")
    with pytest.warns(UserWarning, match="NaN at grid points"):
        assert result.best("nll").item() == 10.0
    assert result.nan_points("nll") == (0,)
    empty = SweepResult(grid, {"nll": (nan,) * 4}, {"nll": False}, 1, "probit")
    with pytest.raises(ValueError, match="NaN"):
        empty.best("nll")


def test_best_follows_the_direction_and_warns_on_the_edge():
    grid = torch.tensor([0.1, 1.0, 10.0])
    values = {"nll": (0.3, 0.2, 0.4), "accuracy": (0.3, 0.2, 0.4)}
    result = SweepResult(grid, values, {"nll": False, "accuracy": True}, 1, "probit")
    assert result.best("nll").item() == 1.0
    with pytest.warns(UserWarning, match="edge.*larger"):
        assert result.best("accuracy").item() == 10.0
    unsorted = SweepResult(grid[[1, 0, 2]], {"nll": (0.1, 0.2, 0.3)}, {"nll": False}, 1, "probit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert unsorted.best("nll").item() == 1.0
    with pytest.raises(ValueError, match="ece"):
        result.best("ece")


def test_tables_and_files(tmp_path):
    grid = torch.tensor([0.1, 1.0])
    result = SweepResult(grid, {"nll": (0.3, float("nan"))}, {"nll": False}, 7, "probit")
    assert len(str(result).splitlines()) == 3
    rows = list(csv.reader(io.StringIO(result.to_csv(tmp_path / "sweep.csv"))))
    assert rows[0] == ["prior_precision", "nll"] and float(rows[1][1]) == 0.3
    content = json.loads(result.to_json(tmp_path / "sweep.json"))
    assert content["values"]["nll"] == [0.3, None] and content["n_data"] == 7
    assert (tmp_path / "sweep.csv").read_text() == result.to_csv()
    assert json.loads((tmp_path / "sweep.json").read_text()) == content
    layerwise = SweepResult(torch.ones(2, 3), {"nll": (1.0, 2.0)}, {"nll": False}, 7, None)
    assert layerwise.to_csv().startswith("prior_precision_0,prior_precision_1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prior_precisions": [1.0, -1.0]}, "positive"),
        ({"prior_precisions": [1.0, 0.0]}, "positive"),
        ({"prior_precisions": [float("nan")]}, "positive"),
        ({"prior_precisions": torch.ones(2, 3)}, "length"),
        ({"link_approx": "softmax"}, "link_approx"),
        ({"metrics": ["f1"]}, "f1"),
        ({"metrics": []}, "at least one metric"),
        ({"metrics": {"mine": torch.mean}}, "torchmetrics"),
        ({"method": "quick"}, "method"),
    ],
)
def test_bad_input_leaves_everything_as_it_was(change, message):
    la, loader = fitted_mlp()
    la.prior_precision = 5.0
    arguments = {"prior_precisions": GRID, **change}
    with pytest.raises(ValueError, match=message):
        sweep_prior_precision(la, loader, arguments.pop("prior_precisions"), **arguments)
    assert la.prior_precision.tolist() == [5.0]
