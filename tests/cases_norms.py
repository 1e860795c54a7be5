"""Networks with every kind of normalisation, trained a little so that nothing is at its default."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Tokens(nn.Module):
    """Normalisations over tokens, over two dimensions at once, and one that is called twice."""

    def __init__(self, C: int) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(3, 4), nn.Linear(4, C)
        self.layer, self.rms = nn.LayerNorm(4), nn.RMSNorm(4)
        self.both = nn.LayerNorm((5, 4))

    def forward(self, x: Tensor) -> Tensor:
        """``[n, 5, 3]`` to ``[n, C]``."""
        h = torch.tanh(self.layer(self.up(x)))
        h = self.both(h + self.rms(self.layer(h)))
        return self.head(torch.tanh(h).mean(1))


def images(C: int) -> nn.Module:
    """Normalisations of channels, with and without positions."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(),
        nn.Conv2d(4, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(),
        nn.Linear(36, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, C),
    )  # fmt: skip


SHAPES = {"tokens": (5, 3), "images": (2, 4, 4)}


def case(name: str, likelihood: str = "classification", C: int = 3, n: int = 7):
    """A float64 network in training mode with statistics of its own, inputs and targets."""
    torch.manual_seed(0)
    model = (Tokens(C) if name == "tokens" else images(C)).double()
    x = torch.randn(n, *SHAPES[name]).double()
    for _ in range(3):
        model(torch.randn(20, *SHAPES[name]).double())
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    y = torch.randint(C, (n,)) if likelihood == "classification" else torch.randn(n, C).double()
    return model, x, y


def norm_names(model: nn.Module) -> list[str]:
    """Names of the scales and shifts."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    norms = [name for name, m in model.named_modules() if isinstance(m, kinds)]
    return [n for n, _ in model.named_parameters() if n.rpartition(".")[0] in norms]
