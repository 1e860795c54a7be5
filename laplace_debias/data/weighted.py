r"""Sample weights: targets that come with a weight for each datum.

With weights :math:`w_n` the loss of the training is :math:`\sum_n w_n \ell_n`, and so is its
curvature. Weights come as a third item of a mini-batch, ``(X, y, w)``, or as an entry of a mapping.
They ride on the targets to where factors are made, so that whoever cuts targets cuts them, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["WeightedTargets", "apart", "check_unweighted", "weighted"]


@dataclass(frozen=True)
class WeightedTargets:
    """Targets with a weight for each datum.

    Attributes:
        values: The targets ``[n, ...]``.
        weights: Their weights ``[n]``.

    Example:
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
        >>> check_unweighted(torch.zeros(2), "debias='auto'", "debias=True")
    """
    if isinstance(y, WeightedTargets):
        raise ValueError(
            f"Expected mini-batches without sample weights for {what}, got `(X, y, w)`. Remedy: "
            f"{remedy}, or leave the weights out."
        )
