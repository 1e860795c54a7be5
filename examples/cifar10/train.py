"""Train All-CNN-C or a ConvNet d-w on CIFAR as the paper does; stop and go on at any epoch.

    python -m examples.cifar10.train --data DATA --out RUN                    # 350 epochs
    python -m examples.cifar10.train --data DATA --out RUN --short            # 10 epochs
    python -m examples.cifar10.train --data DATA --out RUN --model convnet-4-64

DATA holds ``cifar-10-batches-py``. RUN receives ``last.pt`` (everything needed to go on) after
every epoch, ``epoch_XXXX.pt`` (a state dict) at ten epochs spaced log-equidistantly between the
first and the last, ``final.pt`` (a state dict), ``history.json`` and ``train.log``. The same
command again goes on where it stopped, and ends with the same weights as one that never stopped.
"""

import argparse
import json
import logging
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from examples.cifar10.data import N_CLASSES, Split, load_cifar
from examples.cifar10.recipes import (
    Recipe,
    checkpoint_epochs,
    learning_rate,
    paper_recipe,
    short_recipe,
)
from examples.networks import make_model, weights_and_biases
from laplace_debias.storage import write_atomically

logger = logging.getLogger("cifar.train")


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the optimiser, with weight decay on the weights only."""
    weights, biases = weights_and_biases(model)
    groups = [
        {"params": weights, "weight_decay": recipe.weight_decay},
        {"params": biases, "weight_decay": 0.0},
    ]
    if recipe.optimizer == "adam":
        return torch.optim.Adam(groups, lr=recipe.lr)
    return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum)


def channels_last(x: Tensor) -> Tensor:
    """Lay images out with channels last, which is the faster layout on CPUs."""
    return x.to(memory_format=torch.channels_last)


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    split: Split,
    recipe: Recipe,
    epoch: int,
    progress_bar: bool,
) -> dict[str, float]:
    """Train for one epoch; return the running loss (without the decay term) and accuracy."""
    # a fresh generator per epoch, so that going on needs no generator state
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + epoch)
    steps = -(-len(split) // recipe.batch_size)
    model.train()
    total_loss = total_correct = 0.0
    batches = split.batches(recipe.batch_size, generator, recipe.flip)
    bar = tqdm(batches, f"epoch {epoch + 1}/{recipe.epochs}", steps, disable=not progress_bar)
    for step, (x, y) in enumerate(bar):
        lr = learning_rate(recipe, epoch, step, steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        logits = model(channels_last(x))
        loss = cross_entropy(logits, y)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"Expected a finite loss, got {loss.item()} in epoch {epoch + 1}, step {step + 1}. "
                f"Remedy: lower the learning rate (now {lr:.3g})."
            )
        loss.backward()
        optimizer.step()
        total_loss += loss.item() * len(y)
        total_correct += (logits.argmax(1) == y).sum().item()
    return {"train_loss": total_loss / len(split), "train_accuracy": total_correct / len(split)}


@torch.no_grad()
def measure(model: nn.Module, split: Split, batch_size: int = 500) -> tuple[float, float]:
    """Return a split's mean loss and accuracy in evaluation mode."""
    model.eval()
    loss = correct = 0.0
    for x, y in split.batches(batch_size):
        logits = model(channels_last(x))
        loss += cross_entropy(logits, y, reduction="sum").item()
        correct += (logits.argmax(1) == y).sum().item()
    return loss / len(split), correct / len(split)


def save_atomically(value: object, path: Path) -> None:
    """Write a checkpoint beside its place and move it there, so that no half file is ever read."""
    write_atomically(path, lambda file: torch.save(value, file))


def restore(out: Path, recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer) -> list:
    """Load ``last.pt`` if there is one; return the history of the epochs already done."""
    path = out / "last.pt"
    if not path.exists():
        if recipe.init is not None:
            model.load_state_dict(torch.load(recipe.init, weights_only=True))
        return []
    saved = torch.load(path, weights_only=True)
    ours = json.loads(json.dumps(asdict(recipe)))
    theirs = json.loads(saved["recipe"])
    if theirs != ours:
        differing = sorted(key for key in ours if ours[key] != theirs.get(key))
        detail = ", ".join(f"{key}: {theirs.get(key)} there, {ours[key]} now" for key in differing)
        raise ValueError(
            f"Expected the settings of {path}, got others ({detail}). Remedy: use the same "
            "settings to go on, or another --out folder to start anew."
        )
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return json.loads(saved["history"])


