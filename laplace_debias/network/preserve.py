"""Leave the user's model as it was found, also when something raises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["differentiable", "evaluation_mode", "preserved"]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch ``model`` to evaluation mode, and every module back to its own mode afterwards.

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
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def differentiable(model: nn.Module, params: Iterable[Tensor]) -> Iterator[None]:
    """Evaluation mode with gradients on and ``params`` differentiable, whatever holds outside.

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
    frozen = [p for p in params if not p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_(True)
        with evaluation_mode(model), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


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
