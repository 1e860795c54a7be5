"""A network and the inputs of its last layer, with nothing kept between calls."""

import copy
import pickle

import pytest
import torch
from laplace.utils import FeatureExtractor
from torch import nn

from laplace_debias.network.features import LastLayerNetwork, outputs_and_features


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_features_are_the_last_layers_inputs_and_leave_no_hook():
    net, x = network(), torch.randn(5, 3)
    f, phi = LastLayerNetwork(net, "2").forward_with_features(x)
    torch.testing.assert_close(phi, net[:2](x))
    torch.testing.assert_close(f, net(x))
    assert not any(m._forward_hooks for m in net.modules())


def test_copies_see_their_own_batches():
    extractor = LastLayerNetwork(network(), "2")
    x, other = torch.randn(5, 3), torch.randn(5, 3)
    for twin in (copy.deepcopy(extractor), pickle.loads(pickle.dumps(extractor))):
        extractor.forward_with_features(x)
        phi = twin.forward_with_features(other)[1]
        torch.testing.assert_close(phi, extractor.model[:2](other))


@pytest.mark.parametrize("reduction", ["pick_first", "pick_last", "average", None])
def test_positions_are_reduced_as_laplace_torch_does(reduction):
    net, x = network(), torch.randn(5, 6, 3)
    ours = LastLayerNetwork(copy.deepcopy(net), "2", feature_reduction=reduction)
    theirs = FeatureExtractor(net, "2", feature_reduction=reduction)
    got = ours.forward_with_features(x)[1]
    torch.testing.assert_close(got, theirs.forward_with_features(x)[1])
    wanted = {"pick_first": (5, 4), "pick_last": (5, 4), "average": (5, 4), None: (5, 6, 4)}
    assert got.shape == wanted[reduction]


def test_a_users_hook_stays_and_laplace_torchs_goes():
    net, calls = network(), []
    net[2].register_forward_hook(lambda *_: calls.append(1))
    extractor = LastLayerNetwork.taking_over(FeatureExtractor(net, "2"))
    extractor.forward_with_features(torch.randn(1, 3))
    assert len(net[2]._forward_hooks) == 1 and calls == [1]


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="nn.Linear, got Tanh.*Remedy"):
        LastLayerNetwork(network(), "1")
    net = network()
    net.forward = lambda x: net[:2](x)
    with pytest.raises(ValueError, match="call the last layer '2'.*Remedy"):
        outputs_and_features(LastLayerNetwork(net, "2"), torch.randn(1, 3))
