"""Run a network with other weights, without writing them into it.

``torch.func.functional_call`` puts the other weights into the modules for the time of the call:
another thread that uses the network meanwhile computes with them, and a module that stands in the
network under two names keeps them for good. Here the modules stay as they are. Operations of this
thread, and of no other, that are handed a parameter get another tensor in its place, wherever the
network holds the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

__all__ = ["substituted"]


class substituted(TorchFunctionMode):
    """Context in which operations see other tensors in the place of some.

    Args:
        pairs: Pairs of a parameter and the tensor of the same shape that takes its place.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 1, bias=False)
        >>> with substituted([(net.weight, torch.tensor([[1.0, 3.0]]))]):
        ...     net(torch.ones(1, 2))
        tensor([[4.]])
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        pairs = list(pairs)
        self._kept = [given for given, _ in pairs]  # alive, so that each ``id`` stays its own
        self._found = {id(given): other for given, other in pairs}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call an operation on the other tensors."""

        def exchanged(value: Any) -> Any:
            return self._found.get(id(value), value) if isinstance(value, Tensor) else value

        return func(*tree_map(exchanged, args), **tree_map(exchanged, dict(kwargs or {})))
