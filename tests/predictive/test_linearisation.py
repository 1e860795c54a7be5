"""Products of the Jacobian with many steps, from one record of two passes."""

import pytest
import torch
from torch import nn

from laplace_debias.predictive.linearisation import linearised
from tests.cases_predictive import STRUCTURED
from tests.fitted_predictive import EXACT, build, double_precision  # noqa: F401
from tests.oracles_predictive import dense_jacobian

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.mark.parametrize("name", ["mlp", "conv", "groups", "tokens", "tied", "pads itself"])
def test_products_equal_those_with_the_dense_jacobian(name):
    la, x = build(STRUCTURED[name](), n=3)
    params = list(la.params)
    f, product = linearised(la.model.eval(), x, params)
    torch.testing.assert_close(f, la.model(x), **EXACT)
    J = dense_jacobian(la.model, x, params)
    for seed in range(2):  # the record serves many steps
        g = torch.Generator().manual_seed(seed)
        steps = [torch.randn(p.shape, generator=g) for p in params]
        v = torch.cat([step.flatten() for step in steps])
        torch.testing.assert_close(product(steps), torch.einsum("ncp,p->nc", J, v), **EXACT)


def test_the_network_runs_once_for_all_steps():
    calls = []
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    net.register_forward_hook(lambda *_: calls.append(1))
    _, product = linearised(net, torch.randn(4, 2), list(net.parameters()))
    for _ in range(5):
        product([torch.randn_like(p) for p in net.parameters()])
    assert len(calls) == 1


def test_parameters_without_influence_move_nothing():
    net, idle = nn.Linear(2, 3), nn.Parameter(torch.ones(2))
    x = torch.randn(4, 2)
    _, product = linearised(net, x, [idle, net.bias])
    moved = product([torch.ones(2), torch.tensor([1.0, 2.0, 3.0])])
    torch.testing.assert_close(moved, torch.tensor([1.0, 2.0, 3.0]).expand(4, 3))
    _, product = linearised(net, x, [idle])
    assert not product([torch.ones(2)]).any()
