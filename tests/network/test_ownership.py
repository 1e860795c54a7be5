"""Who owns which parameter, and which of them K-FAC can represent."""

import pytest
import torch
from torch import nn

from laplace_debias.network.ownership import (
    check_supported,
    freeze_unsupported,
    is_ordinary,
    kfac_layers,
    owned_parameters,
    owners,
    unsupported_parameters,
)


def tied():
    """Two linear layers that share a weight, and one of its own."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    net[1].weight = net[0].weight
    return net


def mixed():
    """Layers that K-FAC knows beside some that it does not."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    net.register_parameter("free", nn.Parameter(torch.ones(1)))
    return net


def test_owned_parameters_are_in_the_models_order_with_all_their_layers():
    net = tied()
    owned = owned_parameters(net)
    assert [p.name for p in owned] == [name for name, _ in net.named_parameters()]
    assert [p.role for p in owned] == ["weight", "bias", "bias", "weight", "bias"]
    assert owned[0].layers == (net[0], net[1]) and owned[2].layers == (net[1],)
    found = owners(net, [net[0].weight])
    assert found == {id(net[0].weight): [(net[0], "weight"), (net[1], "weight")]}


def test_frozen_parameters_count_only_if_asked_for():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    net[0].requires_grad_(False)
    assert [p.name for p in owned_parameters(net)] == ["1.weight", "1.bias"]
    assert [p.name for p in owned_parameters(net, [net[0].bias])] == ["0.bias"]
    assert list(kfac_layers(net)) == ["1"]
    with pytest.raises(ValueError, match="at least one parameter.*Remedy"):
        owned_parameters(net.requires_grad_(False))


def test_what_kfac_cannot_represent_is_named_and_can_be_frozen():
    net = mixed()
    names = ["free", "1.weight", "1.bias"]
    assert unsupported_parameters(net) == names
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm2d\).*freeze_unsupported"):
        check_supported(net)
    with pytest.raises(ValueError, match=r"1.weight \(BatchNorm2d\).*requires_grad_\(False\)"):
        owned_parameters(net)
    assert freeze_unsupported(net) == ["free", "1"]
    check_supported(net)
    assert [p.name for p in owned_parameters(net)] == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert [n for n, p in net.named_parameters() if not p.requires_grad] == names


def test_shared_weights_and_attention_are_unsupported_for_whole_backends():
    assert unsupported_parameters(tied()) == ["0.weight"]
    attention = nn.MultiheadAttention(4, 2)
    assert "out_proj.weight" in unsupported_parameters(attention)  # used without its module
    assert kfac_layers(attention) == {}
    with pytest.raises(ValueError, match="trainable Conv2d or Linear layer, got none among"):
        check_supported(nn.Sequential(nn.Conv1d(1, 1, 1)), (nn.Linear, nn.Conv2d))


def test_a_weight_that_is_a_bias_elsewhere_has_no_role():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].register_parameter("bias", net[1].bias)
    net[1].extra = net[1].bias
    with pytest.raises(ValueError, match="0.bias"):
        owned_parameters(net)


def test_ordinary_layers_compute_no_more_than_their_class():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Renamed(nn.Conv2d):
        pass

    class Other(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(2 * x, weight, bias)

    replaced = nn.Linear(2, 1)
    replaced.forward = lambda x: x
    ordinary = [nn.Linear(2, 1), nn.Conv2d(1, 1, 1), Renamed(1, 1, 1)]
    others = [Scaled(2, 1), Other(1, 1, 1), replaced, nn.Conv1d(1, 1, 1), nn.Tanh()]
    assert all(map(is_ordinary, ordinary)) and not any(map(is_ordinary, others))
