"""One backward pass per datum, and the rows that it brings to every layer.

Where each datum's part in an output factor has to be weighted after the pass, in several ways at
once, the rows themselves are handed over instead of their sum. They have to be told apart by their
data: where a layer's first dimension does not run over the data (some are routed past it, data are
merged with positions, positions come first, or data are sorted inside), each datum passes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laplace_debias.data.inputs import Inputs, Keys, size_of, take
from laplace_debias.kfac.interface import EngineInterface
from laplace_debias.kfac.norms import norm_rows
from laplace_debias.kfac.row_counts import output_rows
from laplace_debias.network.calling import call_model
from laplace_debias.network.check import derivatives, random_steps
from laplace_debias.network.layers import is_kfac_layer, is_norm, n_out
from laplace_debias.network.ownership import OwnedParameter, RowsKey, rows_key
from laplace_debias.network.preserve import evaluation_mode
from laplace_debias.network.recorder import LayerCall, Recorder, check_outputs, inner_product
from laplace_debias.network.responses import normalised

__all__ = ["gradient_rows", "tells_data_apart"]

XHats = dict[nn.Module, list[Tensor]]
N_CODES = 4
CODES = tuple(combinations(range(N_CODES), 2))
"""In which backward passes each of six data takes part: no two in the same, none in more."""


def gradient_rows(
    engine: EngineInterface,
    X: Inputs,
    vectors: Callable[[Tensor], Tensor],
    key: Keys = "input_ids",
    *,
    alone: bool = False,
) -> Iterator[dict[RowsKey, Tensor]]:
    r"""Rows :math:`g = (\partial f_n / \partial s_{nt})^\top v_n` of every layer.

    B of a layer is the sum over data and rows of :math:`g g^\top`. The engine counts the passes.

    Args:
        engine: The engine, whose way to sum positions decides the rows.
        X: Inputs of n data.
        vectors: Turns the outputs ``[n, C]`` into k backward vectors per datum, ``[k, n, C]``. They
            share the forward pass.
        key: Which entries of a mapping run over the data.
        alone: Whether each datum has to pass alone, see :func:`tells_data_apart`. So it does where
            a layer's first dimension is not n.

    Returns:
        For each of the k vectors, made when it is asked for, rows ``[n, r, d_out]`` for each set of
        layers that share a parameter (usually one layer), and ``[n, 1, d]`` for each scale and
        shift of normalisations, by :func:`rows_key`. Rows of zeros where a datum has fewer.

    Raises:
        ValueError: If a layer is never called.

    Example:
        >>> from laplace_debias.kfac.engine import Engine
        >>> engine = Engine(nn.Linear(3, 2), "regression")
        >>> (rows,) = gradient_rows(engine, torch.ones(5, 3), lambda f: torch.ones(1, 5, 2))
        >>> [tuple(value.shape) for value in rows.values()], engine.cost.backward
        ([(5, 1, 2)], 5)
    """
    x = _embedded(engine, X)
    f, calls, x_hats = _forward(engine, x)
    with engine.cost.stage("passes"):
        V = vectors(f.detach()).to(f)
    engine.cost.forward += len(f)
    if alone or any(call.shape[0] != len(f) for call in calls if is_kfac_layer(call.module)):
        del f, calls, x_hats
        return _one_by_one(engine, x, V, key)
    return (_backward(engine, f, v, calls, x_hats, retain=i + 1 < len(V)) for i, v in enumerate(V))


def tells_data_apart(engine: EngineInterface, X: Inputs, key: Keys = "input_ids") -> bool:
    """Whether the first dimension of every layer runs over a few data, in their order.

    Args:
        engine: The engine; this pass is not counted, as it serves no factor.
        X: Inputs of n data.
        key: Which entries of a mapping run over the data.

    Returns:
        Whether rows are those of the data whose number they have.

    Example:
        >>> from laplace_debias.kfac.engine import Engine
        >>> tells_data_apart(Engine(nn.Linear(3, 2), "regression"), torch.ones(5, 3))
        True
    """
    few = take(X, slice(0, min(size_of(X, key), len(CODES))), key)
    f, calls, _ = _forward(engine, _embedded(engine, few))
    calls = [call for call in calls if is_kfac_layer(call.module)]
    edges = [call.edge for call in calls if call.edge is not None]
    if any(call.shape[0] != len(f) for call in calls):
        return False
    (v,) = random_steps([f])
    with evaluation_mode(engine.root):
        for number in range(N_CODES):  # rows of data that take no part must have no gradient
            silent = torch.tensor([number not in code for code in CODES[: len(f)]])
            part = v.clone()
            part[silent.to(v.device)] = 0.0
            gradients = derivatives(f, edges, part, retain_graph=number + 1 < N_CODES)
            if any(g is not None and bool(g[silent.to(g.device)].any()) for g in gradients):
                return False
    return True


def _embedded(engine: EngineInterface, X: Inputs) -> Inputs:
    """What the engine's network takes."""
    with engine.cost.stage("passes"), evaluation_mode(engine.root):
        return X if engine.embed is None else engine.embed(X)


