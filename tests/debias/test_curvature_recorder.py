"""Scores kept in training."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import CurvatureRecorder, Laplace, far_inputs, posterior_distance
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


def test_the_certificate_holds_with_scores_of_an_early_epoch():
    """Digits, scores of a network half trained: the truth is below estimate + 2 errors."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images[:800]).float() / 16
    y, x_test = torch.tensor(labels[:800]), torch.tensor(images[800:860]) / 16
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
    net.append(nn.Linear(32, 10))
    optimizer, recorder = torch.optim.Adam(net.parameters(), 5e-3), CurvatureRecorder(800)
    for epoch in range(20):
        for rows in torch.randperm(800).split(64):
            logits = net(x[rows])
            if epoch < 4:
                recorder.update(rows, logits)  # and nothing is recorded later
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, y[rows]).backward()
            optimizer.step()
    net, x = net.double().eval(), x.double()
    now = curvature_scores(net(x).detach())
    assert torch.corrcoef(torch.stack([now, recorder.scores]))[0, 1] < 0.9  # they are old
    full = Laplace(net, "classification", "all", "kron", debias="single", prior_precision=0.1)
    full.fit((x, y), n_data=800)
    far, truths, estimates, below = far_inputs(x, 60), [], [], []
    loader = DataLoader(TensorDataset(x, y), 200)
    for draw in range(20):
        la = Laplace(
            net,
            "classification",
            "all",
            "kron",
            debias="auto",
            prior_precision=0.1,
            scores=recorder,
            tolerance=None,
            n_passes=144,
            n_pool=400,
            generator=torch.Generator().manual_seed(draw),
        )
        la.fit(loader)
        truths.append(sum(posterior_distance(la, full, inputs) for inputs in (x_test, far)) / 2)
        estimates.append(la.fit_report.distance)
        below.append(truths[-1] <= la.fit_report.distance + 2 * la.fit_report.standard_error)
    assert sum(below) >= 18
    assert 0.5 < sum(estimates) / sum(truths) < 3
