r"""Verified, not assumed: do the recorded rows explain all that the parameters do?

K-FAC takes a layer's input rows :math:`a_t` and the gradients :math:`g_t` of its output rows for
its whole influence on the outputs. With random backward vectors :math:`v` and a random step
:math:`(\delta W, \delta b)` in the parameters, that says

.. math:: \langle v, J_W\, \delta W \rangle = \sum_t \langle g_t, \delta W a_t \rangle, \qquad
          \langle v, J_b\, \delta b \rangle = \sum_t \langle g_t, \delta b \rangle,

for each parameter. The left-hand sides are derivatives of the *whole* network: one backward pass to
the parameters gives all of them at once, so that those which do not agree have a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from laplace_debias.data.inputs import Inputs
from laplace_debias.network.calling import call_model
from laplace_debias.network.layers import has_own_forward, is_norm
from laplace_debias.network.ownership import OwnedParameter
from laplace_debias.network.preserve import devices_of, differentiable
from laplace_debias.network.recorder import LayerCall, Recorder, check_outputs, inner_product
from laplace_debias.network.responses import at_every_position, layer_response

__all__ = [
    "RowCheck",
    "agree",
    "check_rows",
    "derivatives",
    "likely_cause",
    "random_steps",
]

N_CHECKED = 3
"""Number of data that are looked at: two to be told apart, and one to see what three do."""
_SEED = 2410_14325


@dataclass(frozen=True)
class RowCheck:
    """What a pass of a few data showed.

    Attributes:
        calls: The calls of every layer.
        unreached: Parameters whose layers were not called.
        detached: Parameters whose layers ran without gradients, or in vain in some of their calls.
        unexplained: Parameters whose influence the rows do not explain.
        mixed: Scales and shifts whose layers do not see the data along their first dimension.
        n_outputs: Number of outputs.
    """

    calls: dict[nn.Module, list[LayerCall]]
    unreached: tuple[str, ...]
    detached: tuple[str, ...]
    unexplained: tuple[str, ...]
    mixed: tuple[str, ...]
    n_outputs: int


def random_steps(shapes: Sequence[Tensor]) -> list[Tensor]:
    """Standard normal numbers in the shapes of some tensors, always the same.

    Args:
        shapes: The tensors.

    Returns:
        Tensors like them; no generator of the user's is touched.

    Example:
        >>> one, two = (random_steps([torch.empty(2, 3)])[0] for _ in range(2))
        >>> one.shape, bool((one == two).all())
        (torch.Size([2, 3]), True)
    """
    generator = torch.Generator().manual_seed(_SEED)
    return [torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device) for t in shapes]


def agree(one: Tensor, two: Tensor, scale: Tensor | None = None) -> bool:
    """Whether two tensors are equal up to what rounding can explain.

    Args:
        one: A tensor.
        two: Another one.
        scale: Size of the numbers that were added up; by default of the larger tensor.

    Returns:
        Whether they differ by at most a root of the precision, in units of the scale.

    Example:
        >>> agree(torch.ones(2), torch.ones(2) + 1e-6), agree(torch.ones(2), torch.zeros(2))
        (True, False)
    """
    if one.shape != two.shape:
        return False
    finite = one.isfinite()
    if not torch.equal(finite, two.isfinite()):
        return False
    one, two = one[finite], two[finite]
    if not one.numel():  # NaN or Inf in both: not for this comparison to judge
        return True
    if scale is None:
        scale = torch.maximum(one.abs().max(), two.abs().max())
    return bool((one - two).abs().max() <= torch.finfo(one.dtype).eps ** 0.5 * scale)


def derivatives(
    f: Tensor,
    places: Sequence[Tensor | GradientEdge],
    v: Tensor,
    retain_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients of ``<v, f>``, parameters included, with an error that says what to do.

    Args:
        f: Outputs, attached to their graph.
        places: Parameters and edges of the graph.
        v: Backward vectors, in the shape of ``f``.
        retain_graph: Whether the graph serves further derivatives.

    Returns:
        One gradient per place, ``None`` where the outputs do not depend on it.

    Raises:
        RuntimeError: If autograd cannot differentiate the model.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> derivatives(3 * w, [w], torch.ones(2))
        (tensor([3., 3.]),)
    """
    try:
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            inner_product(v, f), cast(Any, places), retain_graph=retain_graph, allow_unused=True
        )
        return found
    except RuntimeError as error:
        raise RuntimeError(
            f"Expected a model that autograd can differentiate, got: {error} Remedy: replace "
            "operations that change a layer's input in place, and `use_reentrant=True`."
        ) from error


