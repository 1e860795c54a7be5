"""laplace-torch's interface and behaviours, re-checked on the debiased classes."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import laplace
import pytest
import torch
from laplace.curvature import CurvlinopsGGN

from laplace_debias import Laplace
from laplace_debias.network.upstream import is_last_layer, last_layer_name, posterior_params
from tests.cases import CNN, MLP, MLP_REGRESSION, WEIGHTS_ONLY, loader

SUBSETS = ["all", "last_layer"]


def fitted(case, subset="all", **kwargs):
    la = Laplace(case.model(), case.likelihood, subset, "kron", debias=True, **kwargs)
    la.fit(case.data(30, 1), curvature_loader=case.data(30, 2), n_data=100)
    return la


def jacobian(la, X):
    """Explicit Jacobian ``[n, C, P]`` in the Bayesian parameters."""
    model = la.model
    prefix = f"model.{last_layer_name(la.model)}." if is_last_layer(la) else ""
    pairs = zip(la.parameter_names, posterior_params(la), strict=True)
    params = {prefix + n: p for n, p in pairs}

    def f(weights):
        return torch.func.functional_call(model, weights, (X,))

    J = torch.func.jacrev(f)({n: p.detach() for n, p in params.items()})
    return torch.cat([J[n].flatten(2) for n in params], dim=-1)


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("case", [MLP, WEIGHTS_ONLY], ids=lambda c: c.name)
def test_predictive_equals_explicit_linearisation(case, subset):
    la = fitted(case, subset, prior_precision=2.5)
    X = case.data(6, 3)[0]
    J = jacobian(la, X)
    S = torch.linalg.inv(la.posterior_precision.to_matrix())
    variance = torch.einsum("ncp,pq,ndq->ncd", J, S, J)
    f_mu, f_var = la._glm_predictive_distribution(X)
    torch.testing.assert_close(f_mu, la.model(X).detach())
    torch.testing.assert_close(f_var, variance, rtol=1e-8, atol=1e-10)
    kappa = 1 / torch.sqrt(1 + math.pi / 8 * variance.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(la(X), torch.softmax(kappa * f_mu, -1))


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("link", ["probit", "mc", "bridge", "bridge_norm"])
def test_every_link(subset, link):
    probs = fitted(MLP, subset)(MLP.data(6, 3)[0], link_approx=link)
    assert probs.shape == (6, 4)
    torch.testing.assert_close(probs.sum(-1), torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("subset", SUBSETS)
def test_generator_is_honoured(subset):
    la, X = fitted(MLP, subset), MLP.data(6, 3)[0]

    def gen():
        return torch.Generator().manual_seed(3)

    for kwargs in (
        {"link_approx": "mc"},
        {"link_approx": "mc", "diagonal_output": True},
        {"pred_type": "nn", "link_approx": "mc"},
    ):
        first = la(X, generator=gen(), n_samples=7, **kwargs)
        assert torch.equal(first, la(X, generator=gen(), n_samples=7, **kwargs))
        assert not torch.equal(first, la(X, n_samples=7, **kwargs))
    for pred_type in ("glm", "nn"):
        for method in (la.functional_samples, la.predictive_samples):
            one, other = (method(X, pred_type, 7, generator=gen()) for _ in range(2))
            assert one.shape == (7, 6, 4) and torch.equal(one, other)


@pytest.mark.parametrize("subset", SUBSETS)
def test_samples_have_the_posterior_moments(subset):
    la = fitted(MLP, subset)
    samples = la.sample(40_000, generator=torch.Generator().manual_seed(0))
    S = torch.linalg.inv(la.posterior_precision.to_matrix())
    assert (samples.mean(0) - la.mean).abs().max() < 5 * (S.diagonal().max() / 40_000).sqrt()
    assert (torch.cov(samples.T) - S).norm() / S.norm() < 0.05


@pytest.mark.parametrize("subset", SUBSETS)
def test_nn_predictive_pushes_samples_through_the_network(subset):
    la, X = fitted(MLP, subset), MLP.data(6, 3)[0]
    gen = torch.Generator().manual_seed(1)
    fs = la.functional_samples(X, "nn", 3, generator=gen)
    samples = la.sample(3, generator=torch.Generator().manual_seed(1))
    model = MLP.model()
    target = model if subset == "all" else model[2]
    for f, sample in zip(fs, samples, strict=True):
        torch.nn.utils.vector_to_parameters(sample, target.parameters())
        torch.testing.assert_close(f, model(X).detach())
    probs = la(X, "nn", link_approx="mc", n_samples=3, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(probs, torch.softmax(fs, -1).mean(0))


@pytest.mark.parametrize("subset", SUBSETS)
def test_log_prob_is_a_gaussian(subset):
    la = fitted(MLP, subset, prior_precision=2.0)
    value = la.mean + 0.1
    gaussian = torch.distributions.MultivariateNormal(
        la.mean, precision_matrix=la.posterior_precision.to_matrix()
    )
    torch.testing.assert_close(la.log_prob(value), gaussian.log_prob(value))


@pytest.mark.parametrize("subset", SUBSETS)
def test_marginal_likelihood_by_hand(subset):
    la = fitted(MLP_REGRESSION, subset, sigma_noise=0.7, prior_precision=1.3)
    P = la.posterior_precision.to_matrix()
    n, c = 100, 4
    log_lik = -la.loss / 0.49 - n * c * math.log(0.7 * math.sqrt(2 * math.pi))
    ratio = torch.logdet(P) - la.n_params * math.log(1.3)
    expected = log_lik - 0.5 * (ratio + 1.3 * la.mean @ la.mean)
    torch.testing.assert_close(la.log_marginal_likelihood(), expected)


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("structure", ["scalar", "layerwise"])
def test_marglik_tuning_improves_it(subset, structure):
    la = fitted(MLP, subset)
    before = la.log_marginal_likelihood()
    la.optimize_prior_precision(method="marglik", n_steps=30, prior_structure=structure)
    assert len(la.prior_precision) == (1 if structure == "scalar" else la.n_layers)
    assert la.log_marginal_likelihood() > before


def test_marglik_of_two_batches_is_on_the_training_sets_scale():
    """The optimum from 2 x 100 of 2000 data lies near the full-batch one, not a factor N/M off."""
    case = MLP
    X, y = case.data(2000)
    full = Laplace(case.model(), "classification", "all", "kron", debias="single")
    full.fit(loader(X, y, 500))
    part = Laplace(case.model(), "classification", "all", "kron", debias=True)
    part.fit((X[:100], y[:100]), curvature_loader=(X[100:200], y[100:200]), n_data=2000)
    ratio = part.log_marginal_likelihood() / full.log_marginal_likelihood()
    assert 0.9 < ratio < 1.1
    for la in (full, part):
        la.optimize_prior_precision(method="marglik", n_steps=200)
    assert 0.7 < (part.prior_precision / full.prior_precision).item() < 1.4


@pytest.mark.parametrize("subset", SUBSETS)
def test_gridsearch_runs(subset):
    la = fitted(MLP, subset)
    la.optimize_prior_precision(
        method="gridsearch", val_loader=loader(*MLP.data(20, 5), 10), grid_size=4
    )
    grid = torch.logspace(-4, 4, 4, dtype=torch.float64)
    assert ((grid / la.prior_precision).log().abs() < 1e-5).any()


@pytest.mark.parametrize("subset", SUBSETS)
def test_layerwise_prior_and_temperature(subset):
    la = fitted(MLP, subset, temperature=0.5)
    delta = torch.arange(1.0, la.n_layers + 1, dtype=torch.float64)
    la.prior_precision = delta
    sizes = [p.numel() for p in posterior_params(la)]
    prior = torch.cat([d.expand(s) for d, s in zip(delta, sizes, strict=True)])
    cold = fitted(MLP, subset)
    H = cold.posterior_precision.to_matrix() - torch.eye(la.n_params)
    expected = 2 * H + torch.diag(prior)
    torch.testing.assert_close(la.posterior_precision.to_matrix(), expected, rtol=1e-9, atol=1e-9)
    assert torch.isfinite(la.log_marginal_likelihood())


@pytest.mark.parametrize("subset", SUBSETS)
def test_regression_noise_joint_and_diagonal(subset):
    la = fitted(MLP_REGRESSION, subset, sigma_noise=0.5)
    X = MLP_REGRESSION.data(5, 3)[0]
    mean, variance = la(X)
    assert mean.shape == (5, 4) and variance.shape == (5, 4, 4)
    joint_mean, covariance = la(X, joint=True)
    assert joint_mean.shape == (20,) and covariance.shape == (20, 20)
    blocks = torch.stack([covariance[4 * i : 4 * i + 4, 4 * i : 4 * i + 4] for i in range(5)])
    torch.testing.assert_close(blocks, variance)
    _, diagonal = la(X, diagonal_output=True)
    torch.testing.assert_close(diagonal, variance.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("subset", SUBSETS)
def test_enable_backprop_differentiates_in_the_input(subset):
    la = fitted(MLP_REGRESSION, subset, enable_backprop=True)
    X = MLP_REGRESSION.data(3, 3)[0].requires_grad_()

    def total(x):
        mean, variance = la(x)
        return mean.sum() + variance.sum()

    (gradient,) = torch.autograd.grad(total(X), X)
    eps = 1e-5
    shifted = X.detach().clone()
    shifted[1, 2] += eps
    numeric = (total(shifted) - total(X.detach())) / eps
    torch.testing.assert_close(gradient[1, 2], numeric.detach(), rtol=1e-3, atol=1e-4)


def test_weights_only_has_no_bias_blocks():
    la = fitted(WEIGHTS_ONLY)
    assert la.parameter_names == ["0.weight", "4.weight"]
    assert len(la.H.eigenvalues) == 2 and la.n_params == 4 * 18 + 16


def test_progress_bar(capsys):
    la = Laplace(CNN.model(), "classification", "all", "kron", debias=True)
    la.fit(CNN.data(6, 1), progress_bar=True, curvature_loader=CNN.data(6, 2), n_data=20)
    assert "K-FAC: curvatures" in capsys.readouterr().err


def test_debias_false_is_upstream():
    la = Laplace(MLP.model(), "classification", "all", "kron", backend=CurvlinopsGGN)
    assert type(la) is laplace.KronLaplace
    assert type(Laplace(MLP.model(), "regression", "all", "diag")) is laplace.DiagLaplace


def test_h_facs_are_the_posteriors_factors():
    la = fitted(MLP)
    matrix = la.H_facs.to_matrix() + torch.eye(la.n_params)
    torch.testing.assert_close(matrix, la.posterior_precision.to_matrix())
    with pytest.raises(AttributeError, match="Remedy"):
        la.H_facs = la.H_facs


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_importing_changes_nothing_upstream(seed):
    """laplace-torch builds its map from an unordered set of subclasses; hash seeds shuffle it."""
    script = """
