"""Scales of the K-FACs against dense Jacobians."""

import pytest
import torch
from torch import nn

from examples.cifar10 import scale


def dense_ggn_trace(model, X):
    """By definition, from whole Jacobians."""
    params = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}
    rest = {k: p.detach() for k, p in model.named_parameters() if not p.requires_grad}

    def f(params, x):
        return torch.func.functional_call(model, {**params, **rest}, (x.unsqueeze(0),)).squeeze(0)

    total = 0.0
    for x in X:
        J = torch.cat([j.flatten(1) for j in torch.func.jacrev(f)(params, x).values()], dim=1)
        p = torch.softmax(model(x.unsqueeze(0)).squeeze(0).detach(), dim=0)
        total += torch.trace(J.T @ (torch.diag(p) - torch.outer(p, p)) @ J).item()
    return total


def test_ggn_trace_is_that_of_dense_jacobians(problem):
    model, split = problem
    X = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    model = model.double()
    assert scale.ggn_trace(model, X) == pytest.approx(dense_ggn_trace(model, X), rel=1e-10)


def test_one_datum_and_one_position_have_no_approximation():
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    X, y = torch.randn(1, 4, dtype=torch.float64), torch.tensor([1])
    exact = scale.ggn_trace(net, X)
    for name, trace in scale.kfac_traces(net, X, y).items():
        assert trace == pytest.approx(exact, rel=1e-10), name


def test_the_command_prints_a_ratio_for_each(arguments, files, capsys):
    argv = "--model convnet-0-2 --validation-size 8 --n-images 3".split()
    ratios = scale.main(["--data", str(files), "--weights", str(files / "weights.pt"), *argv])
    assert set(ratios) == {"expand", "reduce", "backpack"}
    assert ratios["backpack"] > ratios["reduce"] > 0
    assert capsys.readouterr().out.count("times the GGN's trace") == 3
