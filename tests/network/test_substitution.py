"""Other weights for one thread's operations, and none of them left behind."""

import threading

import torch
from torch import nn
from torch.func import functional_call

from laplace_debias.network.substitution import substituted


def test_outputs_and_derivatives_are_those_of_a_network_with_these_weights():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3).double()
    other = {k: torch.randn_like(v, requires_grad=True) for k, v in net.named_parameters()}
    expected = functional_call(net, other, (x,))
    wanted = torch.autograd.grad(expected.sum(), list(other.values()))
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with substituted([(p, other[name]) for name, p in net.named_parameters()]):
        f = net(x)
    torch.testing.assert_close(f, expected)
    for got, g in zip(torch.autograd.grad(f.sum(), list(other.values())), wanted, strict=True):
        torch.testing.assert_close(got, g)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_a_module_under_two_names_and_another_thread_keep_the_networks_own_weights():
    layer = nn.Linear(2, 2, bias=False)
    net = nn.Sequential(layer, nn.Tanh(), layer)
    x, own = torch.ones(1, 2), layer.weight
    expected, seen = net(x), []
    with substituted([(layer.weight, torch.zeros(2, 2))]):
        assert not net(x).any()
        thread = threading.Thread(target=lambda: seen.append(net(x)))
        thread.start()
        thread.join()
    torch.testing.assert_close(seen[0], expected)
    assert net[0].weight is own and net[2].weight is own
