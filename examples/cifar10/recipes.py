"""What decides the weights of a training run: the paper's settings, and shorter ones."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Recipe:
    """What decides the trained weights; a run folder belongs to one recipe.

    The learning rate of epoch e = 0, 1, ... is ``lr`` times a tenth for each milestone passed, or,
    with ``final_lr``, falls linearly from ``lr`` to ``final_lr`` from the first to the last step.
    """

    model: str
    dataset: str
    epochs: int
    optimizer: str
    lr: float
    final_lr: float | None
    milestones: tuple[int, ...]
    momentum: float
    weight_decay: float
    batch_size: int
    flip: bool
    seed: int
    train_size: int | None
    init: str | None


def paper_recipe(model: str, dataset: str) -> Recipe:
    """Return the paper's settings (its test problems A, B and D)."""
    common = dict(batch_size=256, flip=False, seed=0, train_size=None, init=None, final_lr=None)
    if model.startswith("convnet"):
        settings = dict(
            epochs=100, optimizer="adam", lr=1e-3, milestones=(), momentum=0.9, weight_decay=0.0
        )
    elif dataset == "cifar100":
        settings = dict(
            epochs=350, optimizer="sgd", lr=0.171234, milestones=(), momentum=0.0, weight_decay=5e-4
        )
    else:
        settings = dict(
            epochs=350,
            optimizer="sgd",
            lr=0.025,
            milestones=(200, 250, 300),
            momentum=0.9,
            weight_decay=1e-3,
        )
    return Recipe(model=model, dataset=dataset, **settings, **common)


def short_recipe(recipe: Recipe) -> Recipe:
    """Return ten epochs of smaller mini-batches with a learning rate that falls linearly."""
    lr = 1e-3 if recipe.optimizer == "adam" else 0.01
    return replace(
        recipe, epochs=10, lr=lr, final_lr=lr / 100, milestones=(), momentum=0.9, batch_size=64
    )


def checkpoint_epochs(epochs: int, count: int = 10) -> list[int]:
    """Return ``count`` distinct epochs, log-equidistant between the first and the last.

    Epochs count from 1. Where rounding would repeat an early epoch, the next free one is taken;
    with fewer than ``count`` epochs every epoch is returned.
    """
    count = min(count, epochs)
    chosen: list[int] = []
    for i in range(count):
        ideal = round(epochs ** (i / (count - 1))) if count > 1 else epochs
        chosen.append(max(ideal, chosen[-1] + 1) if chosen else ideal)
    return chosen


def learning_rate(recipe: Recipe, epoch: int, step: int, steps: int) -> float:
    """Return the learning rate of step ``step`` of ``steps`` in epoch ``epoch`` (both from 0)."""
    if recipe.final_lr is not None:
        done = (epoch * steps + step) / max(recipe.epochs * steps - 1, 1)
        return recipe.lr + (recipe.final_lr - recipe.lr) * done
    return recipe.lr * 0.1 ** sum(epoch >= milestone for milestone in recipe.milestones)
