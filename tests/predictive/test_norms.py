"""Posteriors over scales and shifts: fits by every method, predictions against dense oracles."""

import warnings

import pytest
import torch

from laplace_debias import Laplace, linearized_predictive
from tests.cases_norms import case, norm_names
from tests.oracles_predictive import dense_jacobian, dense_precision


def fitted(name, debias="two-batch", likelihood="classification", **options):
    model, x, y = case(name, likelihood, n=24)
    la = Laplace(model, likelihood, "all", "kron", debias=debias, **options)
    if debias == "crossfit":
        la.fit([(x[:12], y[:12]), (x[12:], y[12:])], n_data=100)
    elif debias == "single":
        la.fit((x, y), n_data=100)
    else:
        la.fit((x[:12], y[:12]), curvature_loader=(x[12:], y[12:]), n_data=100)
    return la, x


@pytest.mark.parametrize("debias", ["two-batch", "crossfit", "single"])
@pytest.mark.parametrize("name", ["tokens", "images"])
def test_variances_are_those_of_the_dense_posterior(name, debias):
    la, x = fitted(name, debias)
    params = list(la.model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no parameter takes the slow way
        result = linearized_predictive(la, x[:5], 2.0)
    J = dense_jacobian(la.model, x[:5], params)
    expected = J @ torch.linalg.solve(dense_precision(la, params, 2.0), J.mT)
    torch.testing.assert_close(result.covariance, expected, rtol=1e-9, atol=1e-12)
    one = linearized_predictive(la, x[:1], 2.0).covariance
    torch.testing.assert_close(one, expected[:1], rtol=1e-9, atol=1e-12)


def test_they_carry_uncertainty():
    la, x = fitted("tokens")
    whole = linearized_predictive(la, x, 2.0, diagonal_output=True).covariance
    for name in norm_names(la.model):
        la.model.get_parameter(name).requires_grad_(False)
    fewer = Laplace(la.model, "classification", "all", "kron", debias=True)
    _, _, y = case("tokens", n=24)
    fewer.fit((x[:12], y[:12]), curvature_loader=(x[12:], y[12:]), n_data=100)
    less = linearized_predictive(fewer, x, 2.0, diagonal_output=True).covariance
    assert bool((less < whole).all())


def test_samples_of_the_weights_agree():
    la, x = fitted("images")
    exact = linearized_predictive(la, x[:3], 5.0, diagonal_output=True).covariance
    drawn = linearized_predictive(
        la, x[:3], 5.0, diagonal_output=True, method="samples", n_samples=4000,
        generator=torch.Generator().manual_seed(0),
    ).covariance  # fmt: skip
    assert float((drawn / exact - 1).abs().max()) < 0.12


def test_regression_and_a_state_that_is_loaded():
    la, x = fitted("tokens", likelihood="regression", sigma_noise=0.5)
    twin = Laplace(la.model, "regression", "all", "kron", debias=True)
    twin.load_state_dict(la.state_dict())
    for one, two in zip(la(x), twin(x), strict=True):
        torch.testing.assert_close(one, two)
    bias = la.curvature_bias()
    assert "layer.weight" in str(bias)
