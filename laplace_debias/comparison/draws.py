"""Which data each method is fitted on: draws of the training set, nested over budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Subset

from laplace_debias.data.processes import processes
from laplace_debias.data.reading import read
from laplace_debias.network.calling import call_model, classes_last
from laplace_debias.network.preserve import evaluation_mode

__all__ = [
    "check_budgets",
    "dealt_out",
    "draw_generator",
    "draw_loaders",
    "n_outputs",
    "whole_loader",
]


def check_budgets(train_loader: DataLoader[Any], budgets: Sequence[int], n_draws: int) -> int:
    """Return the number N of training data; raise if draws of these sizes cannot be made.

    Args:
        train_loader: A loader with a map-style dataset.
        budgets: Numbers M of data per draw, even.
        n_draws: Number of draws per budget.

    Raises:
        ValueError: If there is no such dataset, or a budget or the number of draws is impossible.

    Example:
        >>> check_budgets(DataLoader(range(9)), (4, 8), n_draws=1)
        9
    """
    dataset: Any = getattr(train_loader, "dataset", None)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ValueError(
            "Expected a DataLoader with a map-style dataset, to draw mini-batches from, got "
            f"{type(train_loader).__name__}. Remedy: `DataLoader(TensorDataset(X, y), ...)`."
        )
    N = len(dataset)
    for budget in budgets:
        if budget % 2 or not 2 <= budget <= N:
            raise ValueError(
                f"Expected even budgets between 2 and N = {N}, got {budget}. Remedy: the two-batch "
                "method uses half of it for directions and half for curvatures."
            )
    if n_draws < 1:
        raise ValueError(f"Expected n_draws >= 1, got {n_draws}. Remedy: the paper's is 5.")
    return N


def draw_generator(seed: int, draw: int) -> torch.Generator:
    """Return the source of one draw.

    Args:
        seed: Of the comparison.
        draw: Number of the draw; -1 is the reference's.

    Example:
        >>> draw_generator(0, 1).initial_seed() == draw_generator(0, 2).initial_seed()
        False
    """
    return torch.Generator().manual_seed(seed * 1_000_003 + draw + 1)


def draw_loaders(
    train_loader: DataLoader[Any], budget: int, n_roles: int, generator: torch.Generator
) -> list[DataLoader[Any]]:
    """Return one loader per role, over equal shares of ``budget`` random data.

    The first M data of a draw are the same for every budget of at least M.

    Args:
        train_loader: Its dataset is drawn from, its batch size kept.
        budget: Number M of data.
        n_roles: 1, or 2 for directions and curvatures.
        generator: Decides the order of the training data.

    Example:
        >>> loaders = draw_loaders(DataLoader(range(9)), 4, 2, draw_generator(0, 0))
        >>> [len(loader.dataset) for loader in loaders]
        [2, 2]
    """
    dataset: Any = train_loader.dataset
    order = torch.randperm(len(dataset), generator=generator)[:budget]
    return [
        DataLoader(
            Subset(dataset, part.tolist()),
            batch_size=train_loader.batch_size or len(part),
            collate_fn=train_loader.collate_fn,
        )
        for part in order.split(budget // n_roles)
    ]


def dealt_out(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The share of this process in a loader's data; all of them if it is alone.

    Args:
        loader: The same in every process.

    Returns:
        A loader over every k-th datum for k processes, with a share of the batch size.

    Example:
        >>> loader = DataLoader(range(3))
        >>> dealt_out(loader) is loader
        True
    """
    group = processes()
    if group is None:
        return loader
    dataset: Any = loader.dataset
    own = range(group.rank, len(dataset), group.size)
    shuffled = isinstance(loader.sampler, RandomSampler)
    return DataLoader(
        Subset(dataset, own),
        batch_size=max(1, (loader.batch_size or len(dataset)) // group.size),
        shuffle=shuffled and len(own) > 0,
        generator=loader.generator if shuffled else None,
        collate_fn=loader.collate_fn,
    )


def whole_loader(
    train_loader: DataLoader[Any], generator: torch.Generator | None = None
) -> DataLoader[Any]:
    """Return a loader over all training data, whatever the sampler of the given one.

    Args:
        train_loader: Its dataset is read, its batch size kept.
        generator: Shuffles the data; ``None`` keeps their order.

    Example:
        >>> [batch.tolist() for batch in whole_loader(DataLoader(range(3), 2, drop_last=True))]
        [[0, 1], [2]]
    """
    dataset: Any = train_loader.dataset
    return DataLoader(
        dataset,
        batch_size=train_loader.batch_size or len(dataset),
        shuffle=generator is not None,
        generator=generator,
        num_workers=getattr(train_loader, "num_workers", 0) if generator is None else 0,
        collate_fn=train_loader.collate_fn,
    )


def n_outputs(model: nn.Module, train_loader: DataLoader[Any], key_y: str = "labels") -> int:
    """Return the number C of a network's outputs, from the first datum.

    Args:
        model: The network, left as it was.
        train_loader: Its dataset's first datum is read.
        key_y: Key of the labels in mini-batches that are mappings.

    Example:
        >>> data = [(torch.zeros(2), 0)]
        >>> n_outputs(nn.Linear(2, 3), DataLoader(data))
        3
    """
    batch = train_loader.collate_fn([train_loader.dataset[0]])
    device = next(model.parameters()).device
    with torch.no_grad(), evaluation_mode(model):
        ((X, _),) = read([batch], device, key_y)
        return int(classes_last(call_model(model, X)).shape[-1])
