"""Prior precisions from nodes: the error bound for any eigenvalue, and unchanged predictives."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laplace_debias.predictive import prior_nodes as module
from laplace_debias.predictive.linearized import linearized_predictive
from laplace_debias.predictive.predictor import SharedPredictor, StructuredPredictor
from laplace_debias.predictive.prior_nodes import prior_nodes
from tests.cases_predictive import STRUCTURED
from tests.fitted_predictive import build
from tests.oracles_predictive import random_laplace


@settings(max_examples=15, deadline=None)
@given(
    decades=st.floats(0.5, 5.0),
    start=st.floats(-6, 6),
    lam=st.lists(st.floats(-12, 12), min_size=1, max_size=20),
)
def test_every_eigenvalue_is_within_the_bound(decades, start, lam):
    deltas = torch.logspace(start, start + decades, 100, dtype=torch.float64)
    nodes, coefficients = module._nodes(tuple(deltas.tolist()), 2e-7)
    assert len(nodes) < len(deltas)
    for value in [0.0, *10.0 ** np.array(lam)]:
        got = (1 / (value + nodes)) @ coefficients
        want = 1 / (value + deltas.numpy())
        np.testing.assert_allclose(got, want, rtol=2.2e-7)


def test_rounding_errors_are_not_amplified():
    """Moments of either sign: the sum of absolute terms stays near the sum."""
    deltas = torch.logspace(-4, 4, 200)
    nodes, coefficients = prior_nodes(deltas)
    for lam in (0.0, 1e-3, 1.0, 1e5):
        terms = coefficients.abs() / (lam + nodes).unsqueeze(1)
        assert (terms.sum(0) * (lam + deltas)).max() < 5


@pytest.mark.parametrize("deltas", [torch.logspace(-1, 1, 16), torch.ones(40)])
def test_nothing_to_gain(deltas):
    assert prior_nodes(deltas) is None


def test_a_wide_sparse_grid_is_left_alone():
    assert prior_nodes(torch.logspace(-20, 20, 50)) is None


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize(
    ("dtype", "rtol", "decades"), [(torch.float32, 2e-5, 5), (torch.float64, 1e-10, 2)]
)
def test_predictives_are_those_of_each_prior_precision(diagonal, dtype, rtol, decades):
    model, shape = STRUCTURED["conv"]()[:2]
    x = torch.randn(5, *shape, dtype=dtype)
    model = model.to(dtype).eval()
    la = random_laplace(model, model(x).shape[1])
    deltas = torch.logspace(-2, -2 + decades, 100, dtype=dtype)
    assert prior_nodes(deltas) is not None
    predictor = StructuredPredictor(la, deltas)
    got = predictor(x, diagonal_output=diagonal).covariance
    (shared,) = SharedPredictor([predictor])(x, diagonal_output=diagonal)
    torch.testing.assert_close(shared.covariance, got, rtol=0, atol=0)
    assert len(got) == 100
    for i in (0, 17, 50, 99):
        want = linearized_predictive(la, x, deltas[i], diagonal_output=diagonal)
        scale = want.covariance.abs().max()
        torch.testing.assert_close(got[i], want.covariance, rtol=rtol, atol=rtol * float(scale))


def test_samples_are_of_each_prior_precision():
    la, x = build(STRUCTURED["mlp"]())
    deltas = torch.logspace(-1, 1, 40, dtype=torch.float64)
    many = StructuredPredictor(la, deltas).samples(x, 3, torch.Generator().manual_seed(0))[1]
    assert len(many) == 40


def test_layer_wise_prior_precisions_are_taken_as_they_are():
    la, x = build(STRUCTURED["mlp"]())
    deltas = torch.rand(40, len(la.H), dtype=torch.float64) + 0.1
    got = linearized_predictive(la, x, deltas).covariance
    want = linearized_predictive(la, x, deltas[7:8]).covariance
    torch.testing.assert_close(got[7:8], want, rtol=1e-5, atol=1e-6)
