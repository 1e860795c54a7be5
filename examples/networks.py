"""Every network of the examples: All-CNN-C, ConvNets, ResNet-20, and small ones for digits.

They are built from torch's global seed, so ``torch.manual_seed`` before the call decides their
initial weights. Images are ``[N, channels, height, width]``, logits ``[N, n_classes]``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

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


# %% The paper's networks for CIFAR
def all_cnn_c(n_classes: int = 10) -> nn.Sequential:
    """All-CNN-C (Springenberg et al., 2015) without dropout, as the paper uses it.

    With ten classes it has 1,369,738 parameters, of which 1,368,480 are weights.

    Args:
        n_classes: Number of classes C.

    Returns:
        Images ``[N, 3, 32, 32]`` to logits ``[N, C]``: convolutions at the indices 0, 2, ..., 16, a
        ReLU after each but the last, and the mean over positions.

    Examples:
        >>> import torch
        >>> all_cnn_c(100)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """
    layers: list[nn.Module] = []
    channels = 3
    for width, kernel, stride, padding in _ALL_CNN_C:
        out = n_classes if width is None else width
        layers += [nn.Conv2d(channels, out, kernel, stride, padding), nn.ReLU()]
        channels = out
    layers.pop()  # the logits stay signed
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def conv_net(depth: int, width: int, n_classes: int = 10) -> nn.Sequential:
    """The paper's ConvNet "model d-w".

    A 5 x 5 convolution with ReLU and 2 x 2 max-pooling, then d blocks of a 5 x 5 convolution with
    ReLU, then 2 x 2 max-pooling and a linear layer. The paper uses d in {1, 4, 7} and w in
    {32, 64, 128}.

    Args:
        depth: Number d of hidden blocks, 0 or more.
        width: Number w of channels.
        n_classes: Number of classes C.

    Returns:
        Images ``[N, 3, 32, 32]`` to logits ``[N, C]``.

    Raises:
        ValueError: With a negative depth, or without channels.

    Examples:
        >>> import torch
        >>> conv_net(1, 4)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    if depth < 0 or width < 1:
        raise ValueError(
            f"Expected depth >= 0 and width >= 1, got {depth} and {width}. Remedy: the paper has "
            "depths of 1, 4 and 7, and widths of 32, 64 and 128."
        )
    layers: list[nn.Module] = [nn.Conv2d(3, width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 5, padding=2), nn.ReLU()]
    head = nn.Linear(width * 8 * 8, n_classes)  # two poolings: 32 -> 16 -> 8
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), head)


def make_model(name: str, n_classes: int = 10) -> nn.Sequential:
    """Build one of the paper's networks for CIFAR by its name.

    Args:
        name: ``"allcnnc"`` or ``"convnet-d-w"``, e.g. ``"convnet-4-64"``.
        n_classes: Number of classes C.

    Returns:
        Images ``[N, 3, 32, 32]`` to logits ``[N, C]``.

    Raises:
        ValueError: If there is no network of that name.

    Examples:
        >>> sum(p.numel() for p in make_model("convnet-1-4").parameters())
        3278
    """
    if name == "allcnnc":
        return all_cnn_c(n_classes)
    family, *numbers = name.split("-")
    if family == "convnet" and len(numbers) == 2 and all(number.isdigit() for number in numbers):
        return conv_net(int(numbers[0]), int(numbers[1]), n_classes)
    raise ValueError(
        f"Expected the name 'allcnnc' or 'convnet-d-w' with depth d and width w, got {name!r}. "
        "Remedy: for instance 'convnet-4-64'."
    )


