"""curvlinops' operators as this library calls them, against dense matrices."""

import pytest
import torch

from laplace_debias.quadratics.operators import (
    CURVATURES,
    curvature_operator,
    jacobian_products,
)
from tests.oracles_quadratics import dense_ggn, dense_hessian, dense_kfac, flat_loss, orthonormal
from tests.quadratics.test_quadratic import make_classifier

DENSE = {"ggn": dense_ggn, "hessian": dense_hessian, "kfac": lambda m, loss, X, y: dense_kfac(m, X)}


@pytest.mark.parametrize("curvature", CURVATURES)
def test_products_gradient_and_loss_of_chunks_are_those_of_all_data(curvature):
    model, loss, X, y = make_classifier()
    chunks = [(X[:5], y[:5]), (X[5:], y[5:])]
    H = curvature_operator(curvature, model, loss, list(model.parameters()), chunks, len(y))
    matrix = DENSE[curvature](model, loss, X, y)
    V = orthonormal(len(matrix), 3)
    torch.testing.assert_close((H @ V).detach(), matrix @ V)
    gradient, value = H.gradient_and_loss()
    expected = loss(model(X), y)
    torch.testing.assert_close(value.detach(), expected.detach())
    for g, w in zip(gradient, torch.autograd.grad(expected, model.parameters()), strict=True):
        torch.testing.assert_close(g.detach(), w)


@pytest.mark.parametrize("max_columns", [1, 2, 99])
def test_products_with_the_jacobian(max_columns):
    model, loss, X, y = make_classifier()
    _, outputs, theta, _ = flat_loss(model, loss, X, y)
    J = torch.func.jacrev(outputs)(theta).flatten(0, 1)  # [n * C, P]
    D = orthonormal(len(theta), 5)
    got = jacobian_products(model, list(model.parameters()), X, y, D, max_columns)
    torch.testing.assert_close(got.detach(), J @ D)


def test_unknown_curvature():
    model, loss, X, y = make_classifier()
    with pytest.raises(ValueError, match="curvature in .*got 'fisher'.*Remedy"):
        curvature_operator("fisher", model, loss, list(model.parameters()), [(X, y)], len(y))
