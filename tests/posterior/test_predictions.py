"""laplace-torch's calls and links on the structured predictive."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from laplace.baselaplace import KronLaplace
from laplace.lllaplace import KronLLLaplace

from laplace_debias.posterior.kron import DebiasedKronLaplace, DebiasedKronLLLaplace
from tests.fitted_predictive import (
    double_precision,  # noqa: F401
    fitted_mlp,
)

pytestmark = pytest.mark.usefixtures("double_precision")


FastKron = partial(DebiasedKronLaplace, debias="single")
FastKronLL = partial(DebiasedKronLLLaplace, debias="single")


@pytest.mark.parametrize(("fast", "slow"), [(FastKron, KronLaplace), (FastKronLL, KronLLLaplace)])
@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm"])
def test_calls_agree_with_upstream(fast, slow, link):
    a, loader = fitted_mlp(fast)
    b, _ = fitted_mlp(slow)
    x = loader.dataset.tensors[0]
    torch.testing.assert_close(a(x, link_approx=link), b(x, link_approx=link))
    mean, variance = a.functional_variance_fast(x)
    expected = b._glm_predictive_distribution(x)[1].diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(variance, expected)


@pytest.mark.parametrize(("fast", "slow"), [(FastKron, KronLaplace), (FastKronLL, KronLLLaplace)])
@pytest.mark.parametrize("options", [{}, {"joint": True}, {"diagonal_output": True}])
def test_regression_calls_agree_with_upstream(fast, slow, options):
    a, loader = fitted_mlp(fast, "regression", sigma_noise=0.5)
    b, _ = fitted_mlp(slow, "regression", sigma_noise=0.5)
    x = loader.dataset.tensors[0]
    for got, expected in zip(a(x, **options), b(x, **options), strict=True):
        torch.testing.assert_close(got, expected)


def test_mc_calls_follow_the_generator():
    la, loader = fitted_mlp(FastKron)
    x = loader.dataset.tensors[0]
    outputs = []
    for seed in (0, 0, 1):
        generator = torch.Generator().manual_seed(seed)
        outputs.append(la(x, link_approx="mc", n_samples=7, generator=generator))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    generator = torch.Generator().manual_seed(0)
    many = la(x, link_approx="mc", n_samples=20_000, generator=generator)
    expected = la.predictive_samples(x, n_samples=20_000).mean(0)
    torch.testing.assert_close(many, expected, atol=0.01, rtol=0)
    diagonal = la(x, link_approx="mc", n_samples=20_000, diagonal_output=True)
    expected = la.predictive_samples(x, n_samples=20_000, diagonal_output=True).mean(0)
    torch.testing.assert_close(diagonal, expected, atol=0.01, rtol=0)


@pytest.mark.parametrize("cls", [FastKron, FastKronLL])
@pytest.mark.parametrize("link", ["probit", "mc", "bridge"])
def test_sampled_calls_converge_to_exact_ones_and_follow_the_generator(cls, link):
    la, loader = fitted_mlp(cls)
    x = loader.dataset.tensors[0]
    expected = la(x, link_approx=link, n_samples=20_000)
    la.predictive_method = "samples"
    outputs = []
    for seed, n_samples in [(0, 20_000), (0, 9), (0, 9), (1, 9)]:
        generator = torch.Generator().manual_seed(seed)
        outputs.append(la(x, link_approx=link, n_samples=n_samples, generator=generator))
    torch.testing.assert_close(outputs[0], expected, atol=0.01, rtol=0)
    assert torch.equal(outputs[1], outputs[2]) and not torch.equal(outputs[2], outputs[3])
    la.predictive_method = "guess"
    with pytest.raises(ValueError, match="guess"):
        la(x)
