"""The large networks have the sizes that their papers give them."""

import pytest
import torch

from examples import large_networks


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_sizes():
    with torch.device("meta"):
        assert count(large_networks.resnet50()) == 25_557_032
        wide = large_networks.wide_resnet(n_classes=100)
    assert 8.9e6 < count(wide) < 9.0e6
    convolutions = [m for m in wide.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len([m for m in convolutions if m.kernel_size == (3, 3)]) == 37
    assert len([m for m in convolutions if m.kernel_size == (1, 1)]) == 3
    with pytest.raises(ValueError, match="6 n \\+ 4, got 41.*Remedy"):
        large_networks.wide_resnet(41)


def test_settled_norms_keep_activations_in_size():
    torch.manual_seed(0)
    X = torch.randn(16, 3, 16, 16)
    model = large_networks.wide_resnet(22, 1)
    unsettled = model.eval()[:-4](X).std()
    large_networks.settle_norms(model, X)
    assert abs(model[:-4](X).std() - 1) < 0.1 < abs(unsettled - 1)
    assert not model.training and model[-5].momentum == 0.1
