"""laplace-torch's calls and links on the structured predictive."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from laplace.baselaplace import KronLaplace
from laplace.lllaplace import KronLLLaplace

from laplace_debias.posterior.kron import DebiasedKronLaplace, DebiasedKronLLLaplace
from laplace_debias.posterior.predictions import (
    inverse_link,
    kept_predictor,
    log_probabilities,
    predictive,
    sampled_outputs,
)
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


def _single(likelihood, C=2):
    torch.manual_seed(0)
    net = torch.nn.Linear(3, C).double()
    X = torch.randn(8, 3, dtype=torch.float64)
    y = {
        "classification": torch.arange(8) % C,
        "bernoulli": (torch.arange(8 * C) % 2).reshape(8, C).double(),
        "regression": torch.randn(8, C, dtype=torch.float64),
    }[likelihood]
    la = DebiasedKronLaplace(net, likelihood, debias="single")
    la.fit((X, y), n_data=8)
    return la, X


def test_the_link_of_each_likelihood():
    """From the Gaussian over the logits: probit for classes and labels, none for values."""
    options = (1, False, None)
    for likelihood in ("classification", "bernoulli", "regression"):
        la, X = _single(likelihood)
        la.logit_temperature = 2.0
        mean, covariance = la.output_moments(X)
        found = predictive(la, X, "glm", "probit", options)
        if likelihood == "regression":
            torch.testing.assert_close(found, (mean, covariance))
            continue
        scaled = mean / 2 / (1 + torch.pi / 8 * covariance.diagonal(dim1=1, dim2=2) / 4).sqrt()
        link = torch.sigmoid if likelihood == "bernoulli" else partial(torch.softmax, dim=-1)
        torch.testing.assert_close(found, link(scaled))
        torch.testing.assert_close(inverse_link(la, mean), link(mean / 2))
        log_p = log_probabilities(la, X, "glm", "probit", options)
        torch.testing.assert_close(
            log_p[..., 1] if likelihood == "bernoulli" else log_p, found.log()
        )


def test_sampled_networks_are_the_models_at_sampled_weights():
    la, X = _single("regression")
    found = sampled_outputs(la, X, 3, torch.Generator().manual_seed(0))
    for theta, f in zip(la.sample(3, torch.Generator().manual_seed(0)), found, strict=True):
        torch.testing.assert_close(f, X @ theta[:6].reshape(2, 3).T + theta[6:])
    assert not found.requires_grad


def test_arguments_of_the_network_may_have_any_name():
    class Scaled(torch.nn.Linear):
        def forward(self, X, options=1.0, la=1.0):
            return options * la * super().forward(X)

    _, X = _single("regression")
    la = DebiasedKronLaplace(Scaled(3, 2).double(), "regression", debias="single")
    la.fit((X, torch.randn(8, 2, dtype=torch.float64)), n_data=8)
    mean, _ = la(X, pred_type="nn", link_approx="mc", n_samples=5, options=2.0, la=3.0,
                 generator=torch.Generator().manual_seed(0))  # fmt: skip
    plain = sampled_outputs(la, X, 5, torch.Generator().manual_seed(0)).mean(0)
    torch.testing.assert_close(mean, 6 * plain)


@pytest.mark.parametrize(
    "change",
    [
        lambda la: setattr(la, "prior_precision", 3.0),
        lambda la: la.prior_precision.mul_(2),
        lambda la: setattr(la, "temperature", 0.5),
        lambda la: setattr(la, "sigma_noise", 0.5),
        lambda la: setattr(la, "memory_budget", 1000),
        lambda la: setattr(la, "verify", False),
        lambda la: la.model.float(),
    ],
)
def test_a_kept_predictor_is_made_anew_after_a_change(change):
    la, _ = _single("regression")
    first = kept_predictor(la, None, object)
    assert kept_predictor(la, first, object) is first
    change(la)
    assert kept_predictor(la, first, object)[1] is not first[1]
