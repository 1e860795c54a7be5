"""Gaussian metrics against densities and counts written out in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from torchmetrics.regression import ContinuousRankedProbabilityScore

from laplace_debias.evaluation.regression import (
    CRPS,
    MSE,
    RMSE,
    Coverage,
    GaussianNLL,
    Sharpness,
    gaussian_nll,
    with_noise,
)

METRICS = {
    "nll": GaussianNLL,
    "mse": MSE,
    "rmse": RMSE,
    "coverage": lambda sigma_noise=0.0: Coverage(0.9, sigma_noise),
}


def problem(n=12, D=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    like = {"generator": generator, "dtype": torch.float64}
    L = torch.randn(n, D, D, **like)
    mean, targets = torch.randn(n, D, **like), 3 * torch.randn(n, D, **like)
    return mean, L @ L.mT + 0.1 * torch.eye(D), targets


def value_of(metric, *batches):
    for batch in batches:
        metric.update(*batch)
    return metric.compute().item()


def test_nll_against_multivariate_normal():
    mean, covariance, targets = problem()
    expected = -torch.distributions.MultivariateNormal(mean, covariance).log_prob(targets)
    torch.testing.assert_close(gaussian_nll(mean, covariance, targets), expected)
    assert value_of(GaussianNLL(), (mean, covariance, targets)) == pytest.approx(
        expected.mean().item(), rel=1e-12
    )


def test_by_hand():
    mean = torch.zeros(3, 1, dtype=torch.float64)
    variance = torch.tensor([[1.0], [4.0], [1.0]], dtype=torch.float64)
    targets = torch.tensor([[0.5], [3.0], [3.0]], dtype=torch.float64)
    c = 0.5 * math.log(2 * math.pi)
    nll = (0.125 + c) + (9 / 8 + 0.5 * math.log(4) + c) + (4.5 + c)
    batch = (mean, variance, targets)
    assert value_of(GaussianNLL(), batch) == pytest.approx(nll / 3, rel=1e-12)
    assert value_of(MSE(), batch) == pytest.approx((0.25 + 9 + 9) / 3, rel=1e-12)
    assert value_of(RMSE(), batch) == pytest.approx(math.sqrt((0.25 + 9 + 9) / 3), rel=1e-12)
    # standard scores 0.5, 1.5, 3 against 0.674, 1.645, 1.960
    coverage = [value_of(Coverage(level), batch) for level in (0.5, 0.9, 0.95)]
    assert coverage == pytest.approx([1 / 3, 2 / 3, 2 / 3])


@pytest.mark.parametrize("sigma", [0.7, torch.tensor([0.7]), torch.tensor([0.7, 0.2, 1.1])])
def test_noise_adds_its_variance(sigma):
    mean, covariance, targets = problem()
    s = torch.as_tensor(sigma, dtype=torch.float64).expand(3)
    expected = covariance.clone()
    for d in range(3):
        expected[:, d, d] += s[d] ** 2
    torch.testing.assert_close(with_noise(covariance, sigma), expected, rtol=1e-6, atol=0)
    diagonal = covariance.diagonal(dim1=1, dim2=2)
    found = with_noise(diagonal, sigma)
    torch.testing.assert_close(found, torch.diag_embed(diagonal + s**2), rtol=1e-6, atol=0)
    for name in ("nll", "coverage"):
        noisy = value_of(METRICS[name](sigma_noise=sigma), (mean, covariance, targets))
        assert noisy == pytest.approx(
            value_of(METRICS[name](), (mean, expected, targets)), rel=1e-6
        )


def test_coverage_of_true_gaussians_is_the_level():
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(20_000, 2, generator=generator, dtype=torch.float64)
    targets = mean + 2 * torch.randn(20_000, 2, generator=generator, dtype=torch.float64)
    for level in (0.5, 0.9, 0.95):
        batch = (mean, torch.full_like(mean, 3.0), targets)
        error = math.sqrt(level * (1 - level) / 40_000)
        assert value_of(Coverage(level, sigma_noise=1.0), batch) == pytest.approx(
            level, abs=4 * error
        )


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("where", ["mean", "covariance"])
def test_nan_is_never_a_number(name, where):
    mean, covariance, targets = problem()
    {"mean": mean, "covariance": covariance}[where][4] = math.nan
    assert math.isnan(value_of(METRICS[name](), (mean, covariance, targets)))


def test_no_density_is_nan():
    batch = (torch.zeros(1, 2), -torch.eye(2).unsqueeze(0), torch.zeros(1, 2))
    assert math.isnan(value_of(GaussianNLL(0.1), batch))


@pytest.mark.parametrize("name", METRICS)
def test_mini_batches_and_processes_add_up(name):
    data = problem()
    whole = value_of(METRICS[name](), data)
    batches = list(zip(*(part.split(5) for part in data), strict=True))
    assert value_of(METRICS[name](), *batches) == pytest.approx(whole, rel=1e-12)
    one, other = METRICS[name](), METRICS[name]()
    one.update(*(part[:4] for part in data))
    other.update(*(part[4:] for part in data))
    one.merge_state(other)
    assert one.compute().item() == pytest.approx(whole, rel=1e-12)
    assert one.n_data == 12


def test_levels_and_directions():
    with pytest.raises(ValueError, match="level between 0 and 1, got 90. Remedy"):
        Coverage(90)
    better = [metric().higher_is_better for metric in METRICS.values()]
    assert better == [False, False, False, None]


def test_crps_against_its_integral():
    mean, covariance, targets = problem(n=4, D=2)
    expected = []
    for m, S, y in zip(mean, covariance, targets, strict=True):
        for d in range(2):
            normal = norm(m[d].item(), S[d, d].sqrt().item())
            below = quad(lambda t, f=normal: f.cdf(t) ** 2, -np.inf, y[d].item())[0]
            above = quad(lambda t, f=normal: f.sf(t) ** 2, y[d].item(), np.inf)[0]
            expected.append(below + above)
    ours = value_of(CRPS(), (mean, covariance, targets))
    assert ours == pytest.approx(np.mean(expected), rel=1e-6)


def test_crps_of_samples_converges_to_it():
    mean, covariance, targets = problem(n=3, D=1)
    torch.manual_seed(0)
    draws = torch.distributions.Normal(mean, covariance[..., 0].sqrt()).sample((4000,))
    sampled = ContinuousRankedProbabilityScore()
    sampled.update(draws.squeeze(-1).T.float(), targets.squeeze(-1).float())
    ours = value_of(CRPS(), (mean, covariance, targets))
    assert ours == pytest.approx(sampled.compute().item(), rel=0.03)


def test_sharpness_and_noise():
    batch = (torch.zeros(2, 2), torch.tensor([[0.0, 3.0], [8.0, 15.0]]), torch.zeros(2, 2))
    assert value_of(Sharpness(1.0), batch) == pytest.approx((1 + 2 + 3 + 4) / 4)
    assert value_of(CRPS(1.0), batch) > value_of(CRPS(0.5), batch)
