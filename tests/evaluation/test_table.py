"""One table of metrics, and metrics from outside behind its interface."""

from __future__ import annotations

import math

import pytest
import torch
import torchmetrics
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError

from laplace_debias.evaluation.table import UserMetric, fresh_metrics, metric_table

LOG_PROBS = torch.tensor([[0.75, 0.25], [0.4, 0.6], [0.1, 0.9]], dtype=torch.float64).log()
LABELS = torch.tensor([0, 0, 1])


def test_options_reach_their_metrics():
    classes = metric_table("classification", n_bins=1)
    ece = classes["ece"]()
    ece.update(LOG_PROBS, LABELS)
    assert ece.compute().item() == pytest.approx(0.75 - 2 / 3, rel=1e-5)
    table = metric_table("regression", sigma_noise=2.0, levels=(0.6,))
    assert list(table) == ["nll", "crps", "rmse", "mse", "sharpness", "coverage_60"]
    batch = (torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
    values = {}
    for name, make in table.items():
        metric = make()
        metric.update(*batch)
        values[name] = metric.compute().item()
    nll = 0.5 * (1 / 4 + math.log(4) + math.log(2 * math.pi))
    assert values["nll"] == pytest.approx(nll, rel=1e-6)
    assert values["coverage_60"] == 1.0  # 0.5 standard deviations; without noise it is outside


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_copies_are_fresh_and_apart(likelihood):
    for name in metric_table(likelihood):
        one, other = fresh_metrics([name], 2, likelihood)[name]
        assert one is not other and type(one) is type(other)
        batch = (LOG_PROBS, LABELS)
        if likelihood == "regression":
            batch = (torch.zeros(2, 1), torch.ones(2, 1), torch.ones(2, 1))
        one.update(*batch)
        assert one.update_count == 1 and other.update_count == 0
        other.update(*batch)
        assert other.compute() == one.compute()


def test_metrics_from_outside_get_probabilities():
    (metric,) = fresh_metrics(
        {"mine": MulticlassCalibrationError(2, n_bins=10)}, 1, "classification"
    )["mine"]
    metric.update(LOG_PROBS, LABELS)
    assert metric.compute().item() == pytest.approx((0.25 + 0.6 + 0.1) / 3, rel=1e-6)
    assert metric.higher_is_better is False


def test_what_metrics_from_outside_are_handed():
    seen = []

    class Recorder(torchmetrics.Metric):
        def update(self, preds, target):
            seen.append((preds, target))

        def compute(self):
            return torch.tensor(0.0)

    UserMetric(Recorder()).update(LOG_PROBS, LABELS)
    # torchmetrics' own would turn log-probabilities back by a softmax, others would not
    torch.testing.assert_close(seen[0][0], LOG_PROBS.exp())
    assert torch.equal(seen[0][1], LABELS)


def test_metrics_from_outside_never_see_nan():
    mine = MulticlassAccuracy(2, average="micro")
    metric = UserMetric(mine)
    broken = LOG_PROBS.clone()
    broken[0] = math.nan  # argmax 0, the label
    metric.update(broken, LABELS)
    metric.update(LOG_PROBS, LABELS)
    assert math.isnan(metric.compute())
    metric.reset()
    metric.update(LOG_PROBS, LABELS)
    assert metric.compute().item() == pytest.approx(2 / 3)
    assert mine.update_called is False


def test_regression_metrics_from_outside_by_number_of_arguments():
    seen = []

    class Three(torchmetrics.Metric):
        def update(self, mean, covariance, targets):
            seen.append(covariance)

        def compute(self):
            return torch.tensor(0.0)

    mean, covariance, y = torch.zeros(2, 1), torch.full((2, 1, 1), 3.0), torch.ones(2, 1)
    given = {"two": torchmetrics.MeanSquaredError(), "three": Three()}
    fresh = fresh_metrics(given, 1, "regression", sigma_noise=5.0)
    for (metric,) in fresh.values():
        metric.update(mean, covariance, y)
    assert fresh["two"][0].compute().item() == 1.0
    assert torch.equal(seen[0], covariance)  # of the functions, without noise


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["f1"], "metrics among.*'nll'.*for classification, got 'f1'"),
        ([], "at least one metric, got none"),
        ({"mine": torch.mean}, "a torchmetrics.Metric for 'mine', got builtin"),
    ],
)
def test_what_is_no_metric(metrics, message):
    with pytest.raises(ValueError, match=rf"Expected {message}.*Remedy"):
        fresh_metrics(metrics, 1, "classification")
