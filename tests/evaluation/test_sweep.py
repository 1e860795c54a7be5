"""Sweeps against slow loops that are plainly right, and what they make of NaN."""

from __future__ import annotations

import math

import pytest
import torch
import torchmetrics
from laplace.baselaplace import KronLaplace
from laplace.lllaplace import KronLLLaplace
from torch import nn
from torch.utils.data import DataLoader

from laplace_debias.evaluation.sweep import sweep_prior_precision
from laplace_debias.predictive import predictions
from laplace_debias.predictive.eigenblocks import default_grid
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
    assert result.values["mine"] == pytest.approx(by_name.values["accuracy"], rel=1e-6)
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


def nan_at(monkeypatch, point, where=0):
    """Put a NaN into the first row of one grid point's predictions."""
    original = predictions.glm_predictions

    def broken(*args, **kwargs):
        for i, prediction in enumerate(original(*args, **kwargs)):
            if i == point:
                prediction = tuple(part.clone() for part in prediction)
                prediction[where][0] = math.nan
            yield prediction

    monkeypatch.setattr("laplace_debias.evaluation.predictors.glm_predictions", broken)


def test_a_nan_prediction_makes_its_grid_point_nan_in_every_metric(monkeypatch):
    la, loader = fitted_mlp()
    # every label is 0, the argmax of NaN
    batches = [(x, torch.zeros_like(y)) for x, y in loader]
    names = ["accuracy", "nll", "ece", "brier", "mean_entropy"]
    expected = sweep_prior_precision(la, batches, GRID, metrics=names)
    mine = {"mine": torchmetrics.classification.MulticlassAccuracy(3, average="micro")}
    nan_at(monkeypatch, 1)
    result = sweep_prior_precision(la, batches, GRID, metrics=names)
    for name in names:
        assert result.nan_points(name) == (1,), name
        assert result.values[name][::2] == expected.values[name][::2]
    assert sweep_prior_precision(la, batches, GRID, metrics=mine).nan_points("mine") == (1,)
    with pytest.warns(UserWarning, match="NaN at grid points"):
        assert result.best_index("accuracy") != 1


@pytest.mark.parametrize("where", [0, 1], ids=["mean", "covariance"])
def test_a_nan_regression_makes_its_grid_point_nan_in_every_metric(monkeypatch, where):
    la, loader = fitted_mlp(likelihood="regression")
    names = ["nll", "rmse", "mse", "coverage_50", "coverage_90", "coverage_95"]
    nan_at(monkeypatch, 2, where)
    result = sweep_prior_precision(la, loader, GRID, metrics=names)
    for name in names:
        assert result.nan_points(name) == (2,), name


def test_nan_outputs_of_the_network_are_nan_everywhere():
    la, loader = fitted_mlp()
    with torch.no_grad():
        la.model[2].bias[1] = math.nan
    result = sweep_prior_precision(la, loader, GRID, metrics=["accuracy", "ece"])
    assert result.nan_points("accuracy") == result.nan_points("ece") == (0, 1, 2)
    with pytest.raises(ValueError, match="NaN for 'accuracy' at all 3.*Remedy"):
        result.best("accuracy")


def test_one_mini_batch_is_enough():
    la, loader = fitted_mlp()
    pair = loader.dataset.tensors
    expected = sweep_prior_precision(la, [pair], GRID).values
    assert sweep_prior_precision(la, pair, GRID).values == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: [x], r"`\(X, y\)` with targets, got a tensor of shape \[20, 4\]"),
        (lambda x, y: [(x * math.nan, y)], "finite inputs, got 80 NaN"),
        (lambda x, y: [(x, y + 3)], r"class indices in \[0, 2\].*got values in \[3, 5\]"),
        (lambda x, y: [(x, y.double())], "integer dtype"),
        (lambda x, y: [(x, y[:7])], "20 targets for as many data, got 7"),
        (lambda x, y: [(x.numpy(), y)], "got ndarray"),
    ],
)
def test_bad_data_are_refused_with_a_remedy(change, message):
    la, loader = fitted_mlp()
    with pytest.raises(ValueError, match=rf"Expected.*{message}.*Remedy"):
        sweep_prior_precision(la, change(*loader.dataset.tensors), GRID)


def test_underflowing_probabilities_have_a_finite_nll():
    la, loader = fitted_mlp()
    with torch.no_grad():
        la.model[2].weight *= 1e5
    la.prior_precision = 1e12
    x, y = loader.dataset.tensors
    assert (la(x)[range(20), y] == 0).any()
    (found,) = sweep_prior_precision(la, (x, y), [1e12]).values["nll"]
    f, S = la._glm_predictive_distribution(x)
    scores = f / (1 + math.pi / 8 * S.diagonal(dim1=1, dim2=2)).sqrt()
    assert found == pytest.approx(-scores.log_softmax(-1)[range(20), y].mean().item(), rel=1e-9)
    assert found > 708  # -log of the smallest normal number
