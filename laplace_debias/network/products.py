"""What a layer with a ``forward`` of its own multiplies its weight with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["Products", "conv_geometry"]

_CONV_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_PRODUCTS = {F.linear: _CONV_ARGUMENTS[:3]} | dict.fromkeys(
    (F.conv1d, F.conv2d, F.conv3d), _CONV_ARGUMENTS
)


def conv_geometry(
    weight: Tensor,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> nn.Module:
    """A convolution without numbers that stands for a call of ``F.conv1d``, ``2d`` or ``3d``.

    Args:
        weight: The kernels `[C_out, C_in / groups, *kernel_size]`.
        stride: As in that call.
        padding: As in that call.
        dilation: As in that call.
        groups: As in that call.

    Returns:
        A layer on the meta device.

    Example:
        >>> import torch
        >>> conv_geometry(torch.ones(4, 1, 3, 3), stride=2, groups=2).in_channels
        2
    """
    C_out, C_in, *kernel = weight.shape
    dimensions = len(kernel)

    def each(value: int | Sequence[int]) -> tuple[int, ...]:
        values = (value,) if isinstance(value, int) else tuple(value)
        return values * dimensions if len(values) == 1 else values

    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    return kind(
        C_in * groups,
        C_out,
        tuple(kernel),  # type: ignore[arg-type]
        each(stride),  # type: ignore[arg-type]
        padding if isinstance(padding, str) else each(padding),  # type: ignore[arg-type]
        each(dilation),  # type: ignore[arg-type]
        groups,
        bias=False,
        device="meta",
    )


class Products(TorchFunctionMode):
    """Looks for products with a layer's very own weight while its ``forward`` runs.

    Args:
        layer: The layer.
        add: Called with the layer, a layer of the geometry used, the input and the output of every
            such product, and the names of its parameters in it; what it returns takes the output's
            place.
    """

    def __init__(
        self,
        layer: nn.Module,
        add: Callable[[nn.Module, nn.Module, Tensor, Tensor, tuple[str, ...]], Tensor],
    ) -> None:
        super().__init__()
        self.layer, self.add, self.found = layer, add, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and report it if it is such a product."""
        output = func(*args, **(kwargs or {}))
        names = _PRODUCTS.get(func)
        if names is None:
            return output
        given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        weight = self.layer._parameters.get("weight")
        if weight is None or given["weight"] is not weight:
            return output
        self.found = True
        geometry = self.layer
        if not isinstance(geometry, nn.Linear):
            options = {k: given[k] for k in _CONV_ARGUMENTS[3:] if k in given}
            geometry = conv_geometry(weight, **options)
        bias = self.layer._parameters.get("bias")
        added = bias is not None and given.get("bias") is bias
        used = ("weight", "bias") if added else ("weight",)
        return self.add(self.layer, geometry, given["input"], output, used)
