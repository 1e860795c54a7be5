"""Which targets fit a network's outputs: class indices, class probabilities, or values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["IGNORED", "WeightedTargets", "apart", "check_targets", "check_unweighted", "weighted"]

IGNORED = -100
"""The label of positions that do not count, as ``nn.CrossEntropyLoss`` has it."""


def check_targets(
    y: Tensor, output_shape: torch.Size, likelihood: str, ignore_index: int = IGNORED
) -> None:
    """Raise unless the targets fit the model's outputs.

    Args:
        y: Targets of a mini-batch of m data: for a classification class indices ``[m, ...]``, or
            probabilities of the classes ``[m, ..., C]`` (soft labels).
        output_shape: Shape of the model's output for these data, ``[m, ..., C]``.
        likelihood: ``"classification"``, ``"regression"``, or ``"bernoulli"`` with targets in
            [0, 1] of the outputs' shape.
        ignore_index: The label of positions (tokens, pixels) that do not count; every datum of
            outputs ``[m, C]`` counts.

    Raises:
        ValueError: If shape, dtype, class indices or probabilities are wrong.

    Example:
        >>> check_targets(torch.tensor([0, 2]), torch.Size([2, 3]), "classification")
    """
    C = output_shape[-1]
    if output_shape[0] != len(y):
        raise ValueError(
            f"Expected {output_shape[0]} targets for as many data, got {len(y)}. Remedy: pass one "
            "target per datum."
        )
    if likelihood == "regression":
        if y.shape[1:] != output_shape[1:]:
            raise ValueError(
                f"Expected regression targets of shape {['m', *output_shape[1:]]}, as the model's "
                f"outputs, got {list(y.shape)}. Remedy: reshape the targets, e.g. "
                "`y.unsqueeze(-1)` for a single output."
            )
        if not torch.isfinite(y).all():
            raise ValueError(
                "Expected finite regression targets, got NaN or Inf. Remedy: drop these rows."
            )
        return
    if likelihood == "bernoulli":
        _check_labels(y, output_shape)
        return
    if C == 1:
        raise ValueError(
            "Expected a model with at least two outputs for a classification, whose softmax of a "
            "single logit is one whatever the data, got one output. Remedy: "
            "likelihood='bernoulli' for a binary classifier of one logit; a reward model turns a "
            "pair [n, 2, ...] into two rewards [n, 2]."
        )
    if y.is_floating_point() and y.shape[1:] == output_shape[1:]:
        _check_probabilities(y)
        return
    if y.is_floating_point() or y.is_complex() or y.shape[1:] != output_shape[1:-1]:
        raise ValueError(
            f"Expected class indices of an integer dtype and shape {['m', *output_shape[1:-1]]}, "
            f"or class probabilities of a floating-point dtype and shape "
            f"{['m', *output_shape[1:]]}, got {y.dtype} of shape {list(y.shape)}. Remedy: for "
            "one-hot integers pass `y.argmax(-1)`, for indices as floats `y.long()`"
            + (_LAYOUTS if len(output_shape) > 2 else ".")
        )
    positions = len(output_shape) > 2
    y = y[y != ignore_index] if positions else y
    if not y.numel():
        return
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= C:
        ignored = f", or {ignore_index} where a position does not count," if positions else ""
        raise ValueError(
            f"Expected class indices in [0, {C - 1}]{ignored} for a model with {C} outputs, got "
            f"values in [{low}, {high}]. Remedy: re-index the classes from 0, or widen the last "
            f"layer{', or pass `ignore_index=` to `Laplace`' if positions else ''}."
        )


_LAYOUTS = (
    "; positions are read from outputs [n, T, C], or [n, C, H, W]: bring others to one of these, "
    "e.g. `Laplace(..., output=lambda f: f.movedim(-1, 1))`."
)


def _check_labels(y: Tensor, output_shape: torch.Size) -> None:
    """Raise unless targets are in [0, 1], one for each output."""
    if y.shape[1:] != output_shape[1:]:
        raise ValueError(
            f"Expected Bernoulli targets of shape {['m', *output_shape[1:]]}, as the model's "
            f"outputs, got {list(y.shape)}. Remedy: reshape the targets, e.g. `y.unsqueeze(-1)` "
            "for a single logit."
        )
    low, high = float(y.min()), float(y.max())
    if not (low >= 0 and high <= 1):  # also for NaN
        raise ValueError(
            f"Expected Bernoulli targets in [0, 1], got values in [{low:.4g}, {high:.4g}]. "
            "Remedy: 0 for no, 1 for yes, anything between for soft labels."
        )


def _check_probabilities(y: Tensor) -> None:
    """Raise unless soft labels are probabilities: the Hessian is the softmax's only then."""
    off = float((y.double().sum(-1) - 1).abs().max())
    low = float(y.min())
    tolerance = max(1e-4, 8 * torch.finfo(y.dtype).eps)
    if not (off <= tolerance and low >= 0):  # also for NaN
        raise ValueError(
            "Expected class probabilities, which are not negative and sum to one for every datum, "
            f"got a smallest entry of {low:.4g} and a sum off by {off:.4g}. Remedy: "
            "`y / y.sum(-1, keepdim=True)` for non-negative weights, `y.softmax(-1)` for scores."
        )


