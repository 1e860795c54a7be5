"""The paper's CIFAR networks: All-CNN-C without dropout, and the ConvNet family "d-w"."""

from collections.abc import Iterator

from torch import nn

# (output channels, kernel size, stride, padding) of All-CNN-C's nine convolutions; the last one's
# output channels are the classes.
_ALL_CNN_C = (
    (96, 3, 1, 1),
    (96, 3, 1, 1),
    (96, 3, 2, 1),
    (192, 3, 1, 1),
    (192, 3, 1, 1),
    (192, 3, 2, 1),
    (192, 3, 1, 0),
    (192, 1, 1, 0),
    (None, 1, 1, 0),
)


def all_cnn_c(num_classes: int = 10) -> nn.Sequential:
    """All-CNN-C (Springenberg et al., 2015) without dropout, as the paper uses it.

    Images ``[N, 3, 32, 32]`` to logits ``[N, num_classes]``. With ten classes it has 1,369,738
    parameters, of which 1,368,480 are weights.

    Args:
        num_classes: Number of classes C.

    Returns:
        Convolutions at the indices 0, 2, ..., 16, a ReLU after each but the last, and the mean
        over positions.
    """
    layers: list[nn.Module] = []
    channels = 3
    for width, kernel, stride, padding in _ALL_CNN_C:
        out = num_classes if width is None else width
        layers += [nn.Conv2d(channels, out, kernel, stride, padding), nn.ReLU()]
        channels = out
    layers.pop()  # the logits stay signed
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def conv_net(depth: int, width: int, num_classes: int = 10) -> nn.Sequential:
    """The paper's ConvNet "model d-w" for 32 x 32 images.

    A 5 x 5 convolution with ReLU and 2 x 2 max-pooling, then d blocks of a 5 x 5 convolution with
    ReLU, then 2 x 2 max-pooling and a linear layer. The paper uses d in {1, 4, 7} and w in
    {32, 64, 128}.

    Args:
        depth: Number d of hidden blocks, 0 or more.
        width: Number w of channels.
        num_classes: Number of classes C.
    """
    if depth < 0 or width < 1:
        raise ValueError(f"Expected depth >= 0 and width >= 1, got {depth} and {width}.")
    layers: list[nn.Module] = [nn.Conv2d(3, width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 5, padding=2), nn.ReLU()]
    head = nn.Linear(width * 8 * 8, num_classes)  # two poolings: 32 -> 16 -> 8
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), head)


def make_model(name: str, num_classes: int = 10) -> nn.Sequential:
    """Build a network by its name: ``"allcnnc"`` or ``"convnet-d-w"``, e.g. ``"convnet-4-64"``."""
    if name == "allcnnc":
        return all_cnn_c(num_classes)
    family, *numbers = name.split("-")
    if family == "convnet" and len(numbers) == 2 and all(number.isdigit() for number in numbers):
        return conv_net(int(numbers[0]), int(numbers[1]), num_classes)
    raise ValueError(
        f"Unknown model {name!r}. Expected 'allcnnc' or 'convnet-d-w' with depth d and width w, "
        "for instance 'convnet-4-64'."
    )


def weights_and_biases(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split a model's parameters into weights, which the prior acts on, and biases."""

    def select(is_bias: bool) -> Iterator[nn.Parameter]:
        named = model.named_parameters()
        return (param for name, param in named if (name.split(".")[-1] == "bias") == is_bias)

    return list(select(False)), list(select(True))
