"""What K-FAC-expand needs of one layer: Gram matrices of its inputs and output gradients.

A layer with weight `W` (`[d_out, d_in]`; for a convolution `d_in = C_in / groups * k_1 * ... *
k_d`) maps rows to rows, `s = W a`, once for each datum and position (token, pixel). K-FAC-expand
sums the outer products of rows over data and positions::

    A_sum = sum_r a_r a_r^T    [d_in, d_in]        B = sum_r g_r g_r^T    [d_out, d_out]

where `g_r` is the gradient with respect to row `r` of the output.

A grouped convolution has one input row per group. Like curvlinops, we average those rows over the
groups before the outer product, and keep one B for all output channels together.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SUPPORTED_LAYERS = (nn.Linear, *CONVOLUTIONS)

# An unfolded convolution input is copied in slices of about this size, so that memory stays
# bounded.
_SLICE_BYTES = 2**26
# Above this dimension a Gram matrix is built in halves, which skips its redundant upper triangle.
_HALVE_ABOVE = 384


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Floating point type in which Gram matrices are summed: at least single precision.

    Args:
        dtype: Type of the activations or gradients.

    Returns:
        `torch.float32` for half-precision types, `dtype` itself otherwise.

    Example:
        >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def add_gram_(out: Tensor, rows: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> None:
    """Set the lower triangle of `out` to `beta * out + alpha * rows^T rows`.

    The matrix is split into halves recursively: the two diagonal blocks, and the block below them.
    Large Gram matrices so cost little more than half of the full product. Above the diagonal `out`
    is undefined until `mirror_`.

    Args:
        out: Square matrix `[d, d]`, changed in place.
        rows: Matrix `[r, d]`, of any strides.
        alpha: Factor of the product.
        beta: Factor of what was there before; with 0 it may be uninitialised.

    Example:
        >>> rows, out = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.empty(2, 2)
        >>> add_gram_(out, rows, alpha=0.5, beta=0.0)
        >>> out.tril()
        tensor([[ 5.,  0.], [ 7., 10.]])
    """
    d = rows.shape[1]
    if d <= _HALVE_ABOVE:
        out.addmm_(rows.T, rows, alpha=alpha, beta=beta)
        return
    h = d // 2
    add_gram_(out[:h, :h], rows[:, :h], alpha=alpha, beta=beta)
    add_gram_(out[h:, h:], rows[:, h:], alpha=alpha, beta=beta)
    out[h:, :h].addmm_(rows[:, h:].T, rows[:, :h], alpha=alpha, beta=beta)


def mirror_(out: Tensor) -> Tensor:
    """Complete in place what `add_gram_` has built, block by block.

    Args:
        out: Square matrix `[d, d]` from `add_gram_`.

    Returns:
        The same matrix, symmetric.

    Example:
        >>> out = torch.empty(500, 500)
        >>> add_gram_(out, torch.ones(2, 500), beta=0.0)
        >>> bool((mirror_(out) == 2).all())
        True
    """
    d = len(out)
    if d > _HALVE_ABOVE:
        h = d // 2
        mirror_(out[:h, :h])
        mirror_(out[h:, h:])
        out[:h, h:] = out[h:, :h].T
    return out


def conv_padding(layer: nn.Module) -> list[int]:
    """Padding of a convolution in the order of `torch.nn.functional.pad`, last dimension first.

    Args:
        layer: `Conv1d`, `Conv2d` or `Conv3d` with numeric, `"same"` or `"valid"` padding.

    Returns:
        `[left, right]` of the last spatial dimension, then of the one before it, and so on.

    Example:
        >>> conv_padding(nn.Conv2d(1, 1, (4, 3), padding="same"))
        [1, 1, 1, 2]
    """
    pads: list[int] = []
    for i in reversed(range(len(layer.kernel_size))):
        if layer.padding == "same":
            total = layer.dilation[i] * (layer.kernel_size[i] - 1)
            pads += [total // 2, total - total // 2]
        elif layer.padding == "valid":
            pads += [0, 0]
        else:
            pads += [layer.padding[i]] * 2
    return pads


def conv_windows(layer: nn.Module, x: Tensor) -> Tensor:
    """All patches that a convolution sees, as a view.

    Args:
        layer: `Conv1d`, `Conv2d` or `Conv3d` with any stride, padding, dilation and groups.
        x: Its input `[n, C_in, *spatial]`.

    Returns:
        View `[n, *positions, C_in / groups, *kernel_size]`.

    Example:
        >>> x = torch.arange(5.0).reshape(1, 1, 5)
        >>> conv_windows(nn.Conv1d(1, 1, 2, stride=3), x).reshape(-1, 2)
        tensor([[0., 1.], [3., 4.]])
    """
    if layer.groups > 1:
        x = x.unflatten(1, (layer.groups, -1)).mean(1)  # [n, C_in / groups, *spatial]
    pads = conv_padding(layer)
    if any(pads):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, pads, mode=mode)
    n, c, *sizes = x.shape
    s_n, s_c, *steps = x.stride()
    k, d, s = layer.kernel_size, layer.dilation, layer.stride
    positions = [(sizes[i] - d[i] * (k[i] - 1) - 1) // s[i] + 1 for i in range(len(k))]
    return x.as_strided(
        (n, *positions, c, *k),
        (
            s_n,
            *(step * si for step, si in zip(steps, s, strict=True)),
            s_c,
            *(step * di for step, di in zip(steps, d, strict=True)),
        ),
    )


def input_mean(layer: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """Mean over data and positions of `a a^T` of a layer's input rows, and the number of rows.

    Args:
        layer: `Linear`, `Conv1d`, `Conv2d` or `Conv3d`.
        x: The layer's input: `[n, ..., d_in]`, or `[n, C_in, *spatial]`.

    Returns:
        A, `[d_in, d_in]`, in at least single precision, and the number of rows.

    Example:
        >>> input_mean(nn.Linear(2, 1), 2 * torch.ones(3, 4, 2))
        (tensor([[4., 4.], [4., 4.]]), 12)
    """
    x = x.to(accumulation_dtype(x.dtype))
    if isinstance(layer, nn.Linear):
        rows = x.reshape(-1, x.shape[-1])
        out = rows.new_empty(rows.shape[1], rows.shape[1])
        add_gram_(out, rows, alpha=1 / len(rows), beta=0.0)
        return mirror_(out), len(rows)

    windows = conv_windows(layer, x)
    n, d = windows.shape[0], len(layer.kernel_size)
    n_positions, d_in = prod(windows.shape[1 : 1 + d]), prod(windows.shape[1 + d :])
    # Columns first: then the innermost copy runs along the input's memory.
    columns = windows.permute(*range(1 + d, 2 + 2 * d), *range(1 + d))  # [C, *k, n, *positions]
    step = max(1, _SLICE_BYTES // (n_positions * d_in * windows.element_size()))
    out = windows.new_zeros(d_in, d_in)
    for start in range(0, n, step):
        part = columns.narrow(1 + d, start, min(step, n - start))
        rows = part.reshape(d_in, -1).T  # the only unfolded copy
        add_gram_(out, rows, alpha=1 / (n * n_positions))
    return mirror_(out), n * n_positions


def add_gradient_gram_(out: Tensor, layer: nn.Module, g: Tensor) -> None:
    """Add the sum over data and positions of `g g^T`, to be completed by `mirror_`.

    Args:
        out: B so far, `[d_out, d_out]`, changed in place.
        layer: `Linear`, `Conv1d`, `Conv2d` or `Conv3d`.
        g: Gradients of the layer's output, `[n, ..., d_out]` or `[n, d_out, *positions]`.

    Example:
        >>> B = torch.zeros(2, 2)
        >>> add_gradient_gram_(B, nn.Conv1d(1, 2, 1), torch.ones(3, 2, 5))
        >>> B
        tensor([[15., 15.], [15., 15.]])
    """
    g = g.to(out.dtype)
    if isinstance(layer, nn.Linear):
        rows = g.reshape(-1, g.shape[-1])
    else:
        rows = g.transpose(0, 1).reshape(g.shape[1], -1).T  # [n * positions, d_out]
    add_gram_(out, rows)
