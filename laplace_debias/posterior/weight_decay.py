r"""From the weight decay of the training to the prior precision of the posterior.

A posterior's mode is where :math:`\sum_n \nabla \ell_n(\theta) + \delta\, \theta = 0`. Training by
an optimiser ends where its own step vanishes. With the gradient g of its loss and the weight decay
:math:`\omega`:

- SGD and Adam add :math:`\omega\, \theta` to the gradient: they end where
  :math:`g + \omega\, \theta = 0`. With the mean loss, :math:`g = \frac1N \sum_n \nabla \ell_n`,
  that is :math:`\delta = N \omega`; with losses summed over mini-batches of M data,
  :math:`\delta = N \omega / M`.
- AdamW decays apart from its gradient, and ends where
  :math:`g / (\sqrt{v} + \varepsilon) + \omega\, \theta = 0` with v the mean squared gradient: every
  weight has a prior precision of its own,
  :math:`\delta_i = N \omega\, (\sqrt{v_i} + \varepsilon)`.

N is the number of training data, not of their augmented copies: with augmentation a datum's loss is
its mean over the copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["prior_precision_from_weight_decay"]

COUPLED = ("sgd", "adam")


def prior_precision_from_weight_decay(
    weight_decay: float,
    n_data: int,
    optimizer: str | torch.optim.Optimizer = "sgd",
    reduction: str = "mean",
    batch_size: int | None = None,
) -> Tensor:
    """Prior precision at which a trained network is the posterior's mode.

    Args:
        weight_decay: As the optimiser had it.
        n_data: Number N of training data.
        optimizer: ``"sgd"``, ``"adam"``, or for AdamW the optimiser object, whose mean squared
            gradients count.
        reduction: ``"mean"`` or ``"sum"``, that of the training loss over a mini-batch.
        batch_size: Number of data of a mini-batch, for ``"sum"``.

    Returns:
        One number; for AdamW one per parameter tensor, the mean over its weights.

    Raises:
        ValueError: If the optimiser or reduction is unknown, or something is missing.

    Example:
        >>> prior_precision_from_weight_decay(5e-4, 50_000)
        tensor(25.)
        >>> prior_precision_from_weight_decay(5e-4, 50_000, reduction="sum", batch_size=100)
        tensor(0.2500)
    """
    if not (weight_decay > 0 and n_data > 0):
        raise ValueError(
            f"Expected a positive weight decay and number of data, got {weight_decay} and {n_data}."
            " Remedy: without weight decay, choose the prior precision by "
            "`la.optimize_prior_precision`."
        )
    if reduction not in ("mean", "sum") or (reduction == "sum" and not batch_size):
        raise ValueError(
            "Expected reduction 'mean', or 'sum' with the `batch_size` it summed over, got "
            f"{reduction!r} and {batch_size}. Remedy: pass what the training loss had."
        )
    scale = n_data * weight_decay / (1 if reduction == "mean" else (batch_size or 1))
    if isinstance(optimizer, str) and optimizer.lower() in COUPLED:
        return torch.tensor(scale)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"Expected optimizer 'sgd', 'adam' or an optimiser object, got {optimizer!r}. Remedy: "
            "for AdamW pass the object itself, which knows its mean squared gradients."
        )
    if isinstance(optimizer, torch.optim.SGD):
        return torch.tensor(scale)
    groups = optimizer.param_groups
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is one, and says if it is decoupled
        raise ValueError(
            f"Expected SGD, Adam or AdamW, got {type(optimizer).__name__}. Remedy: choose the "
            "prior precision by `la.optimize_prior_precision`."
        )
    if not any(group.get("decoupled_weight_decay", False) for group in groups):
        return torch.tensor(scale)
    values = []
    for group in groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            if "exp_avg_sq" not in state:
                raise ValueError(
                    "Expected an AdamW object after its training, got one without mean squared "
                    "gradients. Remedy: pass the optimiser that took the steps, or load its state."
                )
            corrected = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
            values.append(scale * (corrected.sqrt() + group["eps"]).mean())
    return torch.stack(values)
