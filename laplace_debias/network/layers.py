"""Kinds of layers: those whose weight multiplies rows, and those that scale and shift.

The curvature of a linear layer or convolution has two Kronecker factors; that of a normalisation is
kept exactly, as one factor ``[d, d]`` (:mod:`laplace_debias.network.responses`).
"""

from __future__ import annotations

from math import prod
from typing import TypeGuard, get_args

from torch import Tensor, nn
from typing_extensions import TypeIs

__all__ = [
    "KFACLayer",
    "KFAC_TYPES",
    "NORM_TYPES",
    "Norm",
    "SUPPORTED_TYPES",
    "has_own_forward",
    "has_products",
    "has_rows_last",
    "is_kfac_layer",
    "is_norm",
    "is_transposed",
    "n_in",
    "n_out",
    "n_pixels",
]


KFACLayer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
KFAC_TYPES: tuple[type[nn.Module], ...] = get_args(KFACLayer)
"""Layers whose weight has a Kronecker-factored curvature, in the default backend."""
Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.LayerNorm | nn.GroupNorm | nn.RMSNorm
NORM_TYPES: tuple[type[nn.Module], ...] = get_args(Norm)
"""Layers whose scale and shift have an exact block."""
SUPPORTED_TYPES = (*KFAC_TYPES, *NORM_TYPES)
"""All of them, and the ``Conv1D`` of transformers, which is known by its name."""


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is the ``Conv1D`` of transformers: linear, its weight ``[d_in, d_out]``.

    Args:
        module: Any module; transformers need not be installed.

    Example:
        >>> is_transposed(nn.Linear(2, 1))
        False
    """
    if type(module).__name__ != "Conv1D":  # and no look at a weight: a spectral norm would move on
        return False
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, Tensor)
        and weight.ndim == 2
        and getattr(module, "nf", None) == weight.shape[1]
    )


def has_rows_last(module: nn.Module) -> TypeIs[nn.Linear]:
    """Whether a module is linear in the last dimension of its input: ``nn.Linear``, or ``Conv1D``.

    Args:
        module: Any module.

    Example:
        >>> has_rows_last(nn.Linear(2, 1)), has_rows_last(nn.Conv1d(2, 1, 1))
        (True, False)
    """
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_kfac_layer(module: nn.Module) -> TypeGuard[KFACLayer]:
    """Whether a module's weight has a Kronecker-factored curvature.

    Args:
        module: Any module.

    Example:
        >>> is_kfac_layer(nn.Conv2d(1, 1, 1)), is_kfac_layer(nn.LayerNorm(2))
        (True, False)
    """
    return isinstance(module, KFAC_TYPES) or is_transposed(module)


def is_norm(module: nn.Module) -> TypeGuard[Norm]:
    """Whether a module's scale and shift have an exact block.

    Args:
        module: Any module.

    Returns:
        False for normalisations with a ``forward`` of their own, and for those of a batch that
        keep no running statistics: their outputs depend on which data pass together.

    Example:
        >>> is_norm(nn.GroupNorm(1, 2)), is_norm(nn.BatchNorm1d(2, track_running_stats=False))
        (True, False)
    """
    if not isinstance(module, NORM_TYPES) or has_own_forward(module, NORM_TYPES):
        return False
    return not hasattr(module, "running_mean") or module.running_mean is not None


def n_out(layer: nn.Module) -> int:
    """Number of outputs (channels) of a linear layer or convolution.

    Args:
        layer: The layer.

    Example:
        >>> n_out(nn.Linear(3, 5))
        5
    """
    weight: Tensor = layer.weight  # type: ignore[assignment]  # may be parametrised
    return weight.shape[1] if is_transposed(layer) else weight.shape[0]


def n_in(layer: nn.Module) -> int:
    """Length of an input row of a linear layer or convolution.

    Args:
        layer: The layer.

    Example:
        >>> n_in(nn.Conv2d(4, 6, 3, groups=2))
        18
    """
    weight: Tensor = layer.weight  # type: ignore[assignment]  # may be parametrised
    return weight.shape[0] if is_transposed(layer) else weight[0].numel()


def n_pixels(layer: KFACLayer) -> int:
    """Number k of pixels in a patch of a layer; 1 for linear layers.

    Args:
        layer: ``Linear``, ``Conv1d``, ``Conv2d`` or ``Conv3d``.

    Example:
        >>> n_pixels(nn.Conv2d(1, 1, 3)), n_pixels(nn.Linear(2, 2))
        (9, 1)
    """
    return prod(layer.kernel_size) if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) else 1


def has_own_forward(module: nn.Module, types: tuple[type[nn.Module], ...] = KFAC_TYPES) -> bool:
    """Whether a module may compute something else than its torch class does.

    Args:
        module: Any module.
        types: The classes of torch that are looked for.

    Returns:
        True for subclasses and instances with a ``forward`` of their own.

    Example:
        >>> has_own_forward(nn.Linear(2, 1)), has_own_forward(nn.Sequential())
        (False, True)
    """
    cls = type(module)
    base = next((t for t in types if isinstance(module, t)), None)
    names = ("forward", "_conv_forward")
    return (
        base is None
        or "forward" in vars(module)
        or any(getattr(cls, name, None) is not getattr(base, name, None) for name in names)
    )


def has_products(module: nn.Module) -> bool:
    """Whether a linear layer or convolution has to be looked into.

    Args:
        module: Any module.

    Returns:
        True for those with a ``forward`` of their own.

    Example:
        >>> has_products(nn.Linear(2, 1)), has_products(nn.Sequential())
        (False, False)
    """
    return isinstance(module, KFAC_TYPES) and has_own_forward(module)
