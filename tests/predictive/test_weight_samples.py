"""Samples of the linearised network against its dense Jacobian and exact covariances."""

from __future__ import annotations

import pytest
import torch
from laplace.baselaplace import KronLaplace
from laplace.lllaplace import KronLLLaplace

from laplace_debias.predictive.linearized import linearized_predictive
from laplace_debias.predictive.predictor import StructuredPredictor
from tests.cases_predictive import FALLBACK, STRUCTURED
from tests.fitted_predictive import (
    EXACT,
    build,
    double_precision,  # noqa: F401
    fitted_cnn,
)
from tests.oracles_predictive import (
    dense_jacobian,
    dense_precision,
)

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.mark.parametrize("cls", [KronLaplace, KronLLLaplace])
def test_sampled_covariance_converges_to_the_exact_one(cls):
    la, x = fitted_cnn(cls)
    exact = linearized_predictive(la, x, [0.5, 5.0])
    errors = []
    for n_samples in (200, 20_000):
        sampled = linearized_predictive(
            la,
            x,
            [0.5, 5.0],
            method="samples",
            n_samples=n_samples,
            generator=torch.Generator().manual_seed(1),
        )
        torch.testing.assert_close(sampled.mean, exact.mean)
        errors.append((sampled.covariance - exact.covariance).norm() / exact.covariance.norm())
    assert errors[1] < 0.02  # 10 standard errors of a variance from 20,000 samples
    assert errors[1] < errors[0] / 3


def dense_root(la, delta):
    """A matrix M with ``M M^T = P^-1``, in the eigenbasis of each of laplace-torch's blocks."""
    parts = []
    for values, vectors in zip(la.H.eigenvalues, la.H.eigenvectors, strict=True):
        lam, U = values[0], vectors[0]
        if len(values) == 2:
            lam, U = torch.outer(*values).flatten(), torch.kron(*vectors)
        parts.append(U / (la._H_factor * lam + delta).sqrt())
    return torch.block_diag(*parts)


@pytest.mark.parametrize("cls", [KronLaplace, KronLLLaplace])
def test_samples_are_jacobian_times_step(cls):
    la, x = fitted_cnn(cls)
    predictor = StructuredPredictor(la, [0.5, 5.0])
    f, samples = predictor.samples(x, 3, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    jacobians = la.backend.jacobians if cls is KronLaplace else la.backend.last_layer_jacobians
    Js, _ = jacobians(x)
    eps = torch.stack([torch.randn(la.n_params, generator=generator) for _ in range(3)])
    for delta, got in zip((0.5, 5.0), samples, strict=True):
        root = dense_root(la, delta)
        expected = f + torch.einsum("ncp,sp->snc", Js, eps @ root.T)
        torch.testing.assert_close(got, expected, **EXACT)
        la.prior_precision = delta
        covariance = la.posterior_precision.bmm(torch.eye(la.n_params), exponent=-1)
        torch.testing.assert_close(root @ root.T, covariance, **EXACT)


# PyTorch's forward mode looks through no_grad, see the module's docstring
@pytest.mark.parametrize(
    "name", [*STRUCTURED, *(name for name in FALLBACK if name != "without gradients")]
)
def test_samples_of_every_layer_kind(name):
    la, x = build({**STRUCTURED, **FALLBACK}[name]())
    f, samples = StructuredPredictor(la, 0.5).samples(x, 2, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    eps = torch.stack([torch.randn(la.n_params, generator=generator) for _ in range(2)])
    root = dense_root(la, 0.5)
    precision = dense_precision(la, la.params, 0.5)
    torch.testing.assert_close(root @ root.T, precision.inverse(), **EXACT)
    steps = eps @ root.T
    J = dense_jacobian(la.model, x, la.params)
    torch.testing.assert_close(samples[0], f + torch.einsum("ncp,sp->snc", J, steps), **EXACT)


@pytest.mark.parametrize("cls", [KronLaplace, KronLLLaplace])
def test_samples_follow_the_generator_and_not_the_budget(cls):
    la, x = fitted_cnn(cls)
    rng = torch.get_rng_state()
    draws = [
        linearized_predictive(
            la,
            x,
            [0.5, 2.0],
            method="samples",
            n_samples=9,
            memory_budget=budget,
            generator=torch.Generator().manual_seed(seed),
        ).covariance
        for seed, budget in [(0, 2**29), (0, 1), (1, 2**29)]
    ]
    torch.testing.assert_close(draws[0], draws[1], **EXACT)
    assert not torch.allclose(draws[0], draws[2])
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("budget", [2**29, 2000, 1])  # all, three and one at once
def test_samples_of_a_last_layer_do_not_depend_on_the_chunks(bias, budget):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2, bias))
    la = KronLLLaplace(net, "regression", last_layer_name="2")
    x = torch.randn(5, 3)
    la.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :2]), 5))

    def drawn(memory_budget):
        predictor = StructuredPredictor(la, [0.5, 5.0], memory_budget)
        return predictor.samples(x, 7, torch.Generator().manual_seed(1))[1]

    assert drawn(budget).shape == (2, 7, 5, 2)
    torch.testing.assert_close(drawn(budget), drawn(2**29), **EXACT)
    assert StructuredPredictor(la, [0.5]).samples(x)[1].shape == (1, 100, 5, 2)