def _forward(engine: EngineInterface, x: Inputs) -> tuple[Tensor, list[LayerCall], XHats]:
    """Outputs, the calls of all layers, and what normalisations scale."""
    x_hats: XHats = {}

    def on_input(layer: nn.Module, geometry: nn.Module, a: Tensor) -> None:
        if is_norm(layer):
            x_hats.setdefault(layer, []).append(normalised(layer, a).detach())

    recorder = Recorder(engine.layers, on_input=on_input)
    with engine.cost.stage("passes"), evaluation_mode(engine.root):
        with torch.enable_grad(), recorder.recording():
            f = check_outputs(call_model(engine.root, x))
        engine.check_called(recorder, outputs=True)
    return f, [call for layer in engine.layers for call in recorder.calls[layer]], x_hats


def _one_by_one(
    engine: EngineInterface, x: Inputs, V: Tensor, key: Keys
) -> Iterator[dict[RowsKey, Tensor]]:
    """Rows of all vectors, from passes of one datum each: its own, however a layer has them."""
    found: list[list[dict[RowsKey, Tensor]]] = [[] for _ in V]
    for i in range(V.shape[1]):
        f, calls, x_hats = _forward(engine, take(x, slice(i, i + 1), key))
        for k, v in enumerate(V[:, i : i + 1]):
            rows = _backward(engine, f, v, calls, x_hats, retain=k + 1 < len(V))
            found[k].append(rows)
    for parts in found:
        joined = {}
        for name in parts[0]:
            longest = max(part[name].shape[1] for part in parts)
            joined[name] = torch.cat(
                [F.pad(part[name], (0, 0, 0, longest - part[name].shape[1])) for part in parts]
            )
        yield joined


def _backward(
    engine: EngineInterface,
    f: Tensor,
    v: Tensor,
    calls: list[LayerCall],
    x_hats: XHats,
    *,
    retain: bool,
) -> dict[RowsKey, Tensor]:
    """Rows of one vector per datum; the graph stays if there are more to come."""
    n, layers, expand = len(f), engine.layers, engine.kfac_approx == "expand"
    with engine.cost.stage("passes"), evaluation_mode(engine.root):
        edges = [call.edge for call in calls if call.edge is not None]
        gradients = torch.autograd.grad(
            inner_product(v, f), edges, allow_unused=True, retain_graph=retain
        )
        parts: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers}
        of_call: dict[nn.Module, list[Tensor | None]] = {layer: [] for layer in layers}
        for call, g in zip(calls, gradients, strict=True):
            of_call[call.module].append(g)
            if g is not None and is_kfac_layer(call.module):
                rows = output_rows(call.module, g, engine.kfac_approx)
                if len(rows) != n:  # one datum alone: all of them are its own
                    rows = rows.reshape(1, -1, rows.shape[-1])
                    rows = rows if expand else rows.sum(1, keepdim=True)
                parts[call.module].append(rows)
    engine.cost.backward += n
    found: dict[RowsKey, Tensor] = {}
    for p in engine.owned:
        if p.scales:
            total = norm_rows(p, of_call, x_hats, n)
            own = [] if total is None else [total.unsqueeze(1)]
        else:
            own = [part for layer in p.layers for part in parts[layer]]
        if rows_key(p) not in found:
            found[rows_key(p)] = _joined(own, p, n, expand)
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
