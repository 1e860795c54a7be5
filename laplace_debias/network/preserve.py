"""Leave the user's model as it was found, also when something raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluation_mode", "preserved"]


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
def preserved(model: nn.Module) -> Iterator[None]:
    """Undo whatever happens to ``model`` inside the block, except to its parameters' values.

    Curvature backends leave hooks and attributes on modules and parameters and then refuse each
    other's models. Attributes, hooks, modes, gradients and ``requires_grad`` are put back here;
    gradients are set aside first, so that no backward pass inside the block can add to them.

    Args:
        model: The network.

    Yields:
        Nothing; the model may be used freely inside the ``with`` block.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> with preserved(net):
        ...     net.leftover, net.weight.requires_grad = 1, False
        >>> hasattr(net, "leftover"), net.weight.requires_grad
        (False, True)
    """
    modules = [(module, _snapshot(module)) for module in model.modules()]
    parameters = [
        (p, p.requires_grad, p.grad, dict(getattr(p, "__dict__", {}))) for p in model.parameters()
    ]
    for p, *_ in parameters:
        p.grad = None
    try:
        yield
    finally:
        for module, (attributes, containers) in modules:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            # in place: a hook's handle points to the very container it was registered in
            for name, content in containers.items():
                attributes[name].clear()
                attributes[name].update(content)
        for p, requires_grad, grad, attributes in parameters:
            p.requires_grad_(requires_grad)
            p.grad = grad
            p.__dict__.clear()
            p.__dict__.update(attributes)


def _snapshot(module: nn.Module) -> tuple[dict, dict]:
    """Attributes of a module, and the contents of those that are dictionaries."""
    attributes = dict(module.__dict__)
    containers = {name: dict(v) for name, v in attributes.items() if isinstance(v, dict)}
    return attributes, containers
