"""Sampled networks: the network itself with other weights."""

import copy

import pytest
import torch
from laplace.utils import FeatureExtractor
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from laplace_debias.predictive.network_samples import network_samples


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def test_outputs_are_those_of_a_copy_with_the_sampled_weights():
    model, X = net(), torch.randn(5, 3).double()
    before = parameters_to_vector(model.parameters()).detach().clone()
    samples = before + torch.randn(3, len(before)).double()
    names = [name for name, _ in model.named_parameters()]
    found = list(network_samples(model, names, samples, X))
    for f, sample in zip(found, samples, strict=True):
        other = copy.deepcopy(model)
        vector_to_parameters(sample, other.parameters())
        torch.testing.assert_close(f, other(X))
    assert torch.equal(parameters_to_vector(model.parameters()), before)


def test_some_parameters_are_sampled_and_the_others_stay():
    model, X = net(), torch.randn(5, 3).double()
    samples = torch.randn(2, 2 + 8).double()
    for f, sample in zip(
        network_samples(model, ["2.bias", "2.weight"], samples, X), samples, strict=True
    ):
        h = model[1](model[0](X))
        torch.testing.assert_close(f, h @ sample[2:].view(2, 4).T + sample[:2])


def test_features_of_a_last_layer_are_computed_once():
    model, X = net(), torch.randn(5, 3).double()
    extractor = FeatureExtractor(model, last_layer_name="2")
    calls = []
    model[0].register_forward_hook(lambda *args: calls.append(1))
    samples = torch.randn(4, 8 + 2).double()
    found = list(network_samples(extractor, ["weight", "bias"], samples, X))
    assert len(calls) == 1
    h = model[1](model[0](X))
    for f, sample in zip(found, samples, strict=True):
        torch.testing.assert_close(f, h @ sample[:8].view(2, 4).T + sample[8:])


def test_the_model_is_left_as_it_was_when_it_raises():
    model = net()
    before = [p for p in model.parameters()]
    values = [p.clone() for p in before]
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(RuntimeError):
        next(network_samples(model, names, torch.zeros(1, 26).double(), torch.ones(1, 7).double()))
    for p, old, value in zip(model.parameters(), before, values, strict=True):
        assert p is old and torch.equal(p, value)


def test_keyword_arguments_reach_the_model():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1, bias=False)

        def forward(self, batch, scale=1.0):
            return scale * self.layer(batch["x"])

    samples = torch.tensor([[1.0, 2.0]])
    (f,) = network_samples(Scaled(), ["layer.weight"], samples, {"x": torch.ones(1, 2)}, scale=5.0)
    assert f.item() == 15.0