import laplace, laplace_debias, torch
from laplace.laplace import _all_subclasses
from laplace.baselaplace import BaseLaplace
keys = {}
for cls in _all_subclasses(BaseLaplace):
    if "_key" in vars(cls):
        keys.setdefault(cls._key, []).append(cls)
    elif hasattr(cls, "_key") and cls.__module__.startswith("laplace_debias"):
        raise SystemExit(f"{cls} inherits its key")
assert all(len(classes) == 1 for classes in keys.values()), keys
net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
for (subset, structure), (cls,) in keys.items():
    if subset == "subnetwork" or structure in ("gp", "lowrank"):
        continue  # want further arguments or packages
    la = laplace.Laplace(net, "classification", subset, structure)
    assert type(la) is cls, (subset, structure, type(la))
print("untouched")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "untouched", done.stderr


@pytest.mark.parametrize("subset", SUBSETS)
def test_expected_bias_needs_no_fit_and_changes_nothing(subset):
    generator = torch.Generator().manual_seed(3)
    la = Laplace(CNN.model(), CNN.likelihood, subset, "kron", debias="single", generator=generator)
    before = generator.get_state()
    bias = la.expected_bias(CNN.data(30, 1))
    assert bias.n_data == 30 and la._fitted is None
    assert torch.equal(generator.get_state(), before)  # the exact Fisher draws nothing
    assert {f.name for f in bias.factors} == set(la.parameter_names)
    la.fit(CNN.data(30, 1), n_data=100)
    again = la.expected_bias(CNN.data(30, 1))
    assert again == bias
    few = la.expected_bias(tuple(part[:4] for part in CNN.data(30, 1)))
    assert few.factors[0].overestimation > bias.factors[0].overestimation


def test_expected_bias_follows_the_options_of_the_curvature():
    data = CNN.data(30, 1)
    rows = {
        approx: Laplace(CNN.model(), "classification", "all", debias=True, kfac_approx=approx)
        .expected_bias(data)
        .factors[0]
        .n_rows
        for approx in ("expand", "reduce")
    }
    assert rows["expand"] > rows["reduce"]
    la = Laplace(CNN.model(), "classification", "all", debias=True, backend=CurvlinopsGGN)
    with pytest.raises(ValueError, match="(?s)HookGGN.*got CurvlinopsGGN.*Remedy"):
        la.expected_bias(data)
