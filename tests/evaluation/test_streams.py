"""Streams into reports: what is added, what is refused, and that nothing is lost by refusing."""

from __future__ import annotations

import math

import pytest
import torch

from laplace_debias.evaluation.metrics import ECE
from laplace_debias.evaluation.streams import CalibrationMetrics
from laplace_debias.evaluation.table import metric_table

# three predictions over two classes: right with 0.75, wrong with 0.6, right with 0.9
PROBS = torch.tensor([[0.75, 0.25], [0.4, 0.6], [0.1, 0.9]], dtype=torch.float64)
LABELS = torch.tensor([0, 0, 1])


def report_of(probs=PROBS, labels=LABELS, **kwargs):
    metrics = CalibrationMetrics(**kwargs)
    metrics.update(probs.log(), labels)
    return metrics.compute()


def random_predictions(n=400, C=7, sharpness=4.0, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(n, C, generator=generator, dtype=dtype)
    return logits.log_softmax(-1), torch.randint(C, (n,), generator=generator)


def test_report_by_hand():
    report = report_of(n_bins=10)
    assert report.n_data == 3
    assert report.accuracy == pytest.approx(2 / 3)
    nll = -(math.log(0.75) + math.log(0.4) + math.log(0.9)) / 3
    assert report.nll == pytest.approx(nll, rel=1e-12)
    assert report.brier == pytest.approx((2 * 0.25**2 + 2 * 0.6**2 + 2 * 0.1**2) / 3, rel=1e-12)
    assert report.ece == pytest.approx((0.25 + 0.6 + 0.1) / 3, rel=1e-6)
    h = [-sum(p * math.log(p) for p in row) for row in PROBS.tolist()]
    assert report.mean_entropy == pytest.approx(sum(h) / 3, rel=1e-12)
    assert report.ood is None


def test_ood_by_hand():
    metrics = CalibrationMetrics()
    metrics.update(PROBS.log(), LABELS)  # distances from 1/2: 0.25, 0.1, 0.4
    metrics.update_ood(torch.tensor([[0.5, 0.5], [0.7, 0.3]], dtype=torch.float64).log())
    ood = metrics.compute().ood
    # of six (ID, OOD) pairs the OOD entropy is the larger in all but (0.1, 0.2)
    assert ood.auroc == pytest.approx(5 / 6)
    assert ood.n_data == metrics.n_ood == 2
    assert ood.mean_entropy == pytest.approx(
        (math.log(2) - 0.7 * math.log(0.7) - 0.3 * math.log(0.3)) / 2, rel=1e-12
    )


def test_streaming_equals_one_batch_and_the_table():
    log_probs, labels = random_predictions()
    whole, parts = CalibrationMetrics(), CalibrationMetrics()
    whole.update(log_probs, labels)
    for lp, y in zip(log_probs.split(17), labels.split(17), strict=True):
        parts.update(lp, y)
    report, streamed = whole.compute(), parts.compute()
    for name, value in report.scalars().items():
        assert streamed.scalars()[name] == pytest.approx(value, rel=1e-6)
    for name, make in metric_table("classification").items():
        metric = make()
        metric.update(log_probs, labels)
        assert getattr(report, name) == metric.compute().item()
    assert sum(report.bins.count) == sum(report.adaptive_bins.count) == len(labels)
    assert report.bins.calibration_error == pytest.approx(report.ece, rel=1e-5)


def test_bins_are_made_of_what_the_ece_saw():
    log_probs, labels = random_predictions(dtype=torch.float32)
    ece = ECE(5)
    ece.update(log_probs, labels)
    metrics = CalibrationMetrics(5)
    metrics.update(log_probs, labels)
    assert metrics.compute().bins.calibration_error == pytest.approx(ece.compute().item(), rel=1e-5)


def test_further_dimensions_are_flattened():
    log_probs, labels = random_predictions(n=24)
    flat, deep = CalibrationMetrics(), CalibrationMetrics()
    flat.update(log_probs, labels)
    deep.update(log_probs.unflatten(0, (4, 6)), labels.unflatten(0, (4, 6)))
    assert deep.compute() == flat.compute()


def test_nll_is_infinite_only_where_a_log_probability_is():
    assert report_of(torch.tensor([[1.0, 0.0]]), torch.tensor([1])).nll == math.inf
    assert report_of(torch.tensor([[1.0, 0.0]]), torch.tensor([0])).nll == 0.0
    metrics = CalibrationMetrics()
    metrics.update(torch.tensor([[0.0, 2000.0]]).log_softmax(-1), torch.tensor([0]))
    assert metrics.compute().nll == 2000.0


def test_rounding_above_one_is_taken_for_one():
    probs = torch.tensor([[1.0 + 1e-6, 0.0], [0.0, 1.0]])
    report = report_of(probs, torch.tensor([0, 1]))
    assert report.accuracy == 1.0 and report.nll == 0.0
    assert report.ece == 0.0  # torchmetrics' softmax would have made it 0.27


@pytest.mark.parametrize(
    ("log_probs", "labels", "match"),
    [
        (torch.tensor([[0.7, 0.7]]).log(), torch.tensor([0]), "sum to one.*logarithm 0.3365"),
        (torch.tensor([[2.0, -1.0]]), torch.tensor([0]), "sum to one"),
        (torch.tensor([[-math.inf, -math.inf]]), torch.tensor([0]), "sum to one"),
        (torch.tensor([[math.nan, 0.0]]), torch.tensor([0]), "without NaN.*1 of 1 rows"),
        (PROBS[:1].log(), torch.tensor([2]), r"indices in \[0, 1\].*\[2, 2\]"),
        (PROBS[:1].log(), torch.tensor([-1]), r"indices in \[0, 1\]"),
        (PROBS[:1].log(), torch.tensor([0.0]), "integer dtype"),
        (PROBS[:1].log(), torch.tensor([[0]]), "integer dtype"),
        (PROBS[:1].log(), torch.tensor([0, 1]), "1 labels, one per prediction, got 2"),
        (torch.tensor([0.5, 0.5]).log(), torch.tensor([0, 1]), r"shape \[N, C\]"),
        (torch.full((1, 3), 1 / 3).log(), torch.tensor([0]), "2 classes as before, got 3"),
    ],
)
def test_bad_predictions_are_refused_and_nothing_is_added(log_probs, labels, match):
    metrics = CalibrationMetrics()
    metrics.update(PROBS.log(), LABELS)
    with pytest.raises(ValueError, match=rf"Expected.*{match}.*Remedy"):
        metrics.update(log_probs, labels)
    assert metrics.compute() == report_of()


def test_other_bad_arguments():
    with pytest.raises(ValueError, match="n_bins >= 1"):
        CalibrationMetrics(0)
    with pytest.raises(ValueError, match="at least one in-distribution"):
        CalibrationMetrics().compute()
    with pytest.raises(ValueError, match="without NaN"):
        CalibrationMetrics().update_ood(torch.full((1, 2), math.nan))
