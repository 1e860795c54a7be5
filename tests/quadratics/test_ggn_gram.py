"""Directional curvatures of the GGN without a backward pass, against dense matrices."""

import pytest
import torch
from torch import nn

from laplace_debias.quadratics.ggn_gram import ggn_gram, loss_hessian_products
from tests.oracles_quadratics import dense_ggn, orthonormal
from tests.quadratics.test_quadratic import make_classifier, make_regressor


@pytest.mark.parametrize("make", [make_classifier, make_regressor])
def test_equals_the_dense_product_over_uneven_chunks(make):
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
