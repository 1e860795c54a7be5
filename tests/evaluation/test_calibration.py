"""Calibration errors against torchmetrics and loops in plain Python."""

import math

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_calibration_error

from laplace_debias.evaluation.calibration import AdaptiveECE, ClasswiseECE
from tests.evaluation.test_metrics import predictions, value_of


@pytest.mark.parametrize("n_bins", [1, 4, 15])
def test_classwise_error_is_torchmetrics_class_by_class(n_bins):
    logits, labels = predictions()
    log_probs = logits.log_softmax(-1)
    each = [
        binary_calibration_error(log_probs[:, c].exp(), (labels == c).long(), n_bins, "l1")
        for c in range(5)
    ]
    ours = value_of(
        ClasswiseECE(n_bins), (log_probs[:77], labels[:77]), (log_probs[77:], labels[77:])
    )
    assert ours == pytest.approx(torch.stack(each).mean().item(), rel=1e-5)


@pytest.mark.parametrize("n_bins", [1, 3, 15])
def test_adaptive_error_against_numpy(n_bins):
    logits, labels = predictions(n=101)
    log_probs = logits.log_softmax(-1)
    confidence, predicted = log_probs.exp().max(-1)
    order = np.argsort(confidence.numpy(), kind="stable")
    right = (predicted == labels).numpy().astype(float)
    expected = sum(
        abs(sum(right[i] - confidence[i].item() for i in part))
        for part in np.array_split(order, n_bins)
    )
    ours = value_of(AdaptiveECE(n_bins), (log_probs[:9], labels[:9]), (log_probs[9:], labels[9:]))
    assert ours == pytest.approx(expected / 101, rel=1e-5)


def test_errors_that_cancel_in_one_wide_bin_are_seen_by_equal_masses():
    confidence = torch.cat([torch.full((50,), 0.94), torch.full((50,), 0.98)]).double()
    log_probs = torch.stack([confidence, 1 - confidence], -1).log()
    labels = torch.cat([torch.zeros(50), torch.arange(50) < 4]).long()  # too modest, too sure
    wide = value_of(AdaptiveECE(1), (log_probs, labels))
    assert value_of(AdaptiveECE(2), (log_probs, labels)) == pytest.approx(0.06, abs=1e-6)
    assert wide < 1e-6


@pytest.mark.parametrize("make", [AdaptiveECE, ClasswiseECE])
def test_nan_and_soft_labels(make):
    logits, labels = predictions()
    log_probs = logits.log_softmax(-1)
    soft = torch.nn.functional.one_hot(labels, 5).double()
    assert value_of(make(), (log_probs, soft)) == pytest.approx(
        value_of(make(), (log_probs, labels))
    )
    log_probs[3, 2] = math.nan
    assert math.isnan(value_of(make(), (log_probs, labels)))


def test_resetting_forgets_and_bad_bins_are_refused():
    logits, labels = predictions()
    metric = ClasswiseECE()
    first = value_of(metric, (logits.log_softmax(-1), labels))
    metric.reset()
    assert value_of(metric, (logits.log_softmax(-1), labels)) == first
    with pytest.raises(ValueError, match="n_bins >= 1"):
        ClasswiseECE(0)