def check_rows(model: nn.Module, x: Inputs, owned: Sequence[OwnedParameter]) -> RowCheck:
    """Compare what the recorded rows say with derivatives of the whole network.

    One forward and one backward pass of the data in ``x``. The network is left as found.

    Args:
        model: The network.
        x: Inputs of a few data.
        owned: Its Bayesian parameters.

    Returns:
        Which parameters are explained, and which are not.

    Example:
        >>> from laplace_debias.network.ownership import owned_parameters
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> check_rows(net, torch.randn(2, 3), owned_parameters(net)).unexplained
        ()
    """
    params = [p.tensor for p in owned]
    steps = random_steps(params)
    by_layer: dict[nn.Module, list[int]] = {}
    for i, p in enumerate(owned):
        for layer in p.layers:
            by_layer.setdefault(layer, []).append(i)
    moved: dict[nn.Module, list[dict[int, Tensor | None]]] = {layer: [] for layer in by_layer}
    whole = {layer for p in owned if p.has_one_factor for layer in p.layers}
    in_layer = steps  # the steps of what layers compute with

    def on_input(layer: nn.Module, geometry: nn.Module, a: Tensor) -> None:
        said: dict[int, Tensor | None] = {}
        for i in by_layer[layer]:
            try:  # a layer that changes the shape of its input is one to name, not to fall over
                step = in_layer[i]
                if owned[i].role == "weight":
                    said[i] = layer_response(geometry, a, step)
                else:
                    said[i] = at_every_position(layer, step, a) if is_norm(layer) else step
            except RuntimeError:
                said[i] = None
        moved[layer].append(said)

    recorder = Recorder(by_layer, on_input=on_input)
    with differentiable(model, params), torch.random.fork_rng(devices_of(params)):
        in_layer = [p.effective_step(step) for p, step in zip(owned, steps, strict=True)]
        with recorder.recording():
            f = check_outputs(call_model(model, x))
        calls = [call for layer in by_layer for call in recorder.calls[layer] if call.edge]
        edges = [call.edge for call in calls if call.edge is not None]
        (v,) = random_steps([f])
        grads: Sequence[Tensor | None] = [None] * (len(edges) + len(params))
        mixed: set[nn.Module] = set()
        if f.requires_grad:
            mixed = _mixed_layers(f, v, [call for call in calls if call.module in whole])
            grads = derivatives(f, [*edges, *params], v)
    g_of = {id(call): g for call, g in zip(calls, grads, strict=False)}
    unreached, detached, unexplained = [], [], []
    for i, p in enumerate(owned):
        own = [(call, n) for layer in p.layers for n, call in enumerate(recorder.calls[layer])]
        grad = grads[len(edges) + i]
        used = {g_of.get(id(call)) is not None for call, _ in own}
        if any(call.edge is None for call, _ in own) or len(used) == 2:
            detached.append(p.name)  # A would have rows that no output depends on
        elif not own and grad is None:
            unreached.append(p.name)
        elif not _explained(
            in_layer[i],
            None if grad is None else (grad * steps[i]).sum(),
            None if grad is None else grad.norm(),
            [(g_of[id(call)], moved[call.module][n][i]) for call, n in own],
            conv=isinstance(p.layers[0], nn.Conv1d | nn.Conv2d | nn.Conv3d),
        ):
            unexplained.append(p.name)
    return RowCheck(
        recorder.calls,
        tuple(unreached),
        tuple(detached),
        tuple(unexplained),
        tuple(p.name for p in owned if mixed & set(p.layers)),
        f.shape[1],
    )


def _mixed_layers(f: Tensor, v: Tensor, calls: Sequence[LayerCall]) -> set[nn.Module]:
    """Layers whose first rows are not all that the first datum depends on."""
    edges = [call.edge for call in calls if call.edge is not None]
    if not edges:
        return set()
    first = torch.zeros_like(v)
    first[0] = v[0]
    grads = derivatives(f, edges, first, retain_graph=True)
    found = set()
    for call, g in zip(calls, grads, strict=True):
        if g is None or (len(f) == 1 and len(g) == 1):
            continue
        own = torch.zeros_like(g)
        own[0] = g[0]
        if len(g) != len(f) or not agree(own, g):
            found.add(call.module)
    return found


def _explained(
    step: Tensor,
    derivative: Tensor | None,
    size: Tensor | None,
    rows: Iterable[tuple[Tensor | None, Tensor | None]],
    conv: bool,
) -> bool:
    """Whether the rows of all calls of a parameter make up its derivative along a step."""
    total, scale, dtype = step.new_zeros(()), step.new_zeros(()), step.dtype
    for g, response in ((g, response) for g, response in rows if g is not None):
        dtype = max(dtype, g.dtype, key=lambda d: torch.finfo(d).eps)  # of an autocast layer
        if response is None or (response.ndim > 1 and response.shape != g.shape):
            return False
        if step.ndim == 1 and conv:
            response = response.reshape(-1, *[1] * (g.ndim - 2))
        terms = g * response
        total, scale = total + terms.sum(), scale + terms.norm()
    truth = step.new_zeros(()) if derivative is None else derivative
    if size is not None:
        scale = torch.maximum(scale, size)
    return agree(total.to(dtype), truth.to(dtype), scale)


def likely_cause(layer: nn.Module, shared: bool) -> str:
    """Why rows may not explain a parameter, and what to do.

    Args:
        layer: The layer that owns it.
        shared: Whether its rows were recorded from several layers.

    Returns:
        A clause and a remedy.

    Example:
        >>> likely_cause(nn.Linear(2, 1), False)[:24]
        'its weight is used outsi'
    """
    kind = type(layer).__name__
    if has_own_forward(layer):
        return (
            f"the `forward` of {kind} changes its weight (standardised, scaled, masked). Remedy: "
            "freeze it, or write what it computes into the weight of an ordinary layer"
        )
    if shared:
        return "layers share it and one of them uses it in another way. Remedy: freeze it"
    return (
        "its weight is used outside the layer as well (a tied decoder, a penalty in the outputs). "
        "Remedy: freeze it, or give the other use a parameter of its own"
    )
