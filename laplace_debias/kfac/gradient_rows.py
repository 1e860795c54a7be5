"""One backward pass per datum, and the rows that it brings to every layer.

Where each datum's part in an output factor has to be weighted after the pass, in several ways at
once, the rows themselves are handed over instead of their sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs
from laplace_debias.kfac.engine import Engine
from laplace_debias.kfac.grams import check_datum
from laplace_debias.kfac.row_counts import output_rows
from laplace_debias.network.calling import call_model
from laplace_debias.network.layers import is_kfac_layer
from laplace_debias.network.preserve import evaluation_mode
from laplace_debias.network.recorder import Recorder, check_outputs

__all__ = ["gradient_rows"]


def gradient_rows(
    engine: Engine, X: Inputs, vectors: Callable[[Tensor], Tensor]
) -> dict[tuple[nn.Module, ...], Tensor]:
    r"""Rows :math:`g = (\partial f_n / \partial s_{nt})^\top v_n` of every layer.

    B of a layer is the sum over data and rows of :math:`g g^\top`. The engine counts the passes.

    Args:
        engine: The engine, whose way to sum positions decides the rows.
        X: Inputs of n data.
        vectors: Turns the outputs ``[n, C]`` into one backward vector per datum, ``[n, C]``.

    Returns:
        Rows ``[n, r, d_out]`` for each set of layers that share a parameter (usually one layer).

    Raises:
        ValueError: If a layer does not see its data along the first dimension, or is never called.

    Example:
        >>> engine = Engine(nn.Linear(3, 2), "regression")
        >>> rows = gradient_rows(engine, torch.ones(5, 3), torch.ones_like)
        >>> [tuple(value.shape) for value in rows.values()], engine.cost.backward
        ([(5, 1, 2)], 5)
    """
    layers = engine.layers
    recorder = Recorder(layers)
    with engine.cost.stage("passes"), evaluation_mode(engine.root):
        x = X if engine.embed is None else engine.embed(X)
        with torch.enable_grad(), recorder.recording():
            f = check_outputs(call_model(engine.root, x))
        engine.check_called(recorder, outputs=True)
        n = len(f)
        calls = [call for layer in layers for call in recorder.calls[layer]]
        edges = [call.edge for call in calls if call.edge is not None]
        gradients = torch.autograd.grad(f, edges, vectors(f.detach()).to(f), allow_unused=True)
        parts: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers}
        for call, g in zip(calls, gradients, strict=True):
            if g is not None and is_kfac_layer(call.module):
                check_datum(len(g), n, type(call.module).__name__)
                parts[call.module].append(output_rows(call.module, g, engine.kfac_approx))
    engine.cost.forward += n
    engine.cost.backward += n
    found: dict[tuple[nn.Module, ...], Tensor] = {}
    for p in engine.owned:
        if p.layers not in found:
            rows = [part for layer in p.layers for part in parts[layer]]
            found[p.layers] = _joined(rows, p.layers[0], n, engine.kfac_approx == "expand")
    return found


def _joined(rows: list[Tensor], layer: nn.Module, n: int, expand: bool) -> Tensor:
    """The rows of all calls of a layer: further positions, or summands of one row."""
    if not rows:  # no output depends on the layer
        weight = layer.get_parameter("weight")
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return weight.new_zeros(n, 1, len(weight), dtype=dtype)
    return torch.cat(rows, dim=1) if expand else sum(rows[1:], rows[0])
