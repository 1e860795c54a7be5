"""Diagonal curvature and its predictive against dense matrices and laplace-torch."""

import pytest
import torch
from laplace import Laplace as Upstream
from laplace.curvature import BackPackGGN
from torch import nn

from laplace_debias import Laplace
from laplace_debias.comparison.fitting import prior_only
from laplace_debias.predictive.diagonal import DiagonalPredictor, diagonal_ggn
from tests.fitted_predictive import double_precision  # noqa: F401

pytestmark = pytest.mark.usefixtures("double_precision")


def _net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 4), nn.Tanh(),
        nn.Linear(4, 3),
    )  # fmt: skip


def _jacobian(net, x):
    """Dense ``[n, C, P]``, one output at a time."""
    rows = []
    for datum in x:
        f = net(datum[None])[0]
        for c in range(len(f)):
            grads = torch.autograd.grad(f[c], list(net.parameters()), retain_graph=True)
            rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows).unflatten(0, (len(x), -1))


def _hessian(net, x, likelihood):
    f = net(x).detach()
    if likelihood == "regression":
        return torch.eye(3).expand(len(x), 3, 3)
    p = f.softmax(-1)
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def _posterior(net, likelihood, **kwargs):
    la = Laplace(net, likelihood, "all", "kron", debias="single", **kwargs)
    prior_only(la, n_data=20, n_outputs=3)
    return la


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("memory_budget", [1, 2**20])
def test_diagonal_against_a_dense_matrix(likelihood, memory_budget):
    net, x = _net(), torch.randn(7, 1, 8, 8)
    y = torch.randint(3, (7,)) if likelihood == "classification" else torch.randn(7, 3)
    names = [name for name, _ in net.named_parameters()]
    J, H = _jacobian(net, x), _hessian(net, x, likelihood)
    expected = torch.einsum("ncp,ncd,ndp->p", J, H, J)
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    ours = diagonal_ggn(net, names, batches, likelihood, memory_budget=memory_budget)
    assert [h.shape for h in ours] == [p.shape for p in net.parameters()]
    assert torch.allclose(torch.cat([h.flatten() for h in ours]), expected)


@pytest.mark.parametrize("diagonal_output", [False, True])
def test_predictive_against_dense_matrices(diagonal_output):
    net, x = _net(), torch.randn(5, 1, 8, 8)
    la = _posterior(net, "regression", sigma_noise=0.5)
    h = [torch.rand_like(p) for p in net.parameters()]
    grid = [0.3, 4.0]
    result = DiagonalPredictor(la, h, grid)(x, diagonal_output)
    J, flat = _jacobian(net, x), torch.cat([part.flatten() for part in h])
    for delta, ours in zip(grid, result.covariance, strict=True):
        dense = torch.einsum("ncp,p,ndp->ncd", J, 1 / (flat / 0.25 + delta), J)
        expected = dense.diagonal(dim1=1, dim2=2) if diagonal_output else dense
        assert torch.allclose(ours, expected)


def test_many_prior_precisions_at_once():
    net, x = _net(), torch.randn(3, 1, 8, 8)
    la, h = _posterior(net, "classification"), [torch.rand_like(p) for p in net.parameters()]
    grid = torch.logspace(-1, 1, 40)  # more than there are nodes
    many = DiagonalPredictor(la, h, grid)(x).covariance
    one = DiagonalPredictor(la, h, [float(grid[17])])(x).covariance[0]
    assert torch.allclose(many[17], one, rtol=1e-9)


def test_as_laplace_torchs_diagonal_posterior():
    net, x = _net(), torch.randn(20, 1, 8, 8)
    y = torch.randint(3, (20,))
    la = _posterior(net, "classification")
    h = diagonal_ggn(net, la.parameter_names, (x, y), "classification")
    theirs = Upstream(
        net, "classification", "all", "diag", backend=BackPackGGN, prior_precision=2.0
    )
    theirs.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 20))
    mean, covariance = theirs._glm_predictive_distribution(x[:6])
    ours = DiagonalPredictor(la, h, [2.0])(x[:6])
    assert torch.allclose(ours.mean, mean) and torch.allclose(ours.covariance[0], covariance)


def test_prior_only_is_the_neural_tangent_kernel():
    net, x = _net(), torch.randn(4, 1, 8, 8)
    la = _posterior(net, "classification", prior_precision=3.0)
    J = _jacobian(net, x)
    assert torch.allclose(la.output_moments(x)[1], torch.einsum("ncp,ndp->ncd", J, J) / 3)


def test_what_does_not_fit_is_refused():
    net = _net()
    la, h = _posterior(net, "classification"), [torch.rand_like(p) for p in net.parameters()]
    with pytest.raises(ValueError, match="Expected a diagonal of shapes"):
        DiagonalPredictor(la, h[:-1], [1.0])
    x, y = torch.randn(20, 1, 8, 8), torch.randint(3, (20,))
    la.fit((x, y), n_data=20)
    with pytest.raises(ValueError, match="another one"):
        DiagonalPredictor(la, h, [1.0])
    prior_only(la, 20, 3)
    with pytest.raises(NotImplementedError, match="method='exact'"):
        DiagonalPredictor(la, h, [1.0]).samples(x)
