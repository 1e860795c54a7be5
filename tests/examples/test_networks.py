"""The networks have the sizes that the papers give them, and the right outputs."""

import pytest
import torch

from examples import networks


def count(parameters):
    return sum(p.numel() for p in parameters)


def test_all_cnn_c_has_the_papers_size():
    model = networks.all_cnn_c()
    weights, biases = networks.weights_and_biases(model)
    assert count(model.parameters()) == 1_369_738
    assert count(weights) == 1_368_480
    assert count(biases) == 1_369_738 - 1_368_480
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert count(networks.all_cnn_c(100).parameters()) == 1_387_108  # the paper's CIFAR-100 model
    assert not any(isinstance(module, torch.nn.Dropout) for module in model)
    convolutions = [i for i, module in enumerate(model) if isinstance(module, torch.nn.Conv2d)]
    assert convolutions == list(range(0, 17, 2))


@pytest.mark.parametrize(("depth", "width"), [(1, 32), (4, 64), (7, 128)])
def test_conv_net_family(depth, width):
    model = networks.make_model(f"convnet-{depth}-{width}")
    expected = (3 * 25 * width + width) + depth * (25 * width**2 + width) + (640 * width + 10)
    assert count(model.parameters()) == expected
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_unknown_models_are_named():
    with pytest.raises(ValueError, match="got 'convnet-4'"):
        networks.make_model("convnet-4")
    with pytest.raises(ValueError, match="width >= 1"):
        networks.conv_net(1, 0)


def test_resnet20_has_its_papers_size_and_frozen_norms():
    model = networks.resnet20()
    assert count(model.parameters()) == 269_722
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert len(frozen) == 2 * 19 and all("norms" in name or name[0] == "1" for name in frozen)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_a_residual_block_without_its_branch_is_its_shortcut():
    block = networks.ResidualBlock(2, 5, 2).eval()
    torch.nn.init.zeros_(block.norms[1].weight)
    x = torch.rand(3, 2, 7, 7)
    out = block(x)
    assert torch.equal(out[:, :2], x[:, :, ::2, ::2]) and not out[:, 2:].any()


@pytest.mark.parametrize(
    ("model", "shape", "size"),
    [
        (networks.strided_cnn(), (1, 28, 28), 63_786),
        (networks.strided_cnn(3, 32), (3, 32, 32), 79_946),
        (networks.strided_cnn(1, 30), (1, 30, 30), 79_146),
        (networks.digits_cnn(), (1, 8, 8), 21_546),
        (networks.digits_cnn(64, 8), (1, 8, 8), 18_346),
        (networks.digits_mlp(), (64,), 85_002),
        (networks.resnet(1, (8, 16, 32)), (1, 8, 8), 19_074),
        (networks.DigitsTransformer(), (1, 8, 8), 9_290),
    ],
)
def test_small_networks(model, shape, size):
    assert model(torch.zeros(2, *shape)).shape == (2, 10)
    assert count(model.parameters()) == size
