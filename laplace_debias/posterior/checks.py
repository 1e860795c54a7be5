"""What the posteriors' constructors and setters accept."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace_debias.debias.options import CROSSFIT, SINGLE, TWO_BATCH

__all__ = ["check_prior_precision", "debias_mode"]


def check_prior_precision(value: float | Tensor) -> None:
    """Raise unless a prior precision is positive and finite.

    Args:
        value: One number or several.

    Raises:
        ValueError: If one is not.

    Example:
        >>> check_prior_precision(1.0)
    """
    try:
        given = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"Expected a prior precision as a number or a tensor, got {value!r}. Remedy: pass e.g. "
            "1.0."
        ) from error
    if not bool((torch.isfinite(given) & (given > 0)).all()):
        raise ValueError(
            f"Expected a positive, finite prior precision, got {value}. Remedy: pass e.g. 1.0."
        )


def debias_mode(debias: bool | str) -> str:
    """The name of a debiasing method.

    Args:
        debias: ``True`` or ``"two-batch"``, ``"crossfit"``, or ``"single"``.

    Returns:
        ``"two-batch"``, ``"crossfit"`` or ``"single"``.

    Raises:
        ValueError: For anything else.

    Example:
        >>> debias_mode(True)
        'two-batch'
    """
    if debias is True:
        return TWO_BATCH
    if isinstance(debias, str) and debias in (TWO_BATCH, SINGLE, CROSSFIT):
        return debias
    raise ValueError(
        "Expected `debias` to be True or 'two-batch' (directions from one mini-batch, curvatures "
        "from another), 'crossfit' (directions from all data drawn, curvatures from folds that "
        "did not choose them), 'single' (one mini-batch for both, biased) or False "
        f"(laplace-torch's own class), got {debias!r}. Remedy: `Laplace(model, ..., debias=True)`."
    )
