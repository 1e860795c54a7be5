"""A network and the inputs of its last layer, with nothing kept between calls.

laplace-torch's ``FeatureExtractor`` leaves a hook on the last layer that writes each call's
features into the extractor. A copy of it reads the features of the original's batches, a second
thread those of the first, and no file can hold it. Here a hook lives for one call, and is that
call's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from laplace.utils import FeatureExtractor
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs, Keys, take, widen
from laplace_debias.network.calling import call_model, pick_tensor
from laplace_debias.network.preserve import devices_of, evaluation_mode, preserved
from laplace_debias.network.recorder import Recorder, check_outputs
from laplace_debias.network.upstream import (
    feature_extractor,
    forget_last_layer_name,
    last_layer_name,
    last_layer_of,
)

__all__ = [
    "LastLayerNetwork",
    "computing_model",
    "detached_features",
    "first_output",
    "outputs_and_features",
]

LEFTOVERS = {"fisher", "_backpack_extend"}
"""Attributes that ASDL and BackPACK leave on modules, and for which they refuse each other's."""


class LastLayerNetwork(FeatureExtractor):
    """laplace-torch's feature extractor, re-entrant.

    Args:
        model: The network; its last layer is an ``nn.Linear``.
        last_layer_name: Its name, if known.
        enable_backprop: Whether features stay attached to the graph.
        feature_reduction: How features ``[n, ..., d]`` become ``[n, d]``: ``"pick_first"``,
            ``"pick_last"`` or ``"average"`` over the positions in between.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(3, 2))
        >>> f, phi = LastLayerNetwork(net, "1").forward_with_features(torch.zeros(4, 3))
        >>> f.shape, phi
        (torch.Size([4, 2]), tensor([[0., 0., 0.], [0., 0., 0.], [0., 0., 0.], [0., 0., 0.]]))
    """

    @classmethod
    def taking_over(cls, extractor: FeatureExtractor) -> LastLayerNetwork:
        """The network of another extractor, without the hook that this one left on it.

        Args:
            extractor: One that nothing was done with yet.

        Returns:
            A network with the same options.
        """
        name = last_layer_name(extractor)
        if name is not None:
            last_layer_of(extractor)._forward_hooks.popitem()  # the last that was put there
        return cls(extractor.model, name, extractor.enable_backprop, extractor.feature_reduction)

    def set_last_layer(self, last_layer_name: str) -> None:
        """Choose the last layer.

        Args:
            last_layer_name: Its name in the network.

        Raises:
            ValueError: If it is not an ``nn.Linear``.
        """
        layer = self.model.get_submodule(last_layer_name)
        if not isinstance(layer, nn.Linear):
            raise ValueError(
                f"Expected a network whose last layer is an nn.Linear, got {type(layer).__name__} "
                f"('{last_layer_name}'). Remedy: subset_of_weights='all', or pass the name of the "
                "nn.Linear that the network ends with as `last_layer_name`."
            )
        hooks = layer._forward_hooks
        before = set(hooks)
        super().set_last_layer(last_layer_name)
        for key in set(hooks) - before:
            del hooks[key]

    def find_last_layer(self, x: Inputs) -> Tensor:
        """Take the ``nn.Linear`` that a forward pass reaches last for the last layer.

        Args:
            x: Inputs of some data.

        Returns:
            The network's outputs.

        Raises:
            ValueError: If another kind of layer is the last, or no layer is called.
        """
        names = {
            m: name
            for name, m in self.model.named_modules()
            if name
            and not isinstance(m, torch.jit.ScriptModule)  # takes no hooks
            and "parametrizations" not in name.split(".")  # they belong to their layer
            and all(child == "parametrizations" for child, _ in m.named_children())
        }
        order: dict[nn.Module, None] = {}  # by first calls
        handles = [m.register_forward_hook(lambda m, *_: order.setdefault(m)) for m in names]
        try:
            outputs = call_model(self.model, x)
        finally:
            for handle in handles:
                handle.remove()
        if not order:
            raise ValueError(
                f"Expected a network of several layers, got {type(self.model).__name__} without "
                "a layer inside it. Remedy: subset_of_weights='all'."
            )
        self.set_last_layer(names[list(order)[-1]])
        return outputs

    def forget_last_layer(self) -> None:
        """Become a network whose last layer is not known yet."""
        self.last_layer = None
        forget_last_layer_name(self)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Outputs of the network, which takes its arguments as if there were no extractor."""
        if self.last_layer is None:
            return self.find_last_layer(args[0] if args else kwargs)
        return pick_tensor(self.model(*args, **kwargs))

    def forward_with_features(self, x: Inputs, **model_kwargs: Any) -> tuple[Tensor, Tensor]:
        """See :func:`outputs_and_features`."""
        return outputs_and_features(self, x, **model_kwargs)


def outputs_and_features(
    extractor: FeatureExtractor, x: Inputs, **model_kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Outputs of a network and the inputs of its last layer.

    Args:
        extractor: The network, ours or laplace-torch's.
        x: Inputs of n data.
        **model_kwargs: For the network's forward pass.

    Returns:
        Outputs ``[n, C]`` and features ``[n, d]``, or ``[n, ..., d]`` without a reduction.

    Raises:
        ValueError: If the forward pass does not call the last layer.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(3, 2))
        >>> outputs_and_features(FeatureExtractor(net, "1"), torch.zeros(1, 3))[1]
        tensor([[0., 0., 0.]])
    """
    if extractor.last_layer is None:
        extractor.find_last_layer(cast(Any, x))  # one of laplace-torch's takes fewer forms
    layer = last_layer_of(extractor)
    recorder = Recorder(
        [layer], keep_inputs=True, keep_graph=bool(extractor.enable_backprop), edges=False
    )
    with recorder.recording():
        outputs = call_model(extractor.model, x, **model_kwargs)
    if not recorder.calls[layer]:
        raise ValueError(
            f"Expected the forward pass to call the last layer '{last_layer_name(extractor)}', got "
            "no call. Remedy: pass the name of the layer that it ends with as `last_layer_name`."
        )
    features = recorder.calls[layer][-1].kept_input
    if features.ndim <= 2 or extractor.feature_reduction is None:
        return outputs, features
    positions = features.flatten(1, -2)  # [n, T, d]
    if extractor.feature_reduction == "average":
        return outputs, positions.mean(1)
    return outputs, positions[:, 0 if extractor.feature_reduction == "pick_first" else -1]


@torch.no_grad()
def detached_features(model: nn.Module, x: Inputs) -> Tensor:
    """Inputs of the last layer, without a graph.

    Args:
        model: A feature extractor, ours or laplace-torch's.
        x: Inputs of n data.

    Returns:
        Features ``[n, d]``.

    Example:
        >>> net = nn.Sequential(nn.Tanh(), nn.Linear(3, 2))
        >>> detached_features(FeatureExtractor(net, "1"), torch.zeros(1, 3))
        tensor([[0., 0., 0.]])
    """
    return outputs_and_features(feature_extractor(model), x)[1]


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


def first_output(model: nn.Module, x: Inputs, key: Keys = "input_ids") -> Tensor:
    """What a network makes of the first datum by itself.

    Args:
        model: The network.
        x: Inputs of a mini-batch.
        key: Which entries of a mapping run over the data.

    Returns:
        Outputs ``[1, C]``.

    Example:
        >>> first_output(nn.Identity(), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[1., 2.]])
    """
    devices = devices_of(list(model.parameters()))
    with evaluation_mode(model), torch.no_grad(), torch.random.fork_rng(devices):
        return check_outputs(call_model(model, take(x, slice(0, 1), key)))
