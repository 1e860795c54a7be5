"""The distance of two posteriors, against dense matrices."""

import pytest
import torch
from torch import nn

from laplace_debias import Laplace, far_inputs, posterior_distance

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(12) % 2


def fitted(net, data, prior=1.0, **kwargs):
    la = Laplace(net, "classification", "all", "kron", debias="single", prior_precision=prior)
    la.fit(data, n_data=100)
    return la


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def dense_deviations(la, net, x):
    """Root of the diagonal of J P^-1 J^T from dense matrices, output by output."""
    names = [name for name, _ in net.named_parameters()]
    params = {name: p.detach() for name, p in net.named_parameters()}

    def outputs(params, row):
        return torch.func.functional_call(net, params, row[None])[0]

    P = la.posterior_precision.to_matrix()
    found = []
    for row in x:
        J = torch.func.jacrev(outputs)(params, row)
        J = torch.cat([J[name].flatten(1) for name in names], dim=1)
        found.append((J @ torch.linalg.solve(P, J.T)).diagonal().sqrt())
    return torch.stack(found)


def test_equals_the_dense_formula(net):
    one, two = fitted(net, (X, Y)), fitted(net, (X[:5], Y[:5]), prior=0.1)
    x = torch.randn(7, 3, dtype=torch.float64)
    ratio = dense_deviations(one, net, x) / dense_deviations(two, net, x)
    assert posterior_distance(one, two, x) == pytest.approx(float(ratio.log().abs().mean()), 1e-8)
    assert posterior_distance(one, two, x) > 0.1
    assert posterior_distance(two, one, x) == pytest.approx(posterior_distance(one, two, x))


def test_copies_of_a_network_count_as_the_same(net):
    import copy

    one, two = fitted(net, (X, Y)), fitted(copy.deepcopy(net), (X, Y))
    assert posterior_distance(one, two, X) == pytest.approx(0.0, abs=1e-12)


def test_other_outputs_are_refused(net):
    other = fitted(nn.Linear(3, 4).double(), (X, torch.arange(12) % 4))
    with pytest.raises(ValueError, match="the same outputs"):
        posterior_distance(fitted(net, (X, Y)), other, X)


def test_far_inputs_have_twice_the_deviation():
    x = torch.tensor([1.0, 4.0]) * torch.randn(500, 2) + torch.tensor([3.0, -1.0])
    far = far_inputs(x, 20_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(far.std(0), 2 * x.std(0), rtol=0.03, atol=0)
    torch.testing.assert_close(far.mean(0), x.mean(0), rtol=0.1, atol=0.1)


def test_far_inputs_of_whole_numbers_are_refused():
    with pytest.raises(ValueError, match="floating point"):
        far_inputs(torch.arange(4), 2)
