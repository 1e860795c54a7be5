"""What a check of a model has shown, so that nothing is checked twice.

A posterior makes a new predictor for every prior precision, a sweep one per grid, a comparison one
per draw, all around one model. What was found holds until the next fit (which checks all anew), or
until the model or the shape of its inputs changes: which modules it has (the very objects), which
of their plain attributes, hooks and ``forward`` they have, and which parameters require a gradient.
Values of parameters and data do not count.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs, Keys, rows_of, size_of

__all__ = ["forget", "question_of", "recall", "remember"]

N_KEPT = 16
"""How many outcomes are kept for a model; the oldest goes first."""
_PLAIN = (bool, int, float, str, tuple, type(None))
_lock = threading.Lock()
_kept: WeakKeyDictionary[nn.Module, list[tuple[Any, list[ref[nn.Module]], Any]]] = (
    WeakKeyDictionary()
)


def _shapes(x: Inputs) -> tuple[object, ...]:
    """Shapes and types of one datum, entry by entry."""
    if isinstance(x, Tensor):
        return (x.shape[1:], x.dtype, x.device)
    return tuple(
        (name, value.shape[1:], value.dtype, value.device) if isinstance(value, Tensor) else name
        for name, value in (x.items() if isinstance(x, MutableMapping) else enumerate(x))
    )


def _structure(module: nn.Module) -> tuple[object, ...]:
    """What a module does, as far as it can be seen without calling it."""
    own = vars(module)
    return (
        type(module),
        id(getattr(type(module), "forward", None)),  # TorchScript has none
        own.get("forward"),
        tuple(module._forward_hooks.values()),
        tuple(module._forward_pre_hooks.values()),
        tuple((name, p is not None and p.requires_grad) for name, p in module._parameters.items()),
        tuple(
            (name, value)
            for name, value in own.items()
            if name != "training" and isinstance(value, _PLAIN)
        ),
    )


def question_of(kind: str, x: Inputs, key: Keys, *rest: Hashable) -> Hashable:
    """A question whose answer depends on which entries of the inputs run over the data.

    Args:
        kind: What is asked.
        x: Inputs of a mini-batch.
        key: Which entries of a mapping run over the data.
        *rest: What else the answer depends on.

    Returns:
        The question. What a few data showed does not answer for more of them.

    Example:
        >>> import torch
        >>> question_of("fine?", torch.ones(8, 2), "x")
        ('fine?', 'x', (), 4)
    """
    names = tuple(rows_of(x, key)) if isinstance(x, MutableMapping) else ()
    return kind, key, names, min(size_of(x, key), 4), *rest


def _key(model: nn.Module, question: Hashable, x: Inputs) -> tuple[Any, list[nn.Module]]:
    modules = list(model.modules())
    return (question, _shapes(x), [_structure(module) for module in modules]), modules


def recall(model: nn.Module, question: Hashable, x: Inputs) -> Any:
    """The outcome of an earlier check of the same model for inputs of the same shape.

    Args:
        model: The network.
        question: What was asked, with everything else that the answer depends on.
        x: Inputs; the number of data does not count.

    Returns:
        What :func:`remember` was given, or ``None``.

    Example:
        >>> import torch
        >>> net = nn.Linear(2, 1)
        >>> remember(net, "fine?", torch.ones(3, 2), "yes")
        >>> recall(net, "fine?", torch.ones(5, 2)), recall(net, "fine?", torch.ones(5, 4, 2))
        ('yes', None)
    """
    key, modules = _key(model, question, x)
    with _lock:
        for known, refs, answer in _kept.get(model, ()):
            same = len(refs) == len(modules) and all(
                kept() is module for kept, module in zip(refs, modules, strict=True)
            )
            if same and known == key:
                return answer
    return None


def remember(model: nn.Module, question: Hashable, x: Inputs, answer: Any) -> None:
    """Keep the outcome of a check for as long as the model lives and stays what it is.

    Args:
        model: The network.
        question: See :func:`recall`.
        x: The inputs that were looked at.
        answer: The outcome, not ``None``.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 1))
        >>> remember(net, "fine?", torch.ones(3, 2), "yes")
        >>> net[0] = nn.Linear(2, 1)
        >>> recall(net, "fine?", torch.ones(3, 2)) is None
        True
    """
    key, modules = _key(model, question, x)
    with _lock:
        kept = _kept.setdefault(model, [])
        kept.append((key, [ref(module) for module in modules], answer))
        del kept[:-N_KEPT]


def forget(model: nn.Module) -> None:
    """Let everything about a model be checked anew.

    Args:
        model: The network.

    Example:
        >>> import torch
        >>> net = nn.Linear(2, 1)
        >>> remember(net, "fine?", torch.ones(3, 2), "yes")
        >>> forget(net)
        >>> recall(net, "fine?", torch.ones(3, 2)) is None
        True
    """
    with _lock:
        _kept.pop(model, None)
