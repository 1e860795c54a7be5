"""The paper's large networks, WRN-40-4, ResNet-50 and a ViT, built from torch's global seed.

Images are ``[N, 3, height, width]``, logits ``[N, n_classes]``. Scales and shifts of normalisations
are trainable.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PreActivationBlock(nn.Module):
    """BatchNorm, ReLU and a 3x3 convolution, twice, beside a shortcut (He et al., 2016b).

    Where channels or size change, the shortcut is a 1x1 convolution of the activated input.

    Args:
        c_in: Channels of the input ``[N, c_in, H, W]``.
        c_out: Channels of the output ``[N, c_out, H / stride, W / stride]``.
        stride: Of the first convolution.

    Examples:
        >>> PreActivationBlock(4, 8, 2)(torch.zeros(2, 4, 8, 8)).shape
        torch.Size([2, 8, 4, 4])
    """

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        """See the class."""
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(c_in), nn.BatchNorm2d(c_out)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(c_in, c_out, 1, stride, bias=False) if c_in != c_out else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        h = self.norm1(x).relu()
        shortcut = x if self.shortcut is None else self.shortcut(h)
        return self.conv2(self.norm2(self.conv1(h)).relu()) + shortcut


def wide_resnet(depth: int = 40, width: int = 4, n_classes: int = 10) -> nn.Sequential:
    """WRN-depth-width (Zagoruyko and Komodakis, 2016) without dropout; by default 8.9 million.

    Args:
        depth: Number of convolutions in the longest path, ``6 n + 4``.
        width: Channels of the stages are 16, 32 and 64 times this.
        n_classes: Number of classes C.

    Returns:
        Images ``[N, 3, H, W]`` to logits ``[N, C]``.

    Raises:
        ValueError: For a depth that is not ``6 n + 4``.

    Examples:
        >>> wide_resnet(10, 1)(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 10])
    """
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"Expected a depth 6 n + 4, got {depth}. Remedy: for instance 40.")
    channels = 16
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for stage in range(3):
        for i in range((depth - 4) // 6):
            c_out = 16 * width * 2**stage
            layers.append(PreActivationBlock(channels, c_out, 2 if stage and i == 0 else 1))
            channels = c_out
    layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(channels, n_classes))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with BatchNorm, beside a shortcut (He et al., 2016a).

    Args:
        c_in: Channels of the input ``[N, c_in, H, W]``.
        width: Channels inside; the output ``[N, 4 width, H / stride, W / stride]`` has four times
            as many.
        stride: Of the 3x3 convolution.

    Examples:
        >>> Bottleneck(4, 2, 2)(torch.zeros(2, 4, 8, 8)).shape
        torch.Size([2, 8, 4, 4])
    """

    def __init__(self, c_in: int, width: int, stride: int) -> None:
        """See the class."""
        super().__init__()
        c_out = 4 * width
        self.branch = nn.Sequential(
            nn.Conv2d(c_in, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, c_out, 1, bias=False), nn.BatchNorm2d(c_out),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or c_in != c_out:
            projection = nn.Conv2d(c_in, c_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(c_out))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        return (self.branch(x) + self.shortcut(x)).relu()


def resnet50(
    n_classes: int = 1000, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64
) -> nn.Sequential:
    """ResNet-50 (He et al., 2016a): 25,557,032 parameters for a thousand classes.

    Args:
        n_classes: Number of classes C.
        blocks: Bottleneck blocks per stage.
        width: Of the first stage; it doubles from stage to stage.

    Returns:
        Images ``[N, 3, H, W]`` of at least 32 x 32 pixels to logits ``[N, C]``.

    Examples:
        >>> resnet50(10, (1, 1), 4)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    channels = width
    for stage, count in enumerate(blocks):
        for i in range(count):
            layers.append(Bottleneck(channels, width * 2**stage, 2 if stage and i == 0 else 1))
            channels = 4 * width * 2**stage
    head = nn.Linear(channels, n_classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


class TransformerBlock(nn.Module):
    """Self-attention and a perceptron, each after a LayerNorm and beside a shortcut.

    Args:
        width: Of the tokens ``[N, T, width]``.
        heads: Number of attention heads.

    Examples:
        >>> TransformerBlock(8, 2)(torch.zeros(3, 5, 8)).shape
        torch.Size([3, 5, 8])
    """

    def __init__(self, width: int, heads: int) -> None:
        """See the class."""
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        N, T, d = x.shape
        parts = self.qkv(self.norm1(x)).reshape(N, T, 3, self.heads, d // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # [N, heads, T, d / heads] each
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(N, T, d))
        return x + self.perceptron(self.norm2(x))


class VisionTransformer(nn.Module):
    """A ViT (Dosovitskiy et al., 2021) that averages its tokens; by default 320 wide, 14 deep.

    Args:
        n_classes: Number of classes C.
        size: Height and width of the images in pixels.
        width: Of the tokens.
        depth: Number of blocks.
        patch: Height and width of a patch, one token each.
        heads: Number of attention heads.

    Examples:
        >>> VisionTransformer(10, 32, 8, 1, heads=2)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        n_classes: int = 1000,
        size: int = 256,
        width: int = 320,
        depth: int = 14,
        patch: int = 16,
        heads: int = 5,
    ) -> None:
        """See the class."""
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        positions = 0.02 * torch.randn(1, (size // patch) ** 2, width)
        self.register_buffer("positions", positions)  # fixed, so that no posterior needs them
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[N, C]`` of images."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(tokens)).mean(1))


@torch.no_grad()
def settle_norms(model: nn.Module, X: Tensor) -> nn.Module:
    """Give BatchNorm the statistics of some images, so that activations stay in size with depth.

    Args:
        model: The network; it is changed, and left in evaluation mode.
        X: Images ``[N, 3, H, W]``.

    Returns:
        The network.

    Examples:
        >>> model = settle_norms(nn.Sequential(nn.BatchNorm2d(1)), torch.full((2, 1, 3, 3), 5.0))
        >>> model[0].running_mean, model.training
        (tensor([5.]), False)
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    model.train()(X)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model.eval()
