"""Evaluation mode for a while, without losing the mode each module was in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and each back into its own mode at the end.

    Dropout and batch statistics are noise beside that of the data, and would make ``q`` random.

    Example:
        >>> model = nn.Sequential(nn.Dropout())
        >>> with evaluation_mode(model):
        ...     model[0].training
        False
        >>> model[0].training
        True
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
