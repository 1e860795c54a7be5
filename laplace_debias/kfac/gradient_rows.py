"""One backward pass per datum, and the rows that it brings to every layer.

Where each datum's part in an output factor has to be weighted after the pass, in several ways at
once, the rows themselves are handed over instead of their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs
from laplace_debias.kfac.few_rows import check_datum
from laplace_debias.kfac.interface import EngineInterface
from laplace_debias.kfac.norms import norm_rows
from laplace_debias.kfac.row_counts import output_rows
from laplace_debias.network.calling import call_model
from laplace_debias.network.layers import is_kfac_layer, is_norm, n_out
from laplace_debias.network.ownership import OwnedParameter, RowsKey, rows_key
from laplace_debias.network.preserve import evaluation_mode
from laplace_debias.network.recorder import LayerCall, Recorder, check_outputs
from laplace_debias.network.responses import normalised

__all__ = ["gradient_rows"]


def gradient_rows(
    engine: EngineInterface, X: Inputs, vectors: Callable[[Tensor], Tensor]
) -> Iterator[dict[RowsKey, Tensor]]:
    r"""Rows :math:`g = (\partial f_n / \partial s_{nt})^\top v_n` of every layer.

    B of a layer is the sum over data and rows of :math:`g g^\top`. The engine counts the passes.

    Args:
        engine: The engine, whose way to sum positions decides the rows.
        X: Inputs of n data.
        vectors: Turns the outputs ``[n, C]`` into k backward vectors per datum, ``[k, n, C]``. They
            share the forward pass.

    Returns:
        For each of the k vectors, made when it is asked for, rows ``[n, r, d_out]`` for each set of
        layers that share a parameter (usually one layer), and ``[n, 1, d]`` for each scale and
        shift of normalisations, by :func:`rows_key`.

    Raises:
        ValueError: If a layer does not see its data along the first dimension, or is never called.

    Example:
        >>> from laplace_debias.kfac.engine import Engine
        >>> engine = Engine(nn.Linear(3, 2), "regression")
        >>> (rows,) = gradient_rows(engine, torch.ones(5, 3), lambda f: torch.ones(1, 5, 2))
        >>> [tuple(value.shape) for value in rows.values()], engine.cost.backward
        ([(5, 1, 2)], 5)
    """
    layers = engine.layers
    x_hats: dict[nn.Module, list[Tensor]] = {}

    def on_input(layer: nn.Module, geometry: nn.Module, a: Tensor) -> None:
        if is_norm(layer):
            x_hats.setdefault(layer, []).append(normalised(layer, a).detach())

    recorder = Recorder(layers, on_input=on_input)
    with engine.cost.stage("passes"), evaluation_mode(engine.root):
        x = X if engine.embed is None else engine.embed(X)
        with torch.enable_grad(), recorder.recording():
            f = check_outputs(call_model(engine.root, x))
        engine.check_called(recorder, outputs=True)
        V = vectors(f.detach()).to(f)
    engine.cost.forward += len(f)
    calls = [call for layer in layers for call in recorder.calls[layer]]
    return (_backward(engine, f, v, calls, x_hats, retain=i + 1 < len(V)) for i, v in enumerate(V))


def _backward(
    engine: EngineInterface,
    f: Tensor,
    v: Tensor,
    calls: list[LayerCall],
    x_hats: dict[nn.Module, list[Tensor]],
    *,
    retain: bool,
) -> dict[RowsKey, Tensor]:
    """Rows of one vector per datum; the graph stays if there are more to come."""
    n, layers = len(f), engine.layers
    with engine.cost.stage("passes"), evaluation_mode(engine.root):
        edges = [call.edge for call in calls if call.edge is not None]
        gradients = torch.autograd.grad(f, edges, v, allow_unused=True, retain_graph=retain)
        parts: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers}
        of_call: dict[nn.Module, list[Tensor | None]] = {layer: [] for layer in layers}
        for call, g in zip(calls, gradients, strict=True):
            of_call[call.module].append(g)
            if g is not None and is_kfac_layer(call.module):
                check_datum(len(g), n, type(call.module).__name__)
                parts[call.module].append(output_rows(call.module, g, engine.kfac_approx))
    engine.cost.backward += n
    found: dict[RowsKey, Tensor] = {}
    for p in engine.owned:
        if p.scales:
            total = norm_rows(p, of_call, x_hats, n)
            rows = [] if total is None else [total.unsqueeze(1)]
        else:
            rows = [part for layer in p.layers for part in parts[layer]]
        if rows_key(p) not in found:
            found[rows_key(p)] = _joined(rows, p, n, engine.kfac_approx == "expand")
    return found


def _joined(rows: list[Tensor], p: OwnedParameter, n: int, expand: bool) -> Tensor:
    """The rows of all calls of a layer: further positions, or summands of one row."""
    if not rows:  # no output depends on the layer
        layer = p.layers[0]
        own = layer.get_parameter(p.role)
        d = n_out(layer) if is_kfac_layer(layer) else own.numel()
        return own.new_zeros(n, 1, d, dtype=torch.promote_types(own.dtype, torch.float32))
    if len(rows) == 1:
        return rows[0]
    return torch.cat(rows, dim=1) if expand else sum(rows[1:], rows[0])
