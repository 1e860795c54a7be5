"""Verified, not assumed: outputs belong to their data, in any order and any company."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import nn

from laplace_debias.data.inputs import Inputs, Keys, rows_of, size_of, take
from laplace_debias.network.check import N_CHECKED, agree, devices_of
from laplace_debias.network.preserve import differentiable
from laplace_debias.network.recorder import check_outputs

__all__ = ["check_data", "check_order"]


def check_order(
    model: nn.Module, x: Inputs, key: Keys = "input_ids", whole: bool = False
) -> str | None:
    """Whether outputs belong to their data, in any order and any company.

    Args:
        model: The network.
        x: Inputs of a mini-batch; its first few data are looked at.
        key: Which entries of a mapping run over the data, see
            :func:`laplace_debias.data.inputs.take`.
        whole: Whether to pass the whole mini-batch as well.

    Returns:
        What is wrong, or ``None``.

    Example:
        >>> check_order(nn.Linear(2, 1), torch.randn(3, 2)) is None
        True
        >>> print(check_order(nn.Softmax(dim=0), torch.randn(3, 2)))
        an output depends on which data pass together
    """
    n = min(size_of(x, key), N_CHECKED)
    devices = devices_of(list(model.parameters()))
    with differentiable(model, []), torch.no_grad(), torch.random.fork_rng(devices):
        few = take(x, slice(0, n), key)
        f = check_outputs(model(few))
        if whole and not agree(check_outputs(model(x))[:n], f):
            return "the outputs of some data differ from those of the whole mini-batch"
        if n == 1:
            return None
        if not agree(check_outputs(model(take(few, torch.arange(n).flip(0), key))).flip(0), f):
            return "outputs do not follow the order of the data"
        alone = [check_outputs(model(take(few, slice(i, i + 1), key))) for i in range(n)]
        if not agree(torch.cat(alone), f):
            return "an output depends on which data pass together"
    return None


def check_data(
    model: nn.Module, x: Inputs, key: Keys = "input_ids", targets: str = "labels"
) -> str | None:
    """Check that outputs belong to their data; see :func:`check_order`.

    Args:
        model: The network.
        x: Inputs of a mini-batch.
        key: Which entries of a mapping run over the data.
        targets: The entry that holds the targets, if there is one.

    Returns:
        What is wrong, with the likely cause and a remedy, or ``None``.

    Example:
        >>> check_data(nn.Linear(2, 1), torch.ones(3, 2)) is None
        True
    """
    names = rows_of(x, key) if isinstance(x, MutableMapping) else []
    guessed = isinstance(key, str) and len(set(names) - {targets}) > 1
    cause = (
        "the model reorders or mixes its mini-batch, or draws random numbers. Remedy: give the "
        "outputs back in the order of the inputs, and normalise with statistics of the training"
    )
    if isinstance(x, MutableMapping):
        cause = (
            f"of {sorted(names)} one does not run over the data (a table, anchors), or "
            f"{cause}. Or name those that do: `data_keys=(...)`"
        )
    try:
        wrong = check_order(model, x, key, whole=guessed)
    except (RuntimeError, IndexError) as error:
        if not guessed:
            raise
        wrong = f"the model raises for some of the data ({error})"
    return None if wrong is None else f"{wrong}; likely cause: {cause}"
