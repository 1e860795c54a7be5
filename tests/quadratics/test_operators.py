"""curvlinops' operators as this library calls them, against dense matrices."""

import pytest
import torch
from torch import nn

from laplace_debias.quadratics.operators import (
    CURVATURES,
    curvature_operator,
    ggn_gram,
    jacobian_products,
    loss_hessian_products,
)
from tests.oracles_quadratics import dense_ggn, dense_hessian, dense_kfac, flat_loss, orthonormal
from tests.quadratics.test_quadratic import make_classifier, make_regressor

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


@pytest.mark.parametrize("make", [make_classifier, make_regressor])
def test_gram_equals_the_dense_product_over_uneven_chunks(make):
    model, loss, X, y = make()
    G = dense_ggn(model, loss, X, y)
    D = orthonormal(len(G), 6)
    chunks = [(X[:1], y[:1]), (X[1:8], y[1:8]), (X[8:], y[8:])]
    for max_columns in (2, 99):
        got = ggn_gram(model, loss, list(model.parameters()), chunks, len(y), D, max_columns)
        torch.testing.assert_close(got, D.T @ G @ D)
        assert torch.equal(got, got.T) and not got.requires_grad


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss()])
def test_products_with_the_loss_hessian(loss):
    generator = torch.Generator().manual_seed(0)
    like = {"dtype": torch.float64, "generator": generator}
    f, V = torch.randn(4, 3, **like), torch.randn(4, 3, 2, **like)
    y = torch.tensor([0, 2, 1, 1]) if isinstance(loss, nn.CrossEntropyLoss) else f + 1
    H = torch.autograd.functional.hessian(lambda z: loss(z, y), f).reshape(12, 12)
    got = loss_hessian_products(loss, f, y, V)
    torch.testing.assert_close(got.reshape(12, 2), H @ V.reshape(12, 2))
