"""Small problems on which estimators of a posterior are compared: classifiers and regressions.

Steep spectra are what separates them: regressions, and inputs far from the data.
"""

# %% Imports
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.classifiers import PROBLEMS as CLASSIFIERS
from examples.classifiers import Data, Recipe, digits, shuffled, trained_problem
from examples.networks import strided_cnn
from laplace_debias import CurvatureRecorder, Laplace, far_inputs, freeze_unsupported
from laplace_debias.posterior import DebiasedKronLaplace


# %% A problem
@dataclass(frozen=True)
class InverseProblem:
    """A trained network in double precision, its data, and the prior precisions of interest."""

    name: str
    model: nn.Module
    likelihood: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    prior_precisions: tuple[float, ...]
    test: tuple[Tensor, Tensor]  # data that NLLs are of; x_test may lie elsewhere
    sigma_noise: float = 1.0
    batch_size: int = 250
    recorder: CurvatureRecorder | None = None  # what training has kept
    budgets: tuple[int, ...] = ()  # of backward passes, if not the usual ones

    @property
    def far(self) -> Tensor:
        """As many far inputs as test inputs."""
        return far_inputs(self.x, len(self.x_test), torch.Generator().manual_seed(0))

    def laplace(self, debias: str, prior: float, **options: object) -> DebiasedKronLaplace:
        """A posterior over all weights and biases that K-FAC can represent."""
        return Laplace(
            self.model,
            self.likelihood,
            "all",
            "kron",
            debias=debias,
            prior_precision=prior,
            sigma_noise=self.sigma_noise,
            verify=False,
            **options,
        )

    def loader(self, generator: torch.Generator | None = None) -> DataLoader:
        """The training data, shuffled by the generator."""
        data, shuffle = TensorDataset(self.x, self.y), generator is not None
        return DataLoader(data, self.batch_size, shuffle=shuffle, generator=generator)

    def batches(self, x: Tensor, y: Tensor) -> DataLoader:
        """Some data, in mini-batches that fit into memory."""
        return DataLoader(TensorDataset(x, y), self.batch_size)

    def draw(self, m: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A mini-batch of m distinct data."""
        rows = torch.randperm(len(self.x), generator=generator)[:m]
        return self.x[rows], self.y[rows]


def mlp(*sizes: int, activation: type[nn.Module]) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for d_in, d_out in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(d_in, d_out), activation()]
    return nn.Sequential(*layers[:-1])


def trained(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Callable,
    epochs: int,
    lr: float,
    size: int,
    recorder: CurvatureRecorder | None = None,
) -> nn.Module:
    """Train with Adam; double precision, evaluation mode, and what K-FAC cannot hold frozen."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    shuffle = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=shuffle).split(size):
            optimizer.zero_grad()
            f = model(x[rows])
            if recorder is not None:
                recorder.update(rows, f)
            loss(f, y[rows]).backward()
            optimizer.step()
    freeze_unsupported(model)
    return model.double().eval()


# %% Classifiers
def large_digits(folder: Path | None = None) -> Data:
    """The digits, enlarged to 28x28 pixels."""
    x, y, x_test, y_test = digits(folder)
    large = [nn.functional.interpolate(part, 28, mode="bilinear") for part in (x, x_test)]
    return large[0], y, large[1], y_test


RECIPES = {**CLASSIFIERS, "digits-28": Recipe(large_digits, strided_cnn, 1e-3, 64, 30)}


def classifier(name: str, recipe: str, n_test: int = 200) -> InverseProblem:
    """One of ``examples.classifiers``' problems, trained anew, with its biases."""
    chosen = RECIPES[recipe]
    x, y, x_test, y_test = chosen.load(None)
    torch.manual_seed(0)
    model, recorder = chosen.build(), CurvatureRecorder(len(x))
    sizes = chosen.epochs, chosen.lr, chosen.batch_size
    model = trained(model, x, y, nn.functional.cross_entropy, *sizes, recorder)
    test = x_test[:n_test].double(), y_test[:n_test]
    priors = (0.1, 10.0)
    return InverseProblem(
        name, model, "classification", x.double(), y, test[0], priors, test, recorder=recorder
    )


def tiny(activation: type[nn.Module], seed: int, epochs: int, n_dead: int = 0) -> InverseProblem:
    """300 points of three classes and a network of two small layers: no rule was made on these."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(360, 5, generator=g)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    torch.manual_seed(seed)
    net = mlp(5, 20, 12, 3, activation=activation)
    loss = nn.functional.cross_entropy
    net = trained(net, x[:300], y[:300], loss, epochs, 1e-2, 300)
    with torch.no_grad():
        net[0].bias[:n_dead] = -100.0  # units that are never active
    x = x.double()
    test, name = (x[300:], y[300:]), f"tiny-{activation.__name__.lower()}"
    return InverseProblem(
        name + "-dead" * (n_dead > 0),
        net,
        "classification",
        x[:300],
        y[:300],
        x[300:],
        (0.1, 10.0),
        test,
        budgets=(8, 16, 24, 40, 80),
    )


def all_cnn_c(folder: Path, weights: Path, n: int = 800, n_test: int = 8) -> InverseProblem:
    """All-CNN-C, weights only and in single precision; n images are its training set.

    The NLL is that of 64 test images; scores are recorded by one pass over the training set.
    """
    sizes = {"train_size": n, "test_size": 64}
    p = trained_problem("cifar10", folder=folder, weights=weights, **sizes)
    (test,) = p.test_loader
    recorder = CurvatureRecorder(n)
    with torch.no_grad():
        for rows in torch.arange(n).split(64):
            recorder.update(rows, p.model(p.x[rows]))
    inputs, options = (p.x, p.y, test[0][:n_test]), {"batch_size": 64, "recorder": recorder}
    name = "All-CNN-C" if n == 800 else f"All-CNN-C, N = {n:,}"
    return InverseProblem(name, p.model, "classification", *inputs, (10.0,), tuple(test), **options)


# %% Regressions
def regression(
    name: str, data: Data, build: nn.Module, prior: float, noise: float, grid: Tensor | None = None
) -> InverseProblem:
    """A regression in single precision, trained, then in double precision.

    Its test inputs are those of the data, or a grid.
    """
    x, y, *test = data
    model = trained(build, x, y, nn.functional.mse_loss, 150, 2e-3, 64)
    x, y, *test = (part.double() for part in (x, y, *test))
    x_test = test[0] if grid is None else grid.double()
    return InverseProblem(name, model, "regression", x, y, x_test, (prior,), tuple(test), noise)


def clusters(training: int = 0) -> InverseProblem:
    """1,000 points in two clusters on a line; inputs within and far outside; any start."""
    generator = torch.Generator().manual_seed(0)

    def points(n: int) -> tuple[Tensor, Tensor]:
        where = torch.tensor([-4.0, 1.0]).repeat(n // 2)[:, None]
        x = torch.rand(n, 1, generator=generator) * 2 + where
        return x, torch.sin(2 * x) + 0.1 * torch.randn(n, 1, generator=generator)

    data = *points(1000), *points(200)
    torch.manual_seed(training)
    net = mlp(1, 50, 50, 1, activation=nn.Tanh)
    return regression("1-D", data, net, 0.01, 0.1, torch.linspace(-8, 8, 200)[:, None])


def standardised(X: Tensor, Y: Tensor, n: int) -> Data:
    """Mean 0 and deviation 1; the first n, in a random order, are for training."""
    X, Y = (X - X.mean(0)) / X.std(0), (Y - Y.mean()) / Y.std()
    x, y, x_test, y_test = shuffled(X.float(), Y.float()[:, None], n)
    return x, y, x_test[:200], y_test[:200]


def diabetes() -> InverseProblem:
    """Scikit-learn's diabetes data: 332 of 10 features."""
    from sklearn.datasets import load_diabetes

    X, Y = map(torch.tensor, load_diabetes(return_X_y=True))
    torch.manual_seed(0)
    net = mlp(10, 40, 40, 1, activation=nn.Tanh)
    return regression("diabetes", standardised(X, Y, 332), net, 1.0, 0.3)


def friedman() -> InverseProblem:
    """Scikit-learn's Friedman 1: 1,000 of 10 features, 5 of which matter."""
    from sklearn.datasets import make_friedman1

    X, Y = map(torch.tensor, make_friedman1(1300, noise=1.0, random_state=0))
    torch.manual_seed(0)
    net = mlp(10, 40, 40, 1, activation=nn.ReLU)
    return regression("friedman", standardised(X, Y, 1000), net, 1.0, 0.2)


PROBLEMS: dict[str, Callable[[], InverseProblem]] = {
    "digits-mlp": lambda: classifier("digits-mlp", "digits-mlp"),
    "digits-cnn": lambda: classifier("digits-cnn", "digits", 100),
    "digits-resnet": lambda: classifier("digits-resnet", "digits-resnet", 50),
    "28x28-cnn": lambda: classifier("28x28-cnn", "digits-28", 50),
    "1-D": clusters,
    "diabetes": diabetes,
    "friedman": friedman,
}

TINY: dict[str, Callable[[], InverseProblem]] = {
    "tiny-relu": lambda: tiny(nn.ReLU, 11, 60),
    "tiny-relu-dead": lambda: tiny(nn.ReLU, 12, 200, n_dead=4),
    "tiny-tanh": lambda: tiny(nn.Tanh, 13, 100),
}
"""Nothing was chosen on these: is the estimated distance right there, too?"""

__all__ = ["PROBLEMS", "TINY", "InverseProblem", "all_cnn_c", "clusters"]
