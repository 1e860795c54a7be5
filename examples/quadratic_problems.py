"""Data and trained networks for the examples on mini-batch quadratics.

Handwritten digits, with their labels or with a part of them drawn at random and learned by heart.
Clean digits are too easy for the bias in the curvature: ten classes that are well apart leave every
mini-batch with much the same top eigenvectors. Labels that must be memorised one by one give each
datum a direction of its own, as a network fully trained on CIFAR-100 has.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from examples.cifar10.data import load_cifar
from examples.networks import digits_mlp, make_model
from laplace_debias.quadratics import partition


@dataclass(frozen=True)
class Problem:
    """A trained network with its data and regulariser (on weights, not on biases)."""

    name: str
    model: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    l2: float
    evaluation: tuple[Tensor, Tensor] | None = None  # training images that stand for all of them

    def evaluated_on(self, n: int) -> "Problem":
        """Let n training and n test images, drawn at random, stand for all where they are many."""
        generator = torch.Generator().manual_seed(2025)
        train, test = (
            partition(data, min(n, len(data[1])), generator=generator, n_batches=1)[0]
            for data in (self.train, self.test)
        )
        return replace(self, evaluation=train, test=test)

    @property
    def folder(self) -> str:
        """Return the name as that of a folder for results."""
        return "-".join("".join(c if c.isalnum() else " " for c in self.name).split())


def digits(label_noise: float = 0.5) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return 1280 training and 512 test digits; a fraction of the labels is drawn at random."""
    from sklearn.datasets import load_digits

    generator = torch.Generator().manual_seed(0)
    X, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    order = torch.randperm(len(y), generator=generator)
    X, y = X[order].float() / 8, y[order].long()
    noisy = torch.rand(len(y), generator=generator) < label_noise
    y = torch.where(noisy, torch.randint(10, (len(y),), generator=generator), y)
    return (X[:1280], y[:1280]), (X[1280:1792], y[1280:1792])


def digits_model(width: int = 256) -> nn.Sequential:
    """Return a network with two hidden layers (85,002 parameters), from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return digits_mlp(width)


def train(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    l2: float,
    epochs: int,
    batch_size: int = 128,
    lr: float = 1e-2,
    checkpoints: tuple[int, ...] = (),
    constant_sgd: float | None = None,
) -> dict[int, dict[str, Tensor]]:
    """Train with Adam and a falling learning rate; return state dicts after some epochs.

    With ``constant_sgd`` train with SGD at that learning rate, which does not fall: the weights
    keep jumping about the valley that they have found.
    """
    X, y = data
    loss, states = nn.CrossEntropyLoss(), {}
    generator = torch.Generator().manual_seed(0)
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    falls = constant_sgd is None
    optimizer = (
        torch.optim.Adam(model.parameters(), lr)
        if falls
        else torch.optim.SGD(model.parameters(), constant_sgd)
    )
    steps, end = epochs * -(-len(y) // batch_size), 0.02 if falls else 1.0
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, end, total_iters=steps)
    for epoch in range(1, epochs + 1):
        for index in torch.randperm(len(y), generator=generator).split(batch_size):
            optimizer.zero_grad()
            penalty = 0.5 * l2 * sum((p**2).sum() for p in weights)
            (loss(model(X[index]), y[index]) + penalty).backward()
            optimizer.step()
            schedule.step()
        if epoch in checkpoints:
            states[epoch] = {k: v.detach().clone() for k, v in model.state_dict().items()}
    model.zero_grad()
    return states


def digits_problem(
    label_noise: float = 0.5,
    epochs: int = 100,
    width: int = 256,
    constant_sgd: float | None = None,
) -> Problem:
    """Return the digits with a network trained on them, in some seconds."""
    train_data, test_data = digits(label_noise)
    model, l2 = digits_model(width), 1e-4
    name = f"digits with {label_noise:.0%} random labels"
    options = {}
    if constant_sgd is not None:
        name += f", SGD at {constant_sgd:g}"
        options = {"constant_sgd": constant_sgd, "batch_size": 64}
    train(model, train_data, l2=l2, epochs=epochs, **options)
    return Problem(name, model, train_data, test_data, l2)


def cifar_problem(
    name: str, root: Path, model_name: str, checkpoint: Path, n_data: int | None = None
) -> Problem:
    """Return CIFAR-10 or CIFAR-100 with All-CNN-C or a ConvNet d-w from a saved state dict.

    Args:
        name: ``"cifar10"`` or ``"cifar100"``.
        root: Folder that holds the data set's own folder.
        model_name: ``"allcnnc"`` or ``"convnet-d-w"``, e.g. ``"convnet-4-64"``.
        checkpoint: State dict, or a dict that holds one under ``"model"``.
        n_data: Use the first training and test images only.
    """
    cifar = load_cifar(root, name)
    state = torch.load(checkpoint, weights_only=True)
    model = make_model(model_name, cifar.n_classes)
    model.load_state_dict(state.get("model", state))
    splits = [
        split if n_data is None else split.first(n_data) for split in (cifar.train, cifar.test)
    ]
    train_data, test_data = (split.to_dataset().tensors for split in splits)
    l2 = {"cifar10": 1e-3, "cifar100": 5e-4}[name] if model_name == "allcnnc" else 0.0
    return Problem(f"{model_name} on {name}", model.eval(), train_data, test_data, l2)


def add_problem_flags(parser, label_noise: float) -> None:
    """Add the flags that choose data and network to an ``argparse`` parser."""
    parser.add_argument("--data", default="digits", choices=("digits", "cifar10", "cifar100"))
    parser.add_argument("--root", type=Path, help="folder that holds cifar-10-batches-py etc.")
    parser.add_argument("--model", default="allcnnc", help="allcnnc or convnet-d-w (CIFAR only)")
    parser.add_argument("--checkpoint", type=Path, help="state dict of the network (CIFAR only)")
    parser.add_argument("--n-data", type=int, help="use the first images only (CIFAR only)")
    parser.add_argument("--label-noise", type=float, default=label_noise, help="digits only")
    parser.add_argument("--epochs", type=int, default=100, help="of training (digits only)")
    parser.add_argument("--constant-sgd", type=float, help="learning rate of SGD (digits only)")
    parser.add_argument("--width", type=int, default=256, help="of the network (digits only)")
    parser.add_argument("--out", type=Path, default=Path("outputs"), help="folder for results")


def load_problem(args) -> Problem:
    """Build the problem that the flags ask for."""
    if args.data == "digits":
        return digits_problem(args.label_noise, args.epochs, args.width, args.constant_sgd)
    if args.root is None or args.checkpoint is None:
        raise SystemExit(
            f"Expected --root and --checkpoint with --data {args.data}, got {args.root} and "
            f"{args.checkpoint}. Remedy: --root is the folder with the data set, --checkpoint a "
            "state dict, as examples.cifar10.train writes it."
        )
    return cifar_problem(args.data, args.root, args.model, args.checkpoint, args.n_data)
