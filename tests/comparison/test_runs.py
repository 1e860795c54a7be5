"""Predictions of a comparison against laplace-torch's own, and their metrics by hand."""

import laplace
import pytest
import torch
from torch import nn

from laplace_debias.comparison.runs import evaluate_sets, laplace_run, plain_run
from laplace_debias.posterior.factory import Laplace

GRID = [0.5, 20.0]


@pytest.fixture(scope="module")
def fitted():
    torch.manual_seed(0)
    X = torch.randn(30, 3, dtype=torch.float64)
    y = torch.randint(3, (30,))
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    las = []
    for part in (slice(0, 12), slice(12, 30)):
        la = Laplace(model, "classification", "all", "kron", debias="single")
        la.fit((X[part], y[part]), n_data=60)
        las.append(la)
    return model, las, X, y


def collect(run, loader, k):
    parts = [[] for _ in range(k)]
    run(loader, lambda i, probs, y: parts[i].append(probs))
    return [torch.cat(probs) for probs in parts]


def test_plain_predictions_are_the_networks(fitted):
    model, _, X, y = fitted
    noisy = nn.Sequential(model, nn.Dropout(0.5)).train()
    (probs,) = collect(plain_run(noisy), [(X[:20], y[:20]), (X[20:], y[20:])], 1)
    torch.testing.assert_close(probs, model(X).softmax(-1))
    assert noisy.training


def test_every_posterior_and_prior_precision_is_laplace_torchs(fitted):
    model, las, X, y = fitted
    run = laplace_run(las, GRID, "probit", n_samples=1, seed=0)
    found = collect(run, [(X[:17], y[:17]), (X[17:], y[17:])], len(las) * len(GRID))
    oracle = laplace.Laplace(model, "classification", "all", "kron")
    oracle.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y), 30))
    for number, la in enumerate(las):
        oracle.H = la.H
        for i, delta in enumerate(GRID):
            oracle.prior_precision = delta
            expected = oracle(X, pred_type="glm", link_approx="probit")
            torch.testing.assert_close(found[number * len(GRID) + i], expected, rtol=1e-6, atol=0)


def test_mc_uses_the_same_numbers_for_every_posterior_and_set(fitted):
    _, (la, other), X, y = fitted
    run = laplace_run([la, other, la], GRID, "mc", n_samples=5, seed=3)
    one, again = (collect(run, [(X, y)], 6) for _ in range(2))
    for i in range(6):
        assert torch.equal(one[i], again[i])
    for i in range(2):
        torch.testing.assert_close(one[i], one[4 + i])
    seed = collect(laplace_run([la], GRID, "mc", n_samples=5, seed=4), [(X, y)], 2)
    assert not torch.allclose(seed[0], one[0])


def test_posteriors_of_other_models_cannot_share_passes(fitted):
    _, (la, _), X, y = fitted
    other = Laplace(nn.Linear(3, 3).double(), "classification", "all", "kron", debias="single")
    other.fit((X, y), n_data=60)
    with pytest.raises(ValueError, match="same parameters of one model"):
        laplace_run([la, other], GRID, "probit", 1, 0)
    with pytest.raises(ValueError, match="at least one predictor"):
        laplace_run([], GRID, "probit", 1, 0)


def test_metrics_of_every_set_by_hand():
    probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 1])
    uniform = torch.full((2, 2), 0.5, dtype=torch.float64)

    def run(loader, update):
        for x, y in loader:
            for i in range(2):  # the second prediction knows nothing
                update(i, x if i == 0 else torch.full_like(x, 0.5), y)

    sets = {"": [(probs, labels)], "far": [(uniform, torch.tensor([0, 1]))], "bare": [uniform]}
    one, two = evaluate_sets(run, sets, 2, n_bins=10)
    assert one["accuracy"] == pytest.approx(2 / 3)
    nll = -torch.tensor([0.9, 0.4, 0.8], dtype=torch.float64).log().mean()
    assert one["nll"] == pytest.approx(nll.item())
    assert one["ece"] == pytest.approx((0.1 + 0.6 + 0.2) / 3)
    assert one["brier"] == pytest.approx((2 * 0.1**2 + 2 * 0.6**2 + 2 * 0.2**2) / 3)
    assert one["far_accuracy"] == 0.5 and one["far_auroc"] == one["bare_auroc"] == 1.0
    assert one["bare_mean_entropy"] == pytest.approx(torch.tensor(2.0).log().item())
    assert "bare_nll" not in one and "far_nll" in one
    assert two["far_auroc"] == 0.5 and two["nll"] == pytest.approx(torch.tensor(2.0).log().item())


def test_empty_sets_are_named():
    def run(loader, update):
        for x, y in loader:
            update(0, x, y)

    probs = torch.tensor([[0.9, 0.1]])
    with pytest.raises(ValueError, match="labelled datum in `test_loader`, got none. Remedy"):
        evaluate_sets(run, {"": []}, 1, 10)
    with pytest.raises(ValueError, match="the OOD loader 'far', got none. Remedy"):
        evaluate_sets(run, {"": [(probs, torch.tensor([0]))], "far": []}, 1, 10)
