"""Leave the user's model as it was found, also when something raises, and in many threads.

A module's mode, a parameter's ``requires_grad`` and PyTorch's switches belong to the process, not
to a call. If every call put back what it found, two threads whose calls overlap would leave behind
what the other one had set. So calls are counted: the first one makes a change (:class:`Change`),
and what was there before is put back after the last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

__all__ = [
    "Change",
    "devices_of",
    "differentiable",
    "evaluation_mode",
    "held",
    "no_autocast",
    "parameters_kept",
    "preserved",
]


@dataclass(frozen=True)
class Change:
    """Something to be switched for as long as any call needs it.

    Attributes:
        key: What is switched: the kind of change, and the ``id`` of the object if there is one.
        make: Makes the change and returns what undoes it. What it returns must keep the object
            alive, so that its ``id`` stays its own.
    """

    key: Hashable
    make: Callable[[], Callable[[], None]]


@dataclass
class _Held:
    """A change that some calls hold."""

    undo: Callable[[], None]
    n_calls: int = 0


_lock = threading.RLock()
_held: dict[Hashable, _Held] = {}


@contextmanager
def held(changes: Iterable[Change]) -> Iterator[None]:
    """Hold changes inside a block, in any number of threads at once.

    Args:
        changes: What to change; the same key in two overlapping blocks is the same change.

    Yields:
        Nothing; every change holds inside the ``with`` block.

    Example:
        >>> lamp = {"on": False}
        >>> def switch_on():
        ...     before = lamp["on"]
        ...     lamp["on"] = True
        ...     return lambda: lamp.update(on=before)
        >>> with held([Change("lamp", switch_on)]):
        ...     with held([Change("lamp", switch_on)]):
        ...         pass
        ...     lamp["on"]
        True
        >>> lamp["on"]
        False
    """
    taken: list[Hashable] = []
    try:
        with _lock:
            for change in changes:
                if change.key not in _held:
                    _held[change.key] = _Held(change.make())
                _held[change.key].n_calls += 1
                taken.append(change.key)
        yield
    finally:
        with _lock:
            for key in reversed(taken):
                _held[key].n_calls -= 1
                if not _held[key].n_calls:
                    _held.pop(key).undo()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch ``model`` to evaluation mode, and every module back to its own mode afterwards.

    Blocks of several threads may overlap: the last one to end puts the modes back.

    Args:
        model: The network; its sub-modules may be in different modes.

    Yields:
        Nothing; the mode holds inside the ``with`` block.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).train()
        >>> with evaluation_mode(net):
        ...     net[1].training
        False
        >>> net[1].training
        True
    """
    with held(Change(("mode", id(m)), partial(_remembered_mode, m)) for m in model.modules()):
        model.eval()
        yield


def _remembered_mode(module: nn.Module) -> Callable[[], None]:
    """What puts a module's mode back."""
    return partial(setattr, module, "training", module.training)


def _required_gradient(p: Tensor) -> Callable[[], None]:
    """Let a parameter require a gradient; return what undoes it."""
    undo = partial(setattr, p, "requires_grad", p.requires_grad)
    p.requires_grad_(True)
    return undo


@contextmanager
def no_autocast() -> Iterator[None]:
    """Leave a ``torch.autocast`` around the call, which would round products to half precision.

    Yields:
        Nothing; autocast inside of a model's ``forward`` does what it says.

    Example:
        >>> x = torch.ones(1, 1)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     with no_autocast():
        ...         inside = (x @ x).dtype
        ...     inside, (x @ x).dtype
        (torch.float32, torch.bfloat16)
    """
    with ExitStack() as stack:
        for device in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def differentiable(model: nn.Module, params: Iterable[Tensor]) -> Iterator[None]:
    """Evaluation mode, full precision and ``params`` differentiable, whatever holds outside.

    Args:
        model: The network.
        params: Parameters that must require a gradient inside the block.

    Yields:
        Nothing; modes and ``requires_grad`` are put back afterwards.

    Example:
        >>> net = nn.Linear(2, 2).requires_grad_(False)
        >>> with torch.no_grad(), differentiable(net, net.parameters()):
        ...     net(torch.ones(1, 2)).requires_grad
        True
        >>> net.weight.requires_grad
        False
    """
    with (
        held(Change(("gradient", id(p)), partial(_required_gradient, p)) for p in params),
        evaluation_mode(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        no_autocast(),
    ):
        yield


@contextmanager
def parameters_kept(model: nn.Module) -> Iterator[None]:
    """Put every module's own parameters back where something else stands in their place.

    ``torch.func.functional_call`` leaves its tensors in a module that stands in the network under
    two names.

    Args:
        model: The network.

    Yields:
        Nothing; parameters may be exchanged inside the ``with`` block.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> net, other = nn.Sequential(layer, layer), {"0.weight": torch.zeros(1, 1)}
        >>> with parameters_kept(net):
        ...     _ = torch.func.functional_call(net, other, (torch.ones(1, 1),))
        >>> isinstance(layer.weight, nn.Parameter)
        True
    """
    kept = [(module._parameters, dict(module._parameters)) for module in model.modules()]
    try:
        yield
    finally:
        for own, content in kept:
            own.update(content)


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Undo what a fit may do to ``model`` inside the block, and nothing else.

    That is: parameters' values, gradients, ``requires_grad`` and attributes; buffers; modes; hooks.
    Gradients are set aside first, so that no backward pass inside the block can add to them. What
    the model's own ``forward`` keeps in attributes (a counter, say) is its own business and stays.

    Args:
        model: The network.

    Yields:
        Nothing; the model may be used freely inside the ``with`` block.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> with preserved(net):
        ...     net.calls, net.weight.requires_grad = 1, False
        >>> net.calls, net.weight.requires_grad
        (1, True)
    """
    modes = [(module, module.training, module._is_full_backward_hook) for module in model.modules()]
    hooks = [
        (container, dict(container))
        for module in model.modules()
        for name, container in vars(module).items()
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
        and isinstance(container, dict)
    ]
    buffers = [
        (module, name, value, None if value is None else value.clone())
        for module in model.modules()
        for name, value in module._buffers.items()
    ]
    parameters = [
        (p, p.data, p.requires_grad, p.grad, dict(getattr(p, "__dict__", {})))
        for p in model.parameters()
    ]
    for p, *_ in parameters:
        p.grad = None
    try:
        yield
    finally:
        for module, training, full in modes:
            module.training, module._is_full_backward_hook = training, full
        # in place: a hook's handle points to the very container it was registered in
        for container, content in hooks:
            container.clear()
            container.update(content)
        with torch.no_grad():
            for module, name, value, copied in buffers:
                module._buffers[name] = value
                if value is not None and copied is not None and not torch.equal(value, copied):
                    value.copy_(copied)
        for p, data, requires_grad, grad, attributes in parameters:
            p.data = data
            p.requires_grad_(requires_grad)
            p.grad = grad
            p.__dict__.clear()
            p.__dict__.update(attributes)


def devices_of(params: Sequence[Tensor]) -> list[torch.device]:
    """Devices other than the CPU whose generators a network may draw from.

    Args:
        params: Its parameters.

    Returns:
        CUDA devices, each once.

    Example:
        >>> devices_of([torch.ones(1)])
        []
    """
    return list({p.device for p in params if p.device.type == "cuda"})