# %% ResNets
class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm, and a shortcut without parameters (He et al., 2016).

    Where the channels become more, the shortcut pads with zeros; where there is a stride, it takes
    every so manieth pixel.

    Args:
        c_in: Channels of the input ``[N, c_in, H, W]``.
        c_out: Channels of the output ``[N, c_out, H / stride, W / stride]`` (rounded up), at least
            ``c_in``.
        stride: Of the first convolution.

    Examples:
        >>> import torch
        >>> ResidualBlock(4, 6, 2)(torch.zeros(2, 4, 8, 8)).shape
        torch.Size([2, 6, 4, 4])
    """

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        """See the class."""
        super().__init__()
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False),
                nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(c_out) for _ in range(2)])
        self.stride, self.widen = stride, c_out - c_in

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        h = self.norms[0](self.convs[0](x)).relu()
        shortcut = x[:, :, :: self.stride, :: self.stride]
        shortcut = nn.functional.pad(shortcut, (0, 0, 0, 0, 0, self.widen))
        return (self.norms[1](self.convs[1](h)) + shortcut).relu()


def resnet(
    channels: int, widths: tuple[int, ...], n_blocks: int = 1, n_classes: int = 10
) -> nn.Sequential:
    """A ResNet with a stage for each width; each stage but the first halves the image.

    Args:
        channels: Channels of the images.
        widths: Channels of the stages, ascending.
        n_blocks: Residual blocks per stage.
        n_classes: Number of classes C.

    Returns:
        Images ``[N, channels, H, W]`` to logits ``[N, C]``. BatchNorm's parameters are trainable.

    Examples:
        >>> import torch
        >>> resnet(1, (8, 16, 32))(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    c_in = widths[0]
    layers = [nn.Conv2d(channels, c_in, 3, padding=1, bias=False), nn.BatchNorm2d(c_in), nn.ReLU()]
    for stage, width in enumerate(widths):
        for i in range(n_blocks):
            layers.append(ResidualBlock(c_in, width, 2 if stage and i == 0 else 1))
            c_in = width
    head = nn.Linear(c_in, n_classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def resnet20(n_classes: int = 10) -> nn.Sequential:
    """ResNet-20 (He et al., 2016) with frozen BatchNorm: 269,722 parameters for ten classes.

    Args:
        n_classes: Number of classes C.

    Returns:
        Images ``[N, 3, 32, 32]`` to logits ``[N, C]``.

    Examples:
        >>> import torch
        >>> resnet20()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    model = resnet(3, (16, 32, 64), n_blocks=3, n_classes=n_classes)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return model


# %% Small networks
def strided_cnn(channels: int = 1, size: int = 28) -> nn.Sequential:
    """Two strided 5x5 convolutions and two linear layers; 64,000 parameters for 28x28 images.

    Args:
        channels: Channels of the images.
        size: Their height and width.

    Returns:
        Images ``[N, channels, size, size]`` to logits ``[N, 10]``.

    Examples:
        >>> import torch
        >>> strided_cnn(3, 32)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    features = 32 * ((size + 3) // 4) ** 2  # two strides of 2, rounded up
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2, padding=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def digits_cnn(hidden: int = 32, width: int = 16) -> nn.Sequential:
    """Two small convolutions and two linear layers.

    Args:
        hidden: Width of the hidden linear layer.
        width: Channels of the first convolution, half of the second's.

    Returns:
        Images ``[N, 1, 8, 8]`` to logits ``[N, 10]``.

    Examples:
        >>> import torch
        >>> digits_cnn()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(2 * width * 4 * 4, hidden), nn.ReLU(), nn.Linear(hidden, 10),
    )  # fmt: skip


def digits_mlp(width: int = 256) -> nn.Sequential:
    """Two hidden layers; 85,002 parameters at the default width.

    Args:
        width: Of both hidden layers.

    Returns:
        Flat images ``[N, 64]`` to logits ``[N, 10]``.

    Examples:
        >>> sum(p.numel() for p in digits_mlp().parameters())
        85002
    """
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


class DigitsTransformer(nn.Module):
    """One block of self-attention over the rows of an image, a block of two layers, and their mean.

    Each of the 8 tokens is a row of pixels beside its position (one-hot), so that all parameters
    belong to linear layers. Layer norms have none.

    Args:
        width: Of the tokens; the hidden layer of the second block has twice as many units.

    Examples:
        >>> import torch
        >>> DigitsTransformer(16)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, width: int = 32) -> None:
        """See the class."""
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.mix = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``[N, 1, 8, 8]`` to logits ``[N, 10]``."""
        tokens = x.squeeze(1)
        positions = torch.eye(8, dtype=x.dtype, device=x.device).expand_as(tokens)
        h = self.embed(torch.cat([tokens, positions], dim=-1))  # [N, 8, width]
        z = self.norm(h)
        q, k, v = self.queries(z), self.keys(z), self.values(z)
        shares = (q @ k.mT / k.shape[-1] ** 0.5).softmax(-1)
        h = h + self.mix(shares @ v)
        h = h + self.down(self.up(self.norm(h)).relu())
        return self.head(self.norm(h).mean(1))


class PatchTransformer(nn.Module):
    """Blocks of self-attention and of two GELU layers over the square patches of an image.

    Each token is a patch beside its position (one-hot); all parameters belong to linear layers.

    Args:
        channels: Channels of the images.
        size: Their height and width, a multiple of ``patch``.
        patch: Height and width of a patch.
        width: Of the tokens; the hidden layers have twice as many units.
        depth: Number of blocks.

    Examples:
        >>> import torch
        >>> PatchTransformer(width=8)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, channels: int = 3, size: int = 32, patch: int = 8, width: int = 48, depth: int = 2
    ) -> None:
        """See the class."""
        super().__init__()
        self.patch, self.n_tokens = patch, (size // patch) ** 2
        self.embed = nn.Linear(channels * patch**2 + self.n_tokens, width)
        self.attention = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(depth)])
        self.mix = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.up = nn.ModuleList([nn.Linear(width, 2 * width) for _ in range(depth)])
        self.down = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``[N, channels, size, size]`` to logits ``[N, 10]``."""
        tokens = nn.functional.unfold(x, self.patch, stride=self.patch).mT  # [N, T, channels * p^2]
        positions = torch.eye(self.n_tokens, dtype=x.dtype, device=x.device)
        h = self.embed(torch.cat([tokens, positions.expand(len(x), -1, -1)], dim=-1))
        for attention, mix, up, down in zip(
            self.attention, self.mix, self.up, self.down, strict=True
        ):
            q, k, v = attention(self.norm(h)).chunk(3, dim=-1)
            h = h + mix((q @ k.mT / k.shape[-1] ** 0.5).softmax(-1) @ v)
            h = h + down(nn.functional.gelu(up(self.norm(h))))
        return self.head(self.norm(h).mean(1))


# %% Parameters
def weights_and_biases(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split a model's parameters into weights, which the prior acts on, and biases.

    Examples:
        >>> [len(part) for part in weights_and_biases(all_cnn_c())]
        [9, 9]
    """

    def select(is_bias: bool) -> Iterator[nn.Parameter]:
        named = model.named_parameters()
        return (param for name, param in named if (name.split(".")[-1] == "bias") == is_bias)

    return list(select(False)), list(select(True))
