"""Leave the user's model as it was found, also when something raises."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.data.inputs import widen
from laplace_debias.network.features import LastLayerNetwork
from laplace_debias.network.nested import Change, held
from laplace_debias.network.upstream import feature_extractor, last_layer_name

__all__ = ["computing_model", "differentiable", "evaluation_mode", "parameters_kept", "preserved"]

LEFTOVERS = {"fisher", "_backpack_extend"}
"""Attributes that ASDL and BackPACK leave on modules, and for which they refuse each other's."""


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
    with (
        held(Change(("gradient", id(p)), partial(_required_gradient, p)) for p in params),
        evaluation_mode(model),
        torch.inference_mode(False),
        torch.enable_grad(),
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


@contextmanager
def computing_model(
    model: nn.Module, last_layer: bool = False
) -> Iterator[tuple[nn.Module, Callable[[Any], Any]]]:
    """The model to compute factors with, in evaluation mode; it is left as it was.

    Half-precision models are copied to float32 for this, because sums of outer products overflow
    (float16) or drown (bfloat16) in their own precision.

    Args:
        model: The network, for ``last_layer`` a ``FeatureExtractor`` that knows its last layer.
        last_layer: Whether only the last layer is Bayesian.

    Yields:
        The model, and a function that casts its inputs and targets.

    Example:
        >>> with computing_model(nn.Linear(2, 1).half()) as (model, cast):
        ...     model(cast(torch.ones(1, 2).half())).dtype
        torch.float32
    """
    half = next(model.parameters()).dtype in (torch.float16, torch.bfloat16)
    if half:
        model = _float32_copy(model, last_layer)
    before = [(module, set(vars(module))) for module in model.modules()]
    try:
        with preserved(model):
            model.eval()
            yield model, (widen if half else lambda value: value)
    finally:
        for module, names in before:
            for name in LEFTOVERS & (set(vars(module)) - names):
                delattr(module, name)


def _float32_copy(model: nn.Module, last_layer: bool) -> nn.Module:
    """The model in float32; its last layer cannot be taken over by a mere cast."""
    if not last_layer:
        return copy.deepcopy(model).float()
    extractor = feature_extractor(model)
    return LastLayerNetwork(
        copy.deepcopy(extractor.model).float(),
        last_layer_name=last_layer_name(model),
        enable_backprop=extractor.enable_backprop,
        feature_reduction=extractor.feature_reduction,
    )
