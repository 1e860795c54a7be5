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

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laplace_debias.kfac.shifts import n_positions, saves_work, shifted_gram

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


def conv_padding(layer: nn.Module) -> list[tuple[int, int]]:
    """Padding of a convolution before and after each spatial dimension.

    Args:
        layer: `Conv1d`, `Conv2d` or `Conv3d` with numeric, `"same"` or `"valid"` padding.

    Returns:
        `(before, after)` per dimension.

    Example:
        >>> conv_padding(nn.Conv2d(1, 1, (4, 3), padding="same"))
        [(1, 2), (1, 1)]
    """
    if layer.padding == "valid":
        return [(0, 0) for _ in layer.kernel_size]
    if layer.padding == "same":
        total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [(t // 2, t - t // 2) for t in total]
    return [(p, p) for p in layer.padding]


def conv_image(layer: nn.Module, x: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """The image that a convolution runs over: groups averaged, padded unless with zeros.

    Args:
        layer: `Conv1d`, `Conv2d` or `Conv3d` with any padding and groups.
        x: Its input `[n, C_in, *spatial]`.

    Returns:
        Image `[n, C_in / groups, *sizes]`, and the zeros still to be put before and after each
        dimension.

    Example:
        >>> layer = nn.Conv1d(4, 2, 3, padding=1, padding_mode="circular", groups=2)
        >>> image, pads = conv_image(layer, torch.ones(1, 4, 5))
        >>> image.shape, pads
        (torch.Size([1, 2, 7]), [(0, 0)])
    """
    if layer.groups > 1:
        x = x.unflatten(1, (layer.groups, -1)).mean(1)
    pads = conv_padding(layer)
    if layer.padding_mode != "zeros":
        x, pads = F.pad(x, _last_first(pads), mode=layer.padding_mode), [(0, 0) for _ in pads]
    return x, pads


def conv_windows(layer: nn.Module, x: Tensor) -> Tensor:
    """All patches that a convolution sees in an image, as a view.

    Args:
        layer: `Conv1d`, `Conv2d` or `Conv3d` with any stride and dilation.
        x: Image `[n, c, *sizes]`, padding included.

    Returns:
        View `[n, *positions, c, *kernel_size]`.

    Example:
        >>> x = torch.arange(5.0).reshape(1, 1, 5)
        >>> conv_windows(nn.Conv1d(1, 1, 2, stride=3), x).reshape(-1, 2)
        tensor([[0., 1.], [3., 4.]])
    """
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
        >>> input_mean(nn.Linear(2, 1), 2 * torch.ones(2, 4, 2))
        (tensor([[4., 4.], [4., 4.]]), 8)
    """
    x = x.to(accumulation_dtype(x.dtype))
    if isinstance(layer, nn.Linear):
        rows = x.reshape(-1, x.shape[-1])
        out = rows.new_empty(rows.shape[1], rows.shape[1])
        add_gram_(out, rows, alpha=1 / len(rows), beta=0.0)
        return mirror_(out), len(rows)

    x, pads = conv_image(layer, x)
    shape = layer.kernel_size, layer.dilation, pads, layer.stride
    if saves_work(x, *shape):
        n_rows = len(x) * prod(map(n_positions, x.shape[2:], *shape))
        return shifted_gram(x, *shape, slice_bytes=_SLICE_BYTES).div_(n_rows), n_rows

    windows = conv_windows(layer, F.pad(x, _last_first(pads)) if any(map(any, pads)) else x)
    n, d = windows.shape[0], len(layer.kernel_size)
    per_datum, d_in = prod(windows.shape[1 : 1 + d]), prod(windows.shape[1 + d :])
    # Columns first: then the innermost copy runs along the input's memory.
    columns = windows.permute(*range(1 + d, 2 + 2 * d), *range(1 + d))  # [C, *k, n, *positions]
    step = max(1, _SLICE_BYTES // (per_datum * d_in * windows.element_size()))
    out = windows.new_zeros(d_in, d_in)
    for start in range(0, n, step):
        part = columns.narrow(1 + d, start, min(step, n - start))
        rows = part.reshape(d_in, -1).T  # the only unfolded copy
        add_gram_(out, rows, alpha=1 / (n * per_datum))
    return mirror_(out), n * per_datum


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


def _last_first(pads: Sequence[tuple[int, int]]) -> list[int]:
    """Padding in the order of `torch.nn.functional.pad`."""
    return [p for pair in reversed(pads) for p in pair]
