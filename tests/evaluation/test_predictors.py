"""Predictions in one form, whoever makes them."""

from __future__ import annotations

import math

import pytest
import torch
from laplace import Laplace as UpstreamLaplace
from torch import nn

from laplace_debias import Laplace
from laplace_debias.evaluation.predictors import (
    LogProbabilities,
    counted_rows,
    ignore_index_of,
    laplace_predictor,
    model_predictor,
)

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.arange(12) % 3


def fitted(factory, likelihood="classification", **kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    y = LABELS if likelihood == "classification" else torch.randn(12, 3, dtype=torch.float64)
    la = factory(model, likelihood, "all", "kron", **kwargs)
    data = torch.utils.data.TensorDataset(X, y)
    la.fit(torch.utils.data.DataLoader(data, batch_size=12))
    return la


def test_plain_networks():
    model = nn.Linear(3, 2).double()
    f = model(X).detach()
    (log_probs,) = model_predictor(model, "classification")(X)
    expected = f - (f.exp().sum(-1, keepdim=True)).log()
    torch.testing.assert_close(log_probs, expected)
    mean, variance = model_predictor(model, "regression")(X)
    assert torch.equal(mean, f) and not mean.requires_grad
    assert torch.equal(variance, torch.zeros_like(f))


@pytest.mark.parametrize("link", ["probit", "mc", "bridge"])
@pytest.mark.parametrize(
    "make", [UpstreamLaplace, lambda *args: Laplace(*args, debias="single")], ids=["theirs", "ours"]
)
def test_classification_is_the_logarithm_of_what_a_posterior_predicts(make, link):
    la = fitted(make)
    torch.manual_seed(1)
    (log_probs,) = laplace_predictor(la, link_approx=link, n_samples=9)(X)
    torch.manual_seed(1)
    torch.testing.assert_close(log_probs.exp(), la(X, link_approx=link, n_samples=9))


def test_sampled_networks_take_the_only_link_there_is():
    la = fitted(lambda *args: Laplace(*args, debias="single"))

    def gen():
        return torch.Generator().manual_seed(2)

    (log_probs,) = laplace_predictor(la, "nn", "probit", 7, gen())(X)
    probs = la(X, pred_type="nn", link_approx="mc", n_samples=7, generator=gen())
    torch.testing.assert_close(log_probs.exp(), probs)


def test_regression_has_no_noise():
    la = fitted(UpstreamLaplace, "regression", sigma_noise=3.0)
    for found, expected in zip(laplace_predictor(la)(X), la(X), strict=True):
        torch.testing.assert_close(found, expected)


def test_only_ours_know_their_log_probabilities():
    ours = fitted(lambda *args: Laplace(*args, debias="single"))
    assert isinstance(ours, LogProbabilities)
    assert not isinstance(fitted(UpstreamLaplace), LogProbabilities)
    with torch.no_grad():
        ours.model[2].weight *= 1e5
    ours.prior_precision = 1e12
    (log_probs,) = laplace_predictor(ours)(X)
    assert (ours(X) == 0).any() and log_probs.isfinite().all() and log_probs.min() < -745


def test_log_probabilities_say_what_they_cannot_do():
    la = fitted(lambda *args: Laplace(*args, debias="single"))
    with pytest.raises(ValueError, match="Expected pred_type 'glm' or 'nn', got 'gp'. Remedy"):
        la.log_probabilities(X, pred_type="gp")
    la = fitted(lambda *args: Laplace(*args, debias="single"), "regression")
    with pytest.raises(ValueError, match="Expected a classification, got a regression.*Remedy"):
        la.log_probabilities(X)


def test_other_likelihoods_are_refused():
    la = fitted(UpstreamLaplace)
    la.likelihood = "poisson"
    with pytest.raises(ValueError, match="got 'poisson'. Remedy"):
        laplace_predictor(la)
    assert math.isfinite(float(la.prior_precision))


def test_data_count_one_by_one():
    values, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, -100])
    rows, found = counted_rows(values, labels)
    assert rows is values and torch.equal(found, labels)  # -100 is for the check to refuse


def test_positions_that_count_in_order():
    values = torch.arange(24.0).reshape(2, 2, 2, 3)
    labels = torch.tensor([[[0, 7], [1, 2]], [[7, 7], [2, 0]]])
    rows, found = counted_rows(values, labels, ignore_index=7)
    assert found.tolist() == [0, 1, 2, 2, 0]
    assert torch.equal(rows, values.reshape(-1, 3)[[0, 2, 3, 6, 7]])
    many, _ = counted_rows(torch.stack([values, -values]), labels, 7, leading=1)
    assert torch.equal(many[1], -rows)


def test_soft_labels_of_positions_all_count():
    values, labels = torch.randn(2, 5, 3), torch.full((2, 5, 3), 1 / 3)
    rows, found = counted_rows(values, labels)
    assert rows.shape == found.shape == (10, 3)


def test_ignore_index_of_a_posterior():
    class Posterior:
        class objective:  # noqa: N801
            ignore_index = 255

    assert ignore_index_of(Posterior()) == 255 and ignore_index_of(None) == -100
