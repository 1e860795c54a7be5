"""The debiased curvature is nearly unbiased; the single mini-batch's is not."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from laplace_debias import Laplace
from laplace_debias.debias.spectrum import reevaluate
from tests.cases import seeded

N, M, DRAWS = 1000, 16, 120


@pytest.fixture(scope="module")
def digits():
    """A small network trained on digits, and its training data."""
    X, y = load_digits(return_X_y=True)
    X, y = torch.as_tensor(X[:N] / 16.0), torch.as_tensor(y[:N])
    net = seeded(lambda: nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))).double()
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(X), y).backward()
        optimiser.step()
    assert (net(X).argmax(-1) == y).double().mean() > 0.98
    return net, X, y


@pytest.fixture(scope="module")
def errors(digits):
    """Signed relative errors of each block's top curvatures: single-batch and debiased.

    The top is the first hundredth of the directions, the truth the whole training set's curvature
    along them. Shape ``[draws, blocks, 2]``.
    """
    net, X, y = digits
    full = Laplace(net, "classification", "all", "kron", debias="single")
    full.fit((X, y), n_data=N)
    K = full.H_facs.kfacs
    gen = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(DRAWS):
        one, two = torch.randperm(N, generator=gen)[: 2 * M].chunk(2)
        la = Laplace(net, "classification", "all", "kron", debias=True)
        la.fit((X[one], y[one]), curvature_loader=(X[two], y[two]), n_data=N)
        truth = reevaluate(la.H.eigenvectors, K, la.parameter_names)
        fitted = la._fitted
        row = []
        for lam, lam_tilde, exact in zip(fitted.lam, fitted.lam_tilde, truth, strict=True):
            biased, debiased, exact = (
                torch.outer(*v).flatten() if len(v) == 2 else v[0] for v in (lam, lam_tilde, exact)
            )
            top = biased.argsort(descending=True)[: max(1, len(biased) // 100)]
            scale = exact[top].sum()
            row.append([((v[top] - exact[top]).sum() / scale).item() for v in (biased, debiased)])
        rows.append(row)
    return torch.tensor(rows)


def test_single_batch_overestimates_its_top_curvature(errors):
    """In every block, by a multiple of the standard error: the claim that it is unbiased fails."""
    single = errors[..., 0]
    mean, error = single.mean(0), single.std(0) / DRAWS**0.5
    assert (mean > 5 * error).all() and (mean > 0.3).all()


def test_debiased_mean_error_is_three_times_smaller(errors):
    single, debiased = errors.mean(0).abs().T
    assert (debiased * 3 <= single).all(), (single, debiased)


def test_debiased_mean_error_is_within_three_standard_errors(errors):
    debiased = errors[..., 1]
    assert (debiased.mean(0).abs() < 3 * debiased.std(0) / DRAWS**0.5).all()
