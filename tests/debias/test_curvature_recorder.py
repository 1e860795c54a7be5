"""Scores kept in training."""

import pytest
import torch

from laplace_debias import CurvatureRecorder
from laplace_debias.network.loss import curvature_scores


def test_the_last_score_of_each_datum_is_kept_in_four_bytes():
    recorder = CurvatureRecorder(5)
    first, second = torch.randn(3, 4), torch.randn(2, 4, requires_grad=True)
    recorder.update(torch.tensor([0, 1, 2]), first)
    recorder.update(torch.tensor([2, 4]), second)
    scores = recorder.scores
    assert scores.dtype == torch.float32 and not scores.requires_grad
    torch.testing.assert_close(scores[:2].double(), curvature_scores(first[:2]), rtol=1e-6, atol=0)
    torch.testing.assert_close(scores[[2, 4]].double(), curvature_scores(second.detach()))
    torch.testing.assert_close(scores[3], scores[[0, 1, 2, 4]].mean())


@pytest.mark.parametrize(
    ("indices", "logits", "words"),
    [
        ([0], torch.zeros(2, 3), "logits"),
        ([7], torch.zeros(1, 3), "positions between 0 and 4"),
        ([0, 7], torch.zeros(2, 3), "positions between 0 and 4"),
        ([-1], torch.zeros(1, 3), "positions between 0 and 4"),
        ([0], torch.full((1, 3), float("nan")), "finite"),
    ],
)
def test_bad_updates_are_refused_and_change_nothing(indices, logits, words):
    recorder = CurvatureRecorder(5)
    with pytest.raises(ValueError, match=words):
        recorder.update(torch.tensor(indices), logits)
    with pytest.raises(ValueError, match="got none"):
        _ = recorder.scores


def test_a_number_of_data_is_needed():
    with pytest.raises(ValueError, match="positive whole number"):
        CurvatureRecorder(0)
