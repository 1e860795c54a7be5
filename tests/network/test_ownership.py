"""Who owns which parameter, and which of them K-FAC can represent."""

import pytest
from torch import nn

from laplace_debias.network.layers import KFAC_TYPES
from laplace_debias.network.ownership import (
    is_ordinary,
    is_supported_layer,
    kfac_layers,
    owned_parameters,
    owners,
    transposed_parameters,
)
from tests.cases_layers import Conv1D


def tied():
    """Two linear layers that share a weight, and one of its own."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    net[1].weight = net[0].weight
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


def test_a_parameter_of_unlike_layers_has_no_owner():
    net = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    net[1].bias = net[0].bias
    with pytest.raises(ValueError, match=r"0.bias \(LayerNorm, Linear\)"):
        owned_parameters(net)
    assert [p.scales for p in owned_parameters(nn.LayerNorm(2))] == [True, True]


def test_transposed_weights_are_those_of_conv1d():
    net = nn.Sequential(nn.Linear(3, 3), Conv1D(2, 3))
    assert transposed_parameters(net, net.parameters()) == [False, False, True, False]
    assert not is_supported_layer(net[1], KFAC_TYPES)  # no other backend knows it


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
    ordinary += [nn.LayerNorm(2), nn.BatchNorm2d(2), Conv1D(2, 3)]
    others = [Scaled(2, 1), Other(1, 1, 1), replaced, nn.Conv1d(1, 1, 1), nn.Tanh()]
    assert all(map(is_ordinary, ordinary)) and not any(map(is_ordinary, others))


def test_only_convolutions_weights_have_patches_of_several_pixels():
    net = nn.Sequential(nn.Conv1d(2, 2, 5), nn.BatchNorm1d(2), nn.Conv2d(2, 3, (3, 2)))
    net.append(nn.Conv3d(2, 2, 1))
    net.append(nn.Linear(2, 2))
    net.append(nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 2, 3)))
    pixels = {p.name: p.n_pixels for p in owned_parameters(net)}
    assert {name for name, k in pixels.items() if k > 1} == {"0.weight", "2.weight"}
    assert (pixels["0.weight"], pixels["2.weight"]) == (5, 6)
