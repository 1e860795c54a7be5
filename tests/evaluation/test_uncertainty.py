"""Total and epistemic uncertainty against quadrature and the sum of variances."""

import numpy as np
import pytest
import torch
from torch import nn

from laplace_debias import Laplace
from laplace_debias.evaluation.uncertainty import mutual_information, uncertainty


def _entropy(p):
    return -(p * np.log(p)).sum(-1)


def test_against_sums_in_numpy():
    samples = torch.randn(6, 4, 3, dtype=torch.float64)
    total, epistemic = mutual_information(samples)
    p = np.exp(samples.numpy())
    p /= p.sum(-1, keepdims=True)
    assert total.numpy() == pytest.approx(_entropy(p.mean(0)))
    assert epistemic.numpy() == pytest.approx(_entropy(p.mean(0)) - _entropy(p).mean(0))


def _fitted(likelihood, **kwargs):
    torch.manual_seed(0)
    net, X = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(30, 3)
    y = torch.arange(30) % 2 if likelihood == "classification" else torch.randn(30, 2)
    la = Laplace(net, likelihood, "all", "kron", debias="single", **kwargs)
    la.fit((X, y), n_data=30)
    return la, X


def test_classification_against_quadrature():
    """Two classes: only the difference of the logits counts, a one-dimensional Gaussian."""
    la, X = _fitted("classification")
    la.logit_temperature = 1.5
    found = uncertainty(la, [X], n_samples=20_000)
    mean, S = la.output_moments(X)
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    weights = weights / weights.sum()
    for i in range(5):
        mu = (mean[i, 0] - mean[i, 1]).item() / 1.5
        sd = (S[i, 0, 0] + S[i, 1, 1] - 2 * S[i, 0, 1]).sqrt().item() / 1.5
        p = 1 / (1 + np.exp(-(mu + sd * nodes)))
        p = np.stack([p, 1 - p], -1)
        total = _entropy(weights @ p)
        assert found.total[i].item() == pytest.approx(total, rel=0.01)
        expected = total - weights @ _entropy(p)
        assert found.epistemic[i].item() == pytest.approx(expected, rel=0.06)
    assert torch.allclose(found.aleatoric + found.epistemic, found.total)


def test_regression_is_a_sum_of_variances():
    la, X = _fitted("regression", sigma_noise=0.7)
    found = uncertainty(la, (X, torch.zeros(30, 2)))
    variance = la(X)[1].diagonal(dim1=1, dim2=2).mean(-1)
    assert torch.allclose(found.epistemic, variance)
    assert torch.allclose(found.aleatoric, torch.full((30,), 0.49))
    assert found.epistemic_share == pytest.approx(
        (variance.mean() / (variance.mean() + 0.49)).item()
    )


def test_less_data_more_of_it_is_epistemic():
    shares = []
    for n_data in (30, 3000):
        la, X = _fitted("classification")
        la.fit((X, torch.arange(30) % 2), n_data=n_data)
        shares.append(uncertainty(la, [X]).epistemic_share)
    assert shares[0] > 2 * shares[1] > 0
