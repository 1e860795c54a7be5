"""Before a layer can be looked at: a model that runs in Python, complete, of real numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["check_no_autocast", "check_runnable"]


def check_runnable(model: nn.Module, copied: bool = False) -> None:
    """Raise for models that no hook can look into, or whose parameters have no curvature yet.

    Args:
        model: The network.
        copied: Whether it will be copied, as laplace-torch does for a last layer.

    Raises:
        ValueError: If it is compiled to TorchScript, has parameters without a shape or made in
            inference mode, or complex parameters that require a gradient; or if it has to be
            copied and holds a tensor with a graph.

    Example:
        >>> check_runnable(nn.Linear(2, 1))
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"Expected a model that runs in Python, got a {type(model).__name__} of TorchScript, "
            "whose layers cannot be observed. Remedy: pass the module that `torch.jit.script` or "
            "`torch.jit.trace` was given."
        )
    for name, m in model.named_modules() if copied else ():
        graphs = [k for k, v in vars(m).items() if isinstance(v, Tensor) and not v.is_leaf]
        if graphs:
            raise ValueError(
                f"Expected a model that can be copied, got '{name}' with a computed tensor, "
                f"'{graphs[0]}' (the old `torch.nn.utils.weight_norm`, or a result that `forward` "
                "keeps). Remedy: `torch.nn.utils.parametrizations.weight_norm`, "
                "`remove_weight_norm`, or keep a detached tensor."
            )
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise ValueError(
                f"Expected parameters with a shape, got '{name}' of a lazy layer that never ran. "
                "Remedy: call the model once on a mini-batch, and train it."
            )
        if p.is_inference():
            raise ValueError(
                f"Expected parameters that can have a gradient, got '{name}', which was made under "
                "`torch.inference_mode`. Remedy: build or load the model outside of it; fits and "
                "predictions may run inside."
            )
        if p.is_complex() and p.requires_grad:
            raise ValueError(
                f"Expected trainable parameters that are real numbers, got '{name}' of type "
                f"{p.dtype}. Remedy: `model.get_parameter('{name}').requires_grad_(False)`, or "
                "hold its real and imaginary part in layers of their own."
            )


def check_no_autocast(device: torch.device) -> None:
    """Raise inside of ``torch.autocast``, where factors would be summed in half precision.

    Args:
        device: Where they are summed.

    Raises:
        ValueError: If autocast is on there.

    Example:
        >>> check_no_autocast(torch.device("cpu"))
    """
    if torch.is_autocast_enabled(device.type):
        raise ValueError(
            "Expected a fit outside of `torch.autocast`, which would sum its factors in "
            f"{torch.get_autocast_dtype(device.type)}, got one inside. Remedy: leave the `with` "
            "block for the fit; to run the network itself in that precision, put autocast into "
            "its `forward`."
        )