@dataclass(frozen=True)
class WeightedTargets:
    """Targets with a weight for each datum.

    Attributes:
        values: The targets ``[n, ...]``.
        weights: Their weights ``[n]``.

    Example:
        >>> import torch
        >>> y = WeightedTargets(torch.arange(3), torch.tensor([1.0, 2.0, 0.5]))
        >>> len(y), y[1:].weights
        (3, tensor([2.0000, 0.5000]))
    """

    values: Tensor
    weights: Tensor

    def __len__(self) -> int:
        """Number of data."""
        return len(self.values)

    def __getitem__(self, rows: Any) -> WeightedTargets:
        """Some of the data."""
        return WeightedTargets(self.values[rows], self.weights[rows])

    def mapped(self, function: Callable[[Tensor], Tensor]) -> WeightedTargets:
        """The same with changed values."""
        return WeightedTargets(function(self.values), self.weights)


def weighted(y: Tensor, w: Any) -> WeightedTargets:
    """Targets with weights that fit them.

    Args:
        y: Targets ``[n, ...]``.
        w: Weights ``[n]``.

    Returns:
        Both together, on the device of the targets.

    Raises:
        ValueError: If there is not one finite, non-negative number for each datum.

    Example:
        >>> import torch
        >>> weighted(torch.arange(2), torch.tensor([1, 3])).weights
        tensor([1., 3.])
    """
    if not isinstance(w, Tensor) or w.shape != y.shape[:1] or w.is_complex():
        got = list(w.shape) if isinstance(w, Tensor) else type(w).__name__
        raise ValueError(
            f"Expected sample weights of shape [{len(y)}], one for each datum, got {got}. Remedy: "
            "mini-batches `(X, y, w)`, or `(X, y)` without weights."
        )
    w = w.detach().to(y.device)
    w = w if w.is_floating_point() else w.float()
    if not bool((w.isfinite() & (w >= 0)).all()):
        raise ValueError(
            "Expected finite sample weights that are not negative, got others. Remedy: pass the "
            "weights that the training loss had."
        )
    return WeightedTargets(y, w)


def apart(y: Any) -> tuple[Any, Tensor | None]:
    """Targets and their weights, if there are any.

    Args:
        y: Targets, with weights or without, or ``None``.

    Example:
        >>> apart(None)
        (None, None)
    """
    return (y.values, y.weights) if isinstance(y, WeightedTargets) else (y, None)


def check_unweighted(y: Any, what: str, remedy: str) -> None:
    """Raise if targets have weights where nothing takes them into account.

    Args:
        y: Targets.
        what: What does not know weights.
        remedy: What to do instead.

    Raises:
        ValueError: If they have.

    Example:
        >>> import torch
        >>> check_unweighted(torch.zeros(2), "debias='auto'", "debias=True")
    """
    if isinstance(y, WeightedTargets):
        raise ValueError(
            f"Expected mini-batches without sample weights for {what}, got `(X, y, w)`. Remedy: "
            f"{remedy}, or leave the weights out."
        )
