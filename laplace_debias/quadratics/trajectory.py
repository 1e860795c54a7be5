"""What a trajectory through parameter space does to the actual loss and accuracy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.data.chunks import Chunk, Chunks
from laplace_debias.network.preserve import evaluation_mode
from laplace_debias.network.substitution import substituted
from laplace_debias.storage.export import tidy
from laplace_debias.storage.results import SavedResult


@dataclass(frozen=True)
class TrajectoryMetrics(SavedResult):
    """Performance along ``I + 1`` iterates.

    Attributes:
        loss: Regularised loss, shape ``[I + 1]``.
        accuracy: Fraction of correct classes, shape ``[I + 1]``; NaN for regression.
    """

    loss: Tensor
    accuracy: Tensor

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """Return names of columns, and one row per iterate."""
        columns = {"loss": self.loss, "accuracy": self.accuracy}
        return tidy({"iterate": range(len(self.loss))}, columns)

    def best(self) -> int:
        """Return the iterate of the lowest finite loss (the start, if there is none)."""
        return int(self.loss.nan_to_num(nan=float("inf")).argmin())


@torch.no_grad()
def evaluate_trajectory(
    model: nn.Module,
    loss: nn.Module,
    data: Chunk | Iterable[Chunk],
    iterates: Tensor,
    *,
    l2: float = 0.0,
    regularize_biases: bool = True,
    chunk_size: int | None = None,
) -> TrajectoryMetrics:
    """Evaluate the regularised loss and the accuracy at ``theta_0 + iterates``.

    The model itself is not changed; parameters that do not require gradients keep their values. A
    trajectory that has diverged gives infinite or NaN losses, which are results, not errors.

    Args:
        model: The network at ``theta_0``, evaluated in evaluation mode.
        loss: Loss with ``reduction="mean"``.
        data: A pair ``(X, y)``, or a re-iterable of such pairs.
        iterates: Displacements ``theta_p - theta_0`` as columns, shape ``[P, I + 1]``.
        l2: Strength of the regulariser ``l2 / 2 * ||theta||^2``.
        regularize_biases: Whether it acts on parameters whose name ends in ``bias``.
        chunk_size: Largest number of data that go through the model at once.

    Returns:
        Losses and accuracies, shape ``[I + 1]`` each.

    Raises:
        ValueError: If the iterates do not fit the model's trainable parameters.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> path = torch.stack([torch.zeros(1), 1 - model.weight.detach().flatten()], 1)
        >>> data = (torch.ones(1, 1), torch.ones(1, 1))
        >>> evaluate_trajectory(model, nn.MSELoss(), data, path).loss[1]
        tensor(0.)
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sizes = [p.numel() for p in trainable.values()]
    if iterates.ndim != 2 or len(iterates) != sum(sizes):
        raise ValueError(
            f"Expected iterates of shape [{sum(sizes)}, I + 1], got {tuple(iterates.shape)}. "
            "Remedy: pass one column per iterate, with one entry per trainable parameter."
        )
    chunks = Chunks(data, chunk_size)
    losses, accuracies = [], []
    with evaluation_mode(model):
        for x in iterates.unbind(1):
            theta = {
                name: p + part.view(p.shape)
                for (name, p), part in zip(trainable.items(), x.split(sizes), strict=True)
            }
            total = sum(
                0.5 * l2 * (p**2).sum()
                for name, p in theta.items()
                if regularize_biases or not name.endswith("bias")
            )
            correct = x.new_zeros(())
            for X, y in chunks:
                X, y = X.to(x.device) if isinstance(X, Tensor) else X, y.to(x.device)
                with substituted((p, theta[name]) for name, p in trainable.items()):
                    outputs = model(X)
                total = total + loss(outputs, y) * (len(y) / chunks.n_data)
                classes = not y.is_floating_point()
                correct += (outputs.argmax(1) == y).sum() if classes else float("nan")
            losses.append(total)
            accuracies.append(correct / chunks.n_data)
    return TrajectoryMetrics(torch.stack(losses).cpu(), torch.stack(accuracies).cpu())
