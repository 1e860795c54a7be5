"""Links against fifty-digit arithmetic, also where probabilities underflow."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import pytest
import torch

from laplace_debias.predictive.links import (
    LINKS,
    class_log_probabilities,
    label_log_probabilities,
    mean_log_probabilities,
    needs_diagonal_only,
    root,
)

getcontext().prec = 50
PI = Decimal("3.14159265358979323846264338327950288419716939937511")


def shares(alphas: list[Decimal]) -> list[float]:
    """Logarithms of shares."""
    total = sum(alphas)
    return [float((alpha / total).ln()) for alpha in alphas]


def probit(mean: list[float], covariance: list[list[float]]) -> list[float]:
    """Softmax of scaled means."""
    scores = [
        Decimal(m) / (1 + PI / 8 * Decimal(covariance[c][c])).sqrt() for c, m in enumerate(mean)
    ]
    return shares([score.exp() for score in scores])


def bridge(mean: list[float], covariance: list[list[float]], normalise: bool) -> list[float]:
    """Laplace bridge with the zero-sum correction."""
    K = len(mean)
    mu = [Decimal(m) for m in mean]
    S = [[Decimal(v) for v in row] for row in covariance]
    rows, total = [sum(row) for row in S], sum(map(sum, S))
    mu = [m - r * sum(map(Decimal, mean)) / total for m, r in zip(mu, rows, strict=True)]
    var = [S[c][c] - rows[c] * rows[c] / total for c in range(K)]
    if normalise:
        t = sum(var) / K / (Decimal(K) / 2).sqrt()
        mu, var = [m / t.sqrt() for m in mu], [v / t for v in var]
    others = sum((-m).exp() for m in mu)
    return shares(
        [(1 - Decimal(2) / K + m.exp() * others / K**2) / v for m, v in zip(mu, var, strict=True)]
    )


@pytest.mark.parametrize("scale", [1.0, 900.0], ids=["ordinary", "underflowing"])
@pytest.mark.parametrize("K", [2, 3, 10])
@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm"])
def test_against_fifty_digits(link, K, scale):
    generator = torch.Generator().manual_seed(K)
    mean = scale * torch.randn(4, K, generator=generator, dtype=torch.float64)
    L = torch.randn(4, K, K, generator=generator, dtype=torch.float64)
    covariance = L @ L.mT + torch.eye(K)
    found = class_log_probabilities(mean, covariance, link)
    oracle = probit if link == "probit" else lambda m, S: bridge(m, S, link == "bridge_norm")
    expected = [oracle(m, S) for m, S in zip(mean.tolist(), covariance.tolist(), strict=True)]
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=1e-11
    )
    if scale > 1 and link == "probit":
        assert (found.exp() == 0).any() and found.isfinite().all()


def test_sampled_link_against_fifty_digits():
    mean = torch.tensor([[0.0, 2000.0, -300.0], [0.3, 0.1, 0.2]], dtype=torch.float64)
    variance = torch.tensor([[1.0, 400.0, 9.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
    found = class_log_probabilities(
        mean,
        variance,
        "mc",
        diagonal=True,
        n_samples=7,
        generator=torch.Generator().manual_seed(0),
    )
    eps = torch.randn(7, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for i in range(2):
        means = [Decimal(0)] * 3
        for e in eps[:, i].tolist():
            z = [
                (Decimal(m) + Decimal(v).sqrt() * Decimal(x)).exp()
                for m, v, x in zip(mean[i].tolist(), variance[i].tolist(), e, strict=True)
            ]
            means = [a + b / sum(z) / 7 for a, b in zip(means, z, strict=True)]
        expected = torch.tensor([float(m.ln()) for m in means], dtype=torch.float64)
        torch.testing.assert_close(found[i], expected, rtol=1e-11, atol=1e-11)
    assert found[0, 0] < -745  # its exponential would be zero


def test_a_stream_of_samples_equals_a_tensor_of_them():
    samples = 300 * torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(
        mean_log_probabilities(iter(samples)), mean_log_probabilities(samples), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("link", LINKS)
def test_many_covariances_at_once(link):
    torch.manual_seed(0)
    mean, L = torch.randn(20, 3).double(), torch.randn(3, 20, 3, 3).double()
    covariance = L @ L.mT

    def log_probs(S):
        generator = torch.Generator().manual_seed(0)
        return class_log_probabilities(mean, S, link, generator=generator)

    many = log_probs(covariance)
    assert many.shape == (3, 20, 3)
    torch.testing.assert_close(many.exp().sum(-1), torch.ones(3, 20).double())
    for i in range(3):
        torch.testing.assert_close(log_probs(covariance[i]), many[i])


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("where", ["mean", "covariance"])
def test_nan_stays_nan_in_its_datum(link, where):
    mean, covariance = torch.zeros(2, 3), torch.eye(3).expand(2, 3, 3).clone()
    (mean if where == "mean" else covariance)[0, 0] = math.nan
    found = class_log_probabilities(mean, covariance, link)
    assert found[0].isnan().all() and found[1].isfinite().all()


def test_unknown_link():
    with pytest.raises(ValueError, match="Expected link_approx.*'logit'.*Remedy"):
        class_log_probabilities(torch.zeros(1, 2), torch.ones(1, 2, 2), "logit")


def test_root_of_singular_and_nan_covariances():
    v = torch.randn(5, 4, 1, generator=torch.Generator().manual_seed(0)).double()
    singular = v @ v.mT
    singular[0] = 2 * torch.eye(4)
    L = root(singular)
    torch.testing.assert_close(L @ L.mT, singular)
    assert torch.equal(root(singular.expand(2, -1, -1, -1))[1], L)  # for several posteriors
    assert root(torch.full((1, 2, 2), math.nan)).isnan().any()


def test_the_root_of_a_regular_covariance_is_its_cholesky_factor():
    """And so draws of one seed stay what they were beside a singular covariance."""
    A = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).double()
    regular, singular = A @ A.T, torch.ones(3, 3).double()
    L = root(torch.stack([regular, singular]))
    assert torch.equal(L[0], torch.linalg.cholesky(regular))
    torch.testing.assert_close(L[1] @ L[1].T, singular, atol=1e-7, rtol=0)


def test_which_links_need_variances_alone():
    assert [needs_diagonal_only(link) for link in LINKS] == [link == "probit" for link in LINKS]
    with_diagonal = {link: needs_diagonal_only(link, diagonal_output=True) for link in LINKS}
    assert with_diagonal == {link: link in ("probit", "mc") for link in LINKS}


def test_sampled_labels_are_means_of_sigmoids():
    mean, variance = torch.tensor([[0.5, -1.0]]), torch.tensor([[[0.0, 0.0]], [[0.3, 2.0]]])
    generator = torch.Generator().manual_seed(0)
    found = label_log_probabilities(
        mean.double(), variance.double(), "mc", n_samples=40_000, generator=generator
    )
    assert found.shape == (2, 1, 2, 2)
    torch.testing.assert_close(found[0, ..., 1], mean.double().sigmoid().log())  # all samples alike
    z = torch.linspace(-9, 9, 4001).double()
    weights = (-z.square() / 2).exp() / (-z.square() / 2).exp().sum()
    for c in range(2):
        f = mean[0, c].double() + variance[1, 0, c].double().sqrt() * z
        expected = (weights * f.sigmoid()).sum()
        assert abs(float(found[1, 0, c, 1].exp() - expected)) < 0.005
