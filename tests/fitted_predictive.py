"""Fitted approximations and a slow loop that the predictive's tests share."""

from __future__ import annotations

import pytest
import torch
from laplace.baselaplace import KronLaplace
from laplace.curvature import CurvlinopsGGN
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.oracles_predictive import random_laplace

EXACT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture
def double_precision():
    """Double precision and a seed; single precision afterwards."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def build(case, n=5, **kwargs):
    """A random posterior for a case, and n inputs."""
    model, shape = case[:2]
    x = torch.randn(n, *shape)
    C = model.eval()(x).shape[1]
    return random_laplace(model.train(), C, **kwargs), x


def fitted_cnn(cls=KronLaplace, likelihood="classification", backend=CurvlinopsGGN, **kwargs):
    """A small CNN fitted on random images, and six of them."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(27, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    )
    x = torch.randn(24, 1, 8, 8)
    y = torch.randint(3, (24,)) if likelihood == "classification" else torch.randn(24, 3)
    la = cls(model, likelihood, backend=backend, **kwargs)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=12))
    return la, x[:6]


def fitted_mlp(cls=KronLaplace, likelihood="classification", **kwargs):
    """A small MLP fitted on random data, and a validation loader."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(30, 4)
    y = torch.randint(3, (30,)) if likelihood == "classification" else torch.randn(30, 3)
    la = cls(model, likelihood, **kwargs)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=15))
    loader = DataLoader(TensorDataset(x[:20] + 0.1, y[:20]), batch_size=7)
    return la, loader


def slow_nll(la, loader, grid, link="probit"):
    """Upstream's own predictions, one prior precision at a time, averaged over data by hand."""
    values = []
    for delta in grid:
        la.prior_precision = delta
        losses = []
        for x, y in loader:
            if la.likelihood == "classification":
                probs = la(x, link_approx=link)
                losses += (-probs[range(len(y)), y].log()).tolist()
            else:
                mean, cov = la(x)
                noise = float(la.sigma_noise) ** 2 * torch.eye(mean.shape[1])
                normal = torch.distributions.MultivariateNormal(mean, cov + noise)
                losses += (-normal.log_prob(y)).tolist()
        values.append(sum(losses) / len(losses))
    return values
