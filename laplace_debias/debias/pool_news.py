"""What one process has learnt of a pool, and how it becomes everybody's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from laplace_debias.data.inputs import (
    Inputs,
    Keys,
    concatenate,
    datum_shapes,
    map_tensors,
    size_of,
    take,
)
from laplace_debias.data.loaders import in_order
from laplace_debias.data.processes import processes
from laplace_debias.kfac.factors import Factors

__all__ = ["News", "Rows", "Sums", "added_sums", "rows_of_all", "sums_of"]

Rows = tuple[Tensor | None, ...]
"""Kept input rows of some data, one entry per parameter."""


AT_ONCE = 32
"""Data that are in double precision at a time."""
Sums = tuple[Tensor, Tensor]
"""Sums over data of inputs and of their squares, in float64."""


def sums_of(X: Inputs) -> Sums | None:
    """Sums over data of floating point inputs and of their squares.

    Args:
        X: Inputs ``[n, ...]``; there are no sums of mappings, tuples and whole numbers.

    Example:
        >>> sums_of(torch.tensor([[1.0], [2.0]]))
        (tensor([3.], dtype=torch.float64), tensor([5.], dtype=torch.float64))
    """
    if not isinstance(X, Tensor) or not X.is_floating_point():
        return None
    first, second = torch.zeros(2, *X.shape[1:], dtype=torch.float64, device=X.device)
    for part in X.split(AT_ONCE):
        x = part.double()
        first, second = first + x.sum(0), second + x.square().sum(0)
    return first, second


def added_sums(one: Sums | None, two: Sums | None) -> Sums | None:
    """Both together; the first where shapes differ, or where there is but one.

    Args:
        one: Sums of some data.
        two: Sums of others.

    Example:
        >>> ones = (torch.ones(1), torch.ones(1))
        >>> added_sums(ones, ones), added_sums(None, ones) is ones
        ((tensor([2.]), tensor([2.])), True)
    """
    if one is None or two is None:
        return two if one is None else one
    if one[0].shape != two[0].shape:
        return one
    return one[0] + two[0], one[1] + two[1]


def rows_of_all(
    folds: list[list[tuple[Tensor, Rows]]], n_params: int, n_folds: int
) -> list[Tensor | None]:
    """Kept rows of all processes, fold by fold, each in the order of its numbers.

    Args:
        folds: For every fold, and perhaps for data of no fold, numbers in the pool and rows.
        n_params: Number of parameters.
        n_folds: Number of folds; what comes after them may lack rows.

    Returns:
        Rows ``[n, d_in]`` for each parameter, ``None`` where a fold lacks them.
    """
    group, found = processes(), list[Tensor | None]()
    assert group is not None
    shares = group.gather([[(n, _moved(kept, "cpu")) for n, kept in fold] for fold in folds])
    merged = [[pair for share in shares for pair in share[k]] for k in range(len(folds))]
    for i in range(n_params):
        parts: list[Tensor] = []
        for k, fold in enumerate(merged):
            there = [(n, kept[i]) for n, kept in fold if kept[i] is not None]
            if k < n_folds and len(there) < len(fold):
                parts = []
                break
            if there:
                parts.append(in_order(*map(list, zip(*there, strict=True))))
        found.append(torch.cat(parts) if parts else None)
    return found


@dataclass
class News:
    """What passes over new data of a pool have told, of one process or of all.

    Attributes:
        halves: Input factors of both halves of the pool.
        pixels: Covariances of their pixels, if there are any.
        outputs: The network's outputs of the new mini-batches.
        features: Their features, ``None`` where there are none.
        weights: How much their data count, if they do not all count one.
        loss: Summed.
        first: Inputs of the first new data.
        sums: See :func:`sums_of`.
    """

    halves: list[Factors | None] = field(default_factory=lambda: [None, None])
    outputs: list[Tensor] = field(default_factory=list)
    features: list[Tensor | None] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    first: Inputs | None = None
    sums: Sums | None = None
    pixels: Factors | None = None

    def add(
        self,
        half: int,
        new: Factors,
        pixels: Factors | None,
        X: Inputs,
        outputs: Tensor,
        features: Tensor | None,
        weights: Tensor | None,
        loss: Tensor,
    ) -> None:
        """Add a mini-batch.

        Args:
            half: Which half it belongs to.
            new: Its input factors.
            pixels: Covariances of its pixels, if there are any.
            X: Its inputs.
            outputs: The network's outputs.
            features: Its features, if there are any.
            weights: How much each datum counts, or ``None``.
            loss: Summed over the data.
        """
        old = self.halves[half]
        self.halves[half] = new if old is None else old + new
        if pixels is not None:
            self.pixels = pixels if self.pixels is None else self.pixels + pixels
        self.outputs.append(outputs)
        self.features.append(features)
        self.weights += [] if weights is None else [weights]
        self.loss = self.loss.to(loss) + loss
        self.first = X if self.first is None else self.first
        self.sums = added_sums(self.sums, sums_of(X))

    def of_all(
        self,
        halves: list[Factors | None],
        own: Tensor,
        device: torch.device,
        most: int,
        key: Keys,
    ) -> News | None:
        """The news of all processes, the same in every one; ``None`` if there are none.

        Args:
            halves: Input factors of both halves, summed over processes.
            own: Numbers of this process's new data.
            device: Where tensors are to be.
            most: How many of the first inputs of each process are kept.
            key: Key of the inputs in a mapping.

        Returns:
            Rows in the order of their numbers, and sums in the order of ranks.
        """
        group = processes()
        assert group is not None
        few: Any = self.first
        if few is not None:
            few = take(few, slice(0, min(most, size_of(few, key))), key)
        mine = (
            own,
            self.outputs,
            None if any(part is None for part in self.features) else self.features,
            self.weights,
            self.loss,
            few,
            self.sums,
        )
        found = [each for each in group.gather(_moved(mine, "cpu")) if each[1]]
        if not found:
            return None
        numbers, outputs, features, weights, losses, firsts, sums = zip(*found, strict=True)
        rows = [torch.cat(part) for part in outputs]
        known = all(part is not None for part in features)
        total = None
        for each in sums:
            total = added_sums(total, each)
        news = News(
            halves,
            [in_order(list(numbers), rows)],
            [in_order(list(numbers), [torch.cat(part) for part in features]) if known else None],
            [in_order(list(numbers), [torch.cat(part) for part in weights])] if weights[0] else [],
            sum(losses[1:], losses[0]),
            concatenate([x for x in firsts if datum_shapes(x) == datum_shapes(firsts[0])], key),
            total,
        )
        for name in ("outputs", "features", "weights", "loss", "first", "sums"):
            setattr(news, name, _moved(getattr(news, name), device))
        return news


def _moved(value: Any, device: torch.device | str) -> Any:
    """Tensors in tuples, lists and inputs, on a device."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, list | tuple):
        return type(value)(_moved(part, device) for part in value)
    return map_tensors(value, lambda t: t.to(device))
