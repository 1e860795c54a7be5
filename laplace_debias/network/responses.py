r"""How the outputs of a layer answer to steps of its parameters.

A linear layer or convolution multiplies rows with its weight. A normalisation scales and shifts
what it has normalised, :math:`s = \gamma \hat x + \beta` at every position: the gradient of a
datum is the sum over positions of :math:`g \hat x` and of :math:`g`, one vector of d numbers each.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from laplace_debias.network.layers import Norm, has_rows_last, is_norm, is_transposed
from laplace_debias.network.unfold import conv_padding, last_first

__all__ = ["at_every_position", "layer_response", "norm_gradients", "norm_positions", "normalised"]


def normalised(layer: Norm, a: Tensor) -> Tensor:
    r"""What a normalisation scales, :math:`\hat x`, in evaluation mode.

    Args:
        layer: The normalisation.
        a: Its input.

    Returns:
        In the shape of the input.

    Example:
        >>> import torch
        >>> normalised(nn.LayerNorm(2, eps=0.0), torch.tensor([[1.0, 3.0]]))
        tensor([[-1.,  1.]])
    """
    if isinstance(layer, nn.LayerNorm):
        return F.layer_norm(a, layer.normalized_shape, eps=layer.eps)
    if isinstance(layer, nn.RMSNorm):
        return F.rms_norm(a, layer.normalized_shape, eps=layer.eps)
    if isinstance(layer, nn.GroupNorm):
        return F.group_norm(a, layer.num_groups, eps=layer.eps)
    return F.batch_norm(a, layer.running_mean, layer.running_var, training=False, eps=layer.eps)


def norm_positions(layer: nn.Module, t: Tensor) -> Tensor:
    """A tensor of a normalisation's data, its d entries apart from the positions.

    Args:
        layer: The normalisation.
        t: Its input, its output or a gradient of it: ``[n, ..., *normalized_shape]``, or
            ``[n, C, ...]``.

    Returns:
        ``[n, d, R]`` with R positions.

    Example:
        >>> import torch
        >>> norm_positions(nn.LayerNorm(4), torch.zeros(2, 7, 4)).shape
        torch.Size([2, 4, 7])
    """
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return t.reshape(len(t), -1, math.prod(layer.normalized_shape)).transpose(1, 2)
    return t.flatten(2) if t.ndim > 2 else t.unsqueeze(-1)


def norm_gradients(layer: nn.Module, role: str, g: Tensor, x_hat: Tensor | None) -> Tensor:
    r"""Gradients of each datum in a normalisation's scale or shift.

    :math:`\sum_t g_{nt} \hat x_{nt}` for the scale, :math:`\sum_t g_{nt}` for the shift.

    Args:
        layer: The normalisation.
        role: ``"weight"`` or ``"bias"``.
        g: Gradient of its output.
        x_hat: What it scaled, see :func:`normalised`; needed for the scale.

    Returns:
        ``[n, d]``.

    Example:
        >>> import torch
        >>> g, x_hat = torch.ones(1, 3, 2), torch.arange(6.0).view(1, 3, 2)
        >>> norm_gradients(nn.LayerNorm(2), "weight", g, x_hat)
        tensor([[6., 9.]])
    """
    terms = g if role == "bias" or x_hat is None else g * x_hat
    return norm_positions(layer, terms).sum(-1)


def at_every_position(layer: nn.Module, step: Tensor, like: Tensor) -> Tensor:
    """A step of a scale or shift, repeated at every position of a normalisation's output.

    Args:
        layer: The normalisation.
        step: In the shape of the parameter.
        like: The output, or a tensor of its shape.

    Returns:
        In the shape of ``like``.

    Example:
        >>> import torch
        >>> at_every_position(nn.BatchNorm1d(2), torch.tensor([1.0, 2.0]), torch.empty(1, 2, 3))
        tensor([[[1., 1., 1.], [2., 2., 2.]]])
    """
    if not isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        step = step.reshape(-1, *[1] * (like.ndim - 2))
    return step.expand(like.shape)


def layer_response(geometry: nn.Module, a: Tensor, dW: Tensor) -> Tensor:
    r"""How a layer's output rows answer to a step of its weight, :math:`\delta W a_t`.

    Args:
        geometry: A linear layer, a convolution (kernel, stride, padding) or a normalisation.
        a: The layer's input.
        dW: The step, in the weight's shape.

    Returns:
        In the shape of the layer's output.

    Example:
        >>> import torch
        >>> layer_response(nn.Linear(2, 1), torch.ones(3, 2), torch.tensor([[1.0, 2.0]])).T
        tensor([[3., 3., 3.]])
    """
    if has_rows_last(geometry):
        return F.linear(a, dW.T if is_transposed(geometry) else dW)
    if is_norm(geometry):
        return normalised(geometry, a) * at_every_position(geometry, dW, a)
    if not isinstance(geometry, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        raise TypeError(
            f"Expected a linear layer, a convolution or a normalisation, got "
            f"{type(geometry).__name__}. Remedy: record layers of these types only."
        )
    mode = "constant" if geometry.padding_mode == "zeros" else geometry.padding_mode
    image = F.pad(a, last_first(conv_padding(geometry)), mode=mode)
    conv = (F.conv1d, F.conv2d, F.conv3d)[dW.ndim - 3]
    return conv(image, dW, None, geometry.stride, 0, geometry.dilation, geometry.groups)