def train(
    recipe: Recipe,
    data_root: Path,
    out: Path,
    *,
    validation_size: int = 10_000,
    eval_size: int | None = None,
    max_epochs: int | None = None,
    progress_bar: bool = False,
) -> list[dict[str, float]]:
    """Train, or go on training, and return the history, one entry per epoch.

    Args:
        recipe: Everything that decides the result.
        data_root: The folder that holds the data set's folder.
        out: The run's folder.
        validation_size: How many training images are kept for validation.
        eval_size: How many validation images are measured after each epoch; ``None`` is all.
        max_epochs: Stop after this many epochs of this call, to go on later.
        progress_bar: Show a progress bar per epoch.
    """
    cifar = load_cifar(data_root, recipe.dataset, validation_size)
    split = cifar.train if recipe.train_size is None else cifar.train.first(recipe.train_size)
    validation = cifar.validation if eval_size is None else cifar.validation.first(eval_size)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = make_model(recipe.model, N_CLASSES[recipe.dataset])
    model = model.to(memory_format=torch.channels_last)
    optimizer = make_optimizer(model, recipe)
    out.mkdir(parents=True, exist_ok=True)
    history = restore(out, recipe, model, optimizer)
    logger.info("%s: %d of %d epochs done", out, len(history), recipe.epochs)
    keep = checkpoint_epochs(recipe.epochs)
    last = recipe.epochs if max_epochs is None else len(history) + max_epochs
    for epoch in range(len(history), min(last, recipe.epochs)):
        entry = {"epoch": epoch + 1}
        entry |= train_epoch(model, optimizer, split, recipe, epoch, progress_bar)
        entry["val_loss"], entry["val_accuracy"] = measure(model, validation)
        history.append(entry)
        logger.info(" ".join(f"{key}={value:.4g}" for key, value in entry.items()))
        if epoch + 1 in keep:
            save_atomically(model.state_dict(), out / f"epoch_{epoch + 1:04d}.pt")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        # as text, so that torch.load(weights_only=True) reads it
        state |= {"recipe": json.dumps(asdict(recipe)), "history": json.dumps(history)}
        save_atomically(state, out / "last.pt")
        (out / "history.json").write_text(json.dumps(history, indent=1))
    if len(history) == recipe.epochs:
        save_atomically(model.state_dict(), out / "final.pt")
        loss, accuracy = measure(model, split)
        logger.info("final: training loss %.4g, accuracy %.4g (evaluation mode)", loss, accuracy)
    return history


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; options left out keep the paper's (or the short) recipe's value."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the data set")
    parser.add_argument("--out", type=Path, required=True, help="folder of this run")
    parser.add_argument("--model", default="allcnnc", help="allcnnc or convnet-d-w")
    parser.add_argument("--dataset", choices=sorted(N_CLASSES), default="cifar10")
    parser.add_argument("--short", action="store_true", help="10 epochs instead of the paper's")
    parser.add_argument("--init", help="state dict to start from")
    parser.add_argument("--optimizer", choices=("sgd", "adam"))
    for name in ("epochs", "batch-size", "train-size", "seed"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("lr", "final-lr", "momentum", "weight-decay"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--flip", action="store_true", help="mirror half of the training images")
    parser.add_argument("--validation-size", type=int, default=10_000)
    parser.add_argument("--eval-size", type=int, help="validation images measured per epoch")
    parser.add_argument("--max-epochs", type=int, help="stop after so many; go on later")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    """Run the command line."""
    args = parse(argv)
    recipe = paper_recipe(args.model, args.dataset)
    if args.short:
        recipe = short_recipe(recipe)
    names = "epochs batch_size train_size seed optimizer lr final_lr momentum weight_decay init"
    given = {name: getattr(args, name) for name in names.split() if getattr(args, name) is not None}
    recipe = replace(recipe, flip=args.flip, **given)
    args.out.mkdir(parents=True, exist_ok=True)
    handlers = [logging.StreamHandler(sys.stdout), logging.FileHandler(args.out / "train.log")]
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        return train(
            recipe,
            args.data,
            args.out,
            validation_size=args.validation_size,
            eval_size=args.eval_size,
            max_epochs=args.max_epochs,
            progress_bar=sys.stderr.isatty(),
        )
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


if __name__ == "__main__":
    main()
