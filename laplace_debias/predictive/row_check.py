"""Verified, not assumed: does each row that a layer saw belong to the datum it is counted for?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs, Keys, size_of, take
from laplace_debias.network.calling import call_model, flat_outputs
from laplace_debias.network.check import agree, derivatives, random_steps
from laplace_debias.network.layers import is_norm, is_transposed
from laplace_debias.network.remembered import question_of, recall, remember
from laplace_debias.network.unfold import patch_order
from laplace_debias.predictive.probing import (
    Capture,
    Source,
    call_gradients,
    call_inputs,
    call_normalised,
    run,
)

__all__ = ["misplaced_rows", "row_responses"]

N_DATA = 2
"""Number of data that are enough to tell whose rows they are."""


def row_responses(
    source: Source, G: Tensor, step: Tensor, bias: bool = False
) -> tuple[Tensor, Tensor]:
    r"""How each datum's outputs answer to a step of a parameter, by what one call recorded.

    :math:`\sum_t \langle g_{nt}, \delta W a_{nt} \rangle`, or
    :math:`\sum_t \langle g_{nt}, \delta b \rangle`, for each datum n.

    Args:
        source: The call, and the dimension of its input that runs over the data.
        G: Gradients of its output, ``[n, d_out, R]``.
        step: The step, in the parameter's shape.
        bias: Whether it is one of a bias.

    Returns:
        The sums ``[n]``, and the norms ``[n]`` of what was added up: the sums may be far smaller
        (a shift of all keys of an attention changes nothing), and no more exact than these allow.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> call = run(net, torch.ones(3, 2), [net]).calls[net][0]
        >>> row_responses((call, 0), torch.ones(3, 1, 1), torch.tensor([[1.0, 2.0]]))[0]
        tensor([3., 3., 3.])
    """
    call, dim = source
    n = len(G)
    if bias or step.ndim == 1 or is_norm(call.module):
        terms = G * step.reshape(-1, 1)
        if is_norm(call.module) and not bias:
            terms = terms * call_normalised(call, call.module, n, dim)
        return terms.sum((1, 2)), terms.flatten(1).norm(dim=1)
    a = call_inputs(call, n, dim, slice(0, n)).to(step.dtype)  # [n, R, groups, d_in]
    dW = step.T if is_transposed(call.module) else step.flatten(1)
    if isinstance(call.geometry, nn.Conv2d):
        dW = patch_order(dW.T, call.geometry).T
    moved = torch.einsum("nrgi,goi->ngor", a, dW.unflatten(0, (a.shape[2], -1))).flatten(1, 2)
    terms = G * moved
    return terms.sum((1, 2)), terms.flatten(1).norm(dim=1)


def misplaced_rows(
    model: nn.Module,
    x: Inputs,
    key: Keys,
    modules: list[nn.Module],
    params: Sequence[Tensor],
    sources_of: Callable[[int, Capture, int], Sequence[Source] | str],
) -> set[int]:
    """Which parameters' rows do not make up the Jacobian, datum by datum.

    The first two data are passed one by one, with gradients of the parameters themselves, and
    together in two orders, with the rows that the layers recorded. What was found is remembered.

    Args:
        model: The model, in evaluation mode with gradients on.
        x: Inputs of a mini-batch.
        key: Which entries of a mapping run over the data.
        modules: The layers to record.
        params: The parameters.
        sources_of: The calls that should explain a parameter, given its number, in a run of n data;
            or why there are none.

    Returns:
        Numbers of the parameters that are not explained.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> calls = lambda i, capture, n: [(capture.calls[net][0], 0)]
        >>> misplaced_rows(net, torch.ones(2, 2), "x", [net], [net.weight], calls)
        set()
    """
    n, wrong = min(size_of(x, key), N_DATA), set[int]()
    question = question_of("rows", x, key, n, tuple(map(id, params)))
    known: set[int] | None = recall(model, question, x)
    if known is not None:
        return known
    whole, x = x, take(x, slice(0, n), key)
    steps = random_steps(params)
    vectors: Tensor | None = None
    alone = []  # [n][parameter]
    for i in range(n):
        f = flat_outputs(call_model(model, take(x, slice(i, i + 1), key)))
        if not f.requires_grad:
            return set()
        vectors = random_steps([f.expand(n, -1)])[0] if vectors is None else vectors
        alone.append(derivatives(f, params, vectors[i : i + 1]))
    assert vectors is not None  # there is a datum
    for order in [torch.arange(n)] if n == 1 else [torch.arange(n), torch.arange(n).flip(0)]:
        capture = run(model, take(x, order, key), modules)
        explained = ((i, sources_of(i, capture, n)) for i in range(len(params)))
        sources = {i: found for i, found in explained if not isinstance(found, str)}
        calls = {id(s[0]): s for found in sources.values() for s in found}
        edges = [call.edge for call, _ in calls.values() if call.edge is not None]
        if not edges:
            continue
        grads = derivatives(capture.f, edges, vectors[order])
        G = {
            number: capture.f.new_zeros(call.shape) if g is None else g
            for (number, (call, _)), g in zip(calls.items(), grads, strict=True)
        }
        for i, found in sources.items():
            said, scale = capture.f.new_zeros(n), capture.f.new_zeros(n)
            for call, dim in found:
                g = call_gradients(call, G[id(call)], n, dim)
                bias = params[i] is call.module._parameters.get("bias")
                new, size = row_responses((call, dim), g, steps[i], bias)
                said, scale = said + new.to(said.dtype), torch.hypot(scale, size.to(said.dtype))
            for row, datum in enumerate(order.tolist()):
                grad = alone[datum][i]
                grad = torch.zeros_like(params[i]) if grad is None else grad
                truth = (grad * steps[i]).sum()
                if not agree(said[row], truth, torch.maximum(grad.norm(), scale.max())):
                    wrong.add(i)
    remember(model, question, whole, wrong)
    return wrong
