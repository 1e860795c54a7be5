"""ONE place where the network is called: inputs as people have them, and the tensor of outputs.

A tensor is the network's one argument, a tuple or list its positional arguments. A mapping is its
keyword arguments where ``forward`` names its entries, as the models of ``transformers`` do;
otherwise it is the one argument, as laplace-torch has it. What comes back is a tensor, or holds
one: the attribute (or entry) ``logits``, or the first item of a tuple.

A network that labels every position returns ``[n, T, C]`` (tokens) or ``[n, C, *positions]`` with
two or more dimensions of positions (pixels), as ``transformers`` and convolutional networks do. In
here classes are always last, ``[n, *positions, C]``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from laplace.utils import FeatureExtractor
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs
from laplace_debias.network.preserve import Change, held

__all__ = [
    "OutputPicker",
    "as_outputs",
    "call_model",
    "check_positions",
    "classes_last",
    "flat_outputs",
    "pick_tensor",
    "wants_keywords",
    "weights_of_positions",
]

TARGETS = "labels"
"""The entry of a mapping that no network gets as a keyword: it would compute its loss with it."""
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class OutputPicker(nn.Module):
    """A network whose output tensor is picked by a function of the user's.

    Args:
        model: The network.
        pick: Gives the tensor of outputs, from whatever the network returns.

    Example:
        >>> import torch
        >>> class Two(nn.Module):
        ...     def forward(self, x):
        ...         return {"features": x, "scores": 2 * x}
        >>> call_model(OutputPicker(Two(), lambda out: out["scores"]), torch.ones(1, 1))
        tensor([[2.]])
    """

    def __init__(self, model: nn.Module, pick: Callable[[Any], Tensor]) -> None:
        super().__init__()
        if not callable(pick):
            raise ValueError(
                "Expected `output` to be a function of what the model returns, got "
                f"{type(pick).__name__}. Remedy: e.g. `output=lambda out: out['scores']`."
            )
        self.model, self.pick = model, pick

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The picked tensor."""
        return self.pick(self.model(*args, **kwargs))


def call_model(model: nn.Module, x: Inputs, **kwargs: Any) -> Tensor:
    """Run a network on inputs of any form, and pick the tensor of its outputs.

    Args:
        model: The network.
        x: A tensor, a tuple or list of positional arguments, or a mapping.
        **kwargs: Further arguments of its forward pass.

    Returns:
        Its outputs.

    Raises:
        ValueError: If no tensor can be told from what it returns.

    Example:
        >>> import torch
        >>> bilinear = nn.Bilinear(2, 3, 1)
        >>> call_model(bilinear, (torch.ones(5, 2), torch.ones(5, 3))).shape
        torch.Size([5, 1])
        >>> call_model(bilinear, {"input1": torch.ones(5, 2), "input2": torch.ones(5, 3)}).shape
        torch.Size([5, 1])
    """
    args, named = (x if isinstance(x, (tuple, list)) else (x,)), {}
    if isinstance(x, MutableMapping) and wants_keywords(model, x):
        names = _parameters_of(model)
        listed = {name for name, p in names.items() if p.kind in _NAMED}
        args = ()
        named = {k: v for k, v in x.items() if k != TARGETS and (k in listed or not listed)}
    compiler = "torch._dynamo" in sys.modules  # else nothing is compiled; the import takes seconds
    with held([Change("compiler", _as_written)] if compiler else []):
        return pick_tensor(model(*args, **named, **kwargs))


def _as_written() -> Callable[[], None]:
    """Let nothing run compiled, which would not call later hooks; return what undoes it."""
    return partial(torch.compiler.set_stance("force_eager").__exit__, None, None, None)


def wants_keywords(model: nn.Module, x: Mapping[str, Any]) -> bool:
    """Whether a network takes the entries of a mapping as keywords.

    Args:
        model: The network.
        x: The mapping.

    Returns:
        True if its ``forward`` has more than one parameter and names an entry of the mapping, or
        takes keywords of any name and nothing else by name. A ``forward`` of one parameter takes
        the mapping itself, whatever that parameter is called.

    Example:
        >>> wants_keywords(nn.Bilinear(1, 1, 1), {"input1": 0}), wants_keywords(nn.Tanh(), {"x": 0})
        (True, False)
    """
    parameters = _parameters_of(model)
    named = [name for name, p in parameters.items() if p.kind in _NAMED]
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if not named:
        return open_ended
    return (len(named) > 1 or open_ended) and any(name in x for name in named if name != TARGETS)


