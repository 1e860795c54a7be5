"""Risk against coverage, by brute force."""

import itertools
import math

import pytest
import torch

from laplace_debias.evaluation.selective import AURC, risk_coverage
from tests.evaluation.test_metrics import predictions, value_of


def test_curve_against_sorting_by_hand():
    logits, labels = predictions(n=60)
    log_probs = logits.log_softmax(-1)
    confidence, predicted = log_probs.exp().max(-1)
    pairs = sorted(zip((-confidence).tolist(), (predicted != labels).tolist(), strict=True))
    risks = [sum(wrong for _, wrong in pairs[:k]) / k for k in range(1, 61)]
    curve = risk_coverage(confidence, (predicted != labels).double())
    assert curve.risk.tolist() == pytest.approx(risks)
    assert curve.area == pytest.approx(sum(risks) / 60)
    ours = value_of(AURC(), (log_probs[:7], labels[:7]), (log_probs[7:], labels[7:]))
    assert ours == pytest.approx(sum(risks) / 60)
    assert curve.at(0.25) == pytest.approx(risks[14]) and curve.at(1.0) == pytest.approx(risks[-1])


def test_ties_are_the_mean_over_their_orders():
    losses = [1.0, 0.0, 0.0, 1.0]
    confidences = torch.tensor([0.5, 0.5, 0.5, 0.9])
    areas = []
    for order in itertools.permutations(losses[:3]):
        row = [losses[3], *order]
        areas.append(sum(sum(row[:k]) / k for k in range(1, 5)) / 4)
    ours = risk_coverage(confidences, torch.tensor(losses))
    assert ours.area == pytest.approx(sum(areas) / len(areas))


def test_confidence_that_knows_its_errors_beats_one_that_does_not():
    wrong = torch.arange(100) % 10 == 0
    knows, guesses = 1 - wrong.double(), torch.arange(100).double() % 7
    assert risk_coverage(knows, wrong).area < 0.01 < risk_coverage(guesses, wrong).area
    assert risk_coverage(knows, wrong).at(1.0) == pytest.approx(0.1)


def test_nan():
    log_probs = torch.tensor([[math.nan, -0.1]])
    assert math.isnan(value_of(AURC(), (log_probs, torch.tensor([0]))))
