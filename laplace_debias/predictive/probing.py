"""Run a model once and take layer inputs and per-class output gradients from it.

A parameter tensor can be taken apart when every use of it in the graph is a call of an ordinary
``nn.Linear``, ``nn.Conv2d`` or normalisation that owns it, and when every such call keeps the data
apart along one dimension. Both are checked, not assumed: uses are counted in the autograd graph,
and the dimension of the data is found by comparing a run of one datum with a run of two.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs, Keys, size_of, take
from laplace_debias.network.calling import call_model, classes_last, flat_outputs
from laplace_debias.network.layers import Norm, is_norm
from laplace_debias.network.ownership import is_ordinary
from laplace_debias.network.recorder import LayerCall, Recorder, check_outputs, count_uses
from laplace_debias.network.remembered import question_of, recall, remember
from laplace_debias.network.responses import norm_positions, normalised
from laplace_debias.network.unfold import patches

__all__ = [
    "Capture",
    "call_gradients",
    "call_inputs",
    "call_normalised",
    "data_dims",
    "is_recorded",
    "per_datum_jacobians",
    "run",
]


Source = tuple[LayerCall, "int | None"]


@dataclass(frozen=True)
class Capture:
    """What one run of the model leaves behind.

    Attributes:
        f: Model outputs ``[n, C]``, attached to the graph; those of all positions in one row.
        shape: Their shape with positions, ``[n, *positions, C]``.
        calls: The calls of every recorded layer, in order.
        uses: How often the graph uses each parameter, by ``id``.
    """

    f: Tensor
    shape: torch.Size
    calls: dict[nn.Module, list[LayerCall]]
    uses: Counter[int]


def run(model: nn.Module, x: Inputs, modules: list[nn.Module], keep_graph: bool = False) -> Capture:
    """Run the model and record the calls of the given layers.

    Args:
        model: The model, in evaluation mode with gradients on.
        x: A tensor or a mapping of tensors.
        modules: The layers to record.
        keep_graph: Keep the layer inputs attached, to differentiate through them.

    Returns:
        Outputs, calls and uses.

    Raises:
        ValueError: If the model's output has no dimension for the data.

    Example:
        >>> net = nn.Linear(2, 3)
        >>> capture = run(net, torch.ones(4, 2), [net])
        >>> len(capture.calls[net]), capture.uses[id(net.weight)]
        (1, 1)
    """
    recorder = Recorder(modules, keep_inputs=True, keep_graph=keep_graph)
    with recorder.recording():
        raw = check_outputs(call_model(model, x))
    f = flat_outputs(raw)
    return Capture(f, classes_last(raw).shape, recorder.calls, count_uses(f))


def is_recorded(module: nn.Module) -> bool:
    """Whether a recorder tells what a module does with its parameters.

    Args:
        module: Any module.

    Returns:
        True for ordinary layers, and for ``nn.Linear`` and ``nn.Conv2d`` with a ``forward`` of
        their own, into which a recorder looks.

    Example:
        >>> class Padded(nn.Conv2d):
        ...     def forward(self, x):
        ...         return nn.functional.conv2d(nn.functional.pad(x, (0, 1)), self.weight)
        >>> is_recorded(Padded(1, 1, 2)), is_recorded(nn.Tanh())
        (True, False)
    """
    return is_ordinary(module) or isinstance(module, nn.Linear | nn.Conv2d)


def call_inputs(call: LayerCall, n: int, dim: int | None, rows: slice) -> Tensor:
    """The inputs (patches of a convolution) that a layer saw for some data.

    Args:
        call: The call, its input kept.
        n: Number of data in the call.
        dim: Dimension of the input that runs over them, ``None`` for a single datum.
        rows: Which data.

    Returns:
        Inputs ``[m, R, groups, d_in]``.

    Raises:
        RuntimeError: If the input was not kept, or changed in place after the call.
    """
    x = _unchanged_input(call)
    if isinstance(call.geometry, nn.Conv2d):
        if len(x) == n:
            return patches(x[rows], call.geometry)
        return patches(x, call.geometry).flatten(0, 1).unsqueeze(0)  # a single datum
    a = x if dim is None else x.movedim(dim, 0)
    return a.reshape(n, -1, 1, a.shape[-1])[rows]


def call_normalised(call: LayerCall, layer: Norm, n: int, dim: int | None) -> Tensor:
    """What a normalisation scaled for each datum.

    Args:
        call: The call, its input kept.
        layer: The normalisation.
        n: Number of data in the call.
        dim: See :func:`call_inputs`.

    Returns:
        ``[n, d, R]``.

    Raises:
        RuntimeError: If the input was not kept, or changed in place after the call.
    """
    return _norm_rows(layer, normalised(layer, _unchanged_input(call)), n, dim)


def _unchanged_input(call: LayerCall) -> Tensor:
    """The input of a call, if it still is what the layer saw."""
    x = call.kept_input
    if x._version != call.version:
        raise RuntimeError(
            f"Expected the input of {call.module} to stay as it was, got one that the model "
            "changed in place after the layer used it. Remedy: replace the in-place operation."
        )
    return x


def _norm_rows(layer: nn.Module, t: Tensor, n: int, dim: int | None) -> Tensor:
    """A tensor of a normalisation as ``[n, d, R]``; a single datum may fill several rows."""
    rows = norm_positions(layer, t if dim is None else t.movedim(dim, 0))
    return rows if len(rows) == n else rows.transpose(0, 1).reshape(n, rows.shape[1], -1)


def call_gradients(call: LayerCall, g: Tensor, n: int, dim: int | None) -> Tensor:
    """Bring a gradient of a layer's output to ``[n, d_out, R]``.

    Args:
        call: The call.
        g: The gradient, in the shape of the output.
        n: Number of data in the call.
        dim: See :func:`call_inputs`.
    """
    if is_norm(call.module):
        return _norm_rows(call.module, g, n, dim)
    if isinstance(call.geometry, nn.Conv2d):
        g = g.flatten(2)  # [n, d_out, R]
        return g if len(g) == n else g.transpose(0, 1).reshape(n, g.shape[1], -1)
    g = g if dim is None else g.movedim(dim, 0)
    return g.reshape(n, -1, g.shape[-1]).transpose(1, 2)


def data_dims(
    model: nn.Module, x: Inputs, modules: list[nn.Module], key: Keys
) -> dict[nn.Module, list[int | None]]:
    """Find the dimension that runs over the data, for every call of every layer.

    A run of one datum is compared with a run of two: the dimension is the one that grows from
    1 to 2. ``None`` where there is no such dimension (data merged with positions, or inputs that
    do not depend on the data).
    """
    question = question_of("dimensions", x, key, tuple(map(id, modules)))
    known: dict[nn.Module, list[int | None]] | None = recall(model, question, x)
    if known is not None:
        return known
    one = run(model, take(x, slice(0, 1), key), modules).calls
    two = run(model, take(x, slice(0, 2), key), modules).calls
    dims: dict[nn.Module, list[int | None]] = {}
    for module in modules:
        dims[module] = []
        for p, q in zip(one[module], two[module], strict=False):
            sizes = list(zip(p.kept_input.shape, q.kept_input.shape, strict=False))
            grown = [i for i, (u, v) in enumerate(sizes) if u != v]
            same = p.kept_input.ndim == q.kept_input.ndim
            single = same and [sizes[i] for i in grown] == [(1, 2)]
            dims[module].append(grown[0] if single else None)
    remember(model, question, x, dims)
    return dims


def per_datum_jacobians(
    model: nn.Module,
    x: Inputs,
    params: list[Tensor],
    key: Keys,
    keep_graph: bool = False,
    classes: Tensor | None = None,
) -> list[Tensor]:
    """Return exact Jacobians ``[n, m, D]`` of some parameters, one datum and output at a time.

    The slow way that works for anything autograd can differentiate. Of all outputs, unless
    ``classes [n, m]`` names some for each datum.
    """
    rows: list[list[Tensor]] = [[] for _ in params]
    n = size_of(x, key)
    for i in range(n):
        f = flat_outputs(call_model(model, take(x, slice(i, i + 1), key))).reshape(-1)
        for c in range(len(f)) if classes is None else classes[i].tolist():
            grads = torch.autograd.grad(
                f[c], params, retain_graph=True, create_graph=keep_graph, allow_unused=True
            )
            for row, g, p in zip(rows, grads, params, strict=True):
                row.append((torch.zeros_like(p) if g is None else g).flatten())
    return [torch.stack(row).unflatten(0, (n, -1)) for row in rows]