def _parameters_of(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The arguments of a network's forward pass."""
    while isinstance(model, OutputPicker | FeatureExtractor):
        model = model.model
    return inspect.signature(model.forward).parameters


def pick_tensor(output: Any) -> Tensor:
    """The tensor of outputs in what a network returns.

    Args:
        output: A tensor; or something with ``logits``; or a tuple whose first item is a tensor.

    Returns:
        The tensor.

    Raises:
        ValueError: For anything else.

    Example:
        >>> import torch
        >>> pick_tensor((torch.ones(1), "attention")), pick_tensor({"logits": torch.zeros(1)})
        (tensor([1.]), tensor([0.]))
    """
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else None
    logits = getattr(output, "logits", None) if logits is None else logits
    if isinstance(logits, Tensor):
        return logits
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    got = type(output).__name__
    if isinstance(output, Mapping):
        got += f" with the entries {sorted(map(str, output))}"
    raise ValueError(
        "Expected a model that returns a tensor, something with `logits`, or a tuple whose first "
        f"item is a tensor, got {got}. Remedy: name it, "
        "`Laplace(model, ..., output=lambda out: out[...])`."
    )


def classes_last(f: Tensor) -> Tensor:
    """Outputs with the classes in their last dimension.

    Args:
        f: Outputs of a network: ``[n, C]``, ``[n, T, C]`` or ``[n, C, *positions]``.

    Returns:
        A view ``[n, *positions, C]``.

    Example:
        >>> import torch
        >>> classes_last(torch.zeros(2, 3, 8, 8)).shape, classes_last(torch.zeros(2, 5, 3)).shape
        (torch.Size([2, 8, 8, 3]), torch.Size([2, 5, 3]))
    """
    return f.movedim(1, -1) if f.ndim > 3 else f


def as_outputs(values: Tensor, leading: int = 0) -> Tensor:
    """Undo :func:`classes_last`.

    Args:
        values: ``[n, *positions, C]``, with further dimensions before.
        leading: How many.

    Returns:
        A view in the shape of the network's outputs.

    Example:
        >>> import torch
        >>> as_outputs(torch.zeros(2, 8, 8, 3)).shape
        torch.Size([2, 3, 8, 8])
    """
    return values.movedim(-1, leading + 1) if values.ndim - leading > 3 else values


def flat_outputs(f: Tensor) -> Tensor:
    """All outputs of each datum in one row, the classes of a position next to each other.

    Args:
        f: Outputs of a network.

    Returns:
        ``[n, positions * C]``; outputs ``[n, C]`` as they are.

    Example:
        >>> import torch
        >>> flat_outputs(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 192])
    """
    return f if f.ndim <= 2 else classes_last(f).flatten(1)


def check_positions(f: Tensor, likelihood: str, fisher: str = "mc") -> None:
    """Raise if outputs have positions where there cannot be any.

    Args:
        f: Outputs, with classes last or not.
        likelihood: Of the outputs.
        fisher: Which backward vectors are asked for.

    Raises:
        ValueError: For another likelihood than a classification, or the empirical Fisher.

    Example:
        >>> import torch
        >>> check_positions(torch.zeros(2, 5, 3), "classification")
    """
    if f.ndim <= 2:
        return
    if likelihood != "classification":
        raise ValueError(
            f"Expected outputs of shape [n, C] with likelihood={likelihood!r}, got "
            f"{list(f.shape)}: positions (tokens, pixels) have classes only. Remedy: return one "
            "row of outputs per datum, `output=lambda f: f.flatten(1)`, with targets to match, "
            "also for a single datum: name the dimension of a `.squeeze()`."
        )
    if fisher == "empirical":
        raise ValueError(
            "Expected fisher='exact' or 'mc' for one categorical per position, got 'empirical'. "
            "Remedy: leave `fisher` out, and `backend`."
        )


def weights_of_positions(f: Tensor, weights: Tensor | None) -> Tensor | None:
    """Weights of data or positions as one number for each position.

    Args:
        f: Outputs ``[n, *positions, C]``.
        weights: ``[n]``, ``[n, *positions]`` or ``None``.

    Returns:
        ``[n, *positions]``, or ``None``.

    Raises:
        ValueError: If there is neither one for each datum nor for each position.

    Example:
        >>> import torch
        >>> weights_of_positions(torch.zeros(1, 2, 3), torch.tensor([4.0]))
        tensor([[4., 4.]])
    """
    if weights is None or weights.shape == f.shape[:-1]:
        return weights
    if weights.shape != f.shape[:1]:
        raise ValueError(
            f"Expected weights of shape [{len(f)}], got {list(weights.shape)}. Remedy: pass one "
            "per datum, or one per position."
        )
    return weights.reshape(-1, *[1] * (f.ndim - 2)).expand(f.shape[:-1])
