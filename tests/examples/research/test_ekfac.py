"""EKFAC's curvatures against the dense GGN, and K-FAC's as a case of them."""

import pytest
import torch

from examples.research import debiasing_methods, ekfac
from examples.research.debiasing_lab import Fitter, curves
from tests.examples.research.made_problem import made_problem


def test_ggn_along_a_basis_is_that_of_the_dense_ggn():
    problem, rows = made_problem(), torch.arange(5)
    bases = [[torch.linalg.qr(torch.randn(d, d))[0] for d in shape] for shape in ((3, 4), (4, 12))]
    found = ekfac.ggn_along(problem, rows, bases)
    weights = [problem.model[0].weight, problem.model[3].weight]
    for p, (Q_B, Q_A), lam in zip(weights, bases, found, strict=True):
        G = torch.zeros(p.numel(), p.numel())
        for x in problem.x[rows]:
            f = problem.model(x[None])[0]
            J = torch.stack([torch.autograd.grad(c, p, retain_graph=True)[0].flatten() for c in f])
            prob = f.detach().softmax(0)
            G += J.T @ (torch.diag(prob) - torch.outer(prob, prob)) @ J
        Q = torch.kron(Q_B, Q_A)
        expected = (Q * (G @ Q)).sum(0).reshape(lam.shape) * problem.n / len(rows)
        torch.testing.assert_close(lam, expected, rtol=1e-4, atol=1e-5)


def test_products_as_corrected_eigenvalues_change_nothing():
    problem = made_problem()
    fit = Fitter(problem)
    H = debiasing_methods.single(fit, 12, torch.Generator().manual_seed(0))
    corrected = ekfac.EigenvalueCorrected(H, [torch.outer(*lams) for lams in H.eigenvalues])
    plain, other = curves(problem, H), ekfac.curves_of_any(problem, corrected)
    for key, values in plain.items():
        assert other[key] == pytest.approx(values, rel=1e-5)
