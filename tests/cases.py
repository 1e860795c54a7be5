"""Small networks and data, in float64, that the tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Tokens(nn.Module):
    """A linear layer over several positions per datum, averaged before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, T, 3]`` to ``[n, 4]``."""
        return self.head(torch.tanh(self.norm(self.embed(x))).mean(dim=1))


class Dict(nn.Module):
    """A network whose forward pass takes the whole mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Map ``{"x": [n, 3]}`` to ``[n, 4]``."""
        return self.body(batch["x"])


def mlp(out: int = 4) -> nn.Module:
    """Two linear layers with biases."""
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, out))


def cnn(**kwargs) -> nn.Module:
    """A convolution and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, **kwargs), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 4),
    )  # fmt: skip


def batchnorm_cnn() -> nn.Module:
    """A convolution without bias, BatchNorm, a linear layer."""
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(4, 4),
    )  # fmt: skip
    net[1].running_mean.uniform_(-0.2, 0.2)
    net[1].running_var.uniform_(0.5, 2.0)
    return net


def freeze_biases(net: nn.Module) -> nn.Module:
    """Weights only, as in the paper."""
    for name, p in net.named_parameters():
        if name.endswith("bias"):
            p.requires_grad_(False)
    return net


def freeze(net: nn.Module, *names: str) -> nn.Module:
    """Freeze parameters or modules by name."""
    for name, p in net.named_parameters():
        if any(name == given or name.startswith(given + ".") for given in names):
            p.requires_grad_(False)
    return net


@dataclass(frozen=True)
class Case:
    """A network (made afresh at each call), its likelihood and the shape of a datum."""

    name: str
    make: Callable[[], nn.Module]
    likelihood: str
    shape: tuple[int, ...]

    def model(self, seed: int = 0) -> nn.Module:
        """The network in float64, always with the same weights for the same seed."""
        return seeded(self.make, seed).double()

    def data(self, n: int, seed: int = 1) -> tuple[Tensor, Tensor]:
        """Inputs and targets of n data."""
        gen = torch.Generator().manual_seed(seed)
        X = torch.randn(n, *self.shape, generator=gen, dtype=torch.float64)
        if self.likelihood == "regression":
            return X, torch.randn(n, 4, generator=gen, dtype=torch.float64)
        return X, torch.randint(4, (n,), generator=gen)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a network from a seed without touching the global generator."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def loader(X: Tensor, y: Tensor, batch_size: int | None = None) -> DataLoader:
    """A shuffled loader with its own generator."""
    gen = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(X, y), batch_size or len(X), shuffle=True, generator=gen)


MLP = Case("mlp", mlp, "classification", (3,))
MLP_REGRESSION = Case("mlp-regression", mlp, "regression", (3,))
CNN = Case("cnn", cnn, "classification", (2, 6, 6))
CNN_REGRESSION = Case("cnn-regression", lambda: cnn(stride=2, padding=1), "regression", (2, 6, 6))
WEIGHTS_ONLY = Case("weights-only", lambda: freeze_biases(cnn()), "classification", (2, 6, 6))
PARTLY_FROZEN = Case(
    "partly-frozen", lambda: freeze(mlp(), "0.weight", "2.bias"), "classification", (3,)
)
TOKENS = Case("tokens", lambda: freeze(Tokens(), "norm"), "classification", (5, 3))
BATCHNORM = Case("batchnorm", lambda: freeze(batchnorm_cnn(), "1"), "classification", (2, 7, 7))
DILATED = Case("dilated", lambda: cnn(dilation=2), "classification", (2, 7, 7))
GROUPED = Case("grouped", lambda: cnn(groups=2), "classification", (2, 6, 6))
SAME = Case("same", lambda: cnn(padding="same"), "classification", (2, 6, 6))
CONV1D = Case(
    "conv1d",
    lambda: nn.Sequential(nn.Conv1d(2, 3, 3, dilation=2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 4)),
    "classification",
    (2, 7),
)
CONV3D = Case(
    "conv3d",
    lambda: nn.Sequential(nn.Conv3d(2, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 4)),
    "classification",
    (2, 3, 3, 3),
)
ONE_ELEMENT = Case(
    "one-element",
    lambda: nn.Sequential(
        nn.Linear(3, 1), nn.Tanh(), nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 4)
    ),
    "classification",
    (3,),
)
CASES = [
    MLP, MLP_REGRESSION, CNN, CNN_REGRESSION, WEIGHTS_ONLY, PARTLY_FROZEN, TOKENS, BATCHNORM,
    ONE_ELEMENT,
]  # fmt: skip
