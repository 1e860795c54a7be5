"""What a fit refuses, by the name of the layer, before it costs anything.

Each parameter's rows are compared with derivatives of the whole network, and a few data are passed
in another order and one by one: outputs must belong to their data, in any order and any company.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs, Keys, rows_of, size_of, take, tensors_of
from laplace_debias.network.calling import call_model
from laplace_debias.network.check import N_CHECKED, RowCheck, agree, check_rows, likely_cause
from laplace_debias.network.layers import has_own_forward
from laplace_debias.network.ownership import OwnedParameter, owned_parameters
from laplace_debias.network.preserve import devices_of, differentiable
from laplace_debias.network.recorder import check_outputs
from laplace_debias.network.remembered import question_of, recall, remember

__all__ = [
    "LayerCheck",
    "check_data",
    "check_order",
    "check_parameters",
    "verify_data",
    "verify_layers",
]

OFF = "`verify=False` turns this check off."
Status = Literal["exact", "approximated", "not supported"]
"""Whether the rows of a layer are one per datum, several, or no explanation of what it does."""


@dataclass(frozen=True)
class LayerCheck:
    """What holds for one Bayesian parameter.

    Attributes:
        name: Its name.
        kind: Type of the layer that owns it.
        n_parameters: Number of its entries.
        status: ``"exact"``: one row per datum, whose outer product of gradient and input is the
            Jacobian, so that K-FAC's only step is to average the two apart. ``"approximated"``:
            several rows per datum, which K-FAC sums as ``note`` says. ``"not supported"``: refused.
        note: How it is approximated, or why it is not supported and what to do.
        factor_bytes: Memory of its Kronecker factors.
    """

    name: str
    kind: str
    n_parameters: int
    status: Status
    note: str = ""
    factor_bytes: int = 0


def check_parameters(
    model: nn.Module, x: Inputs, owned: Sequence[OwnedParameter], key: Keys = "input_ids"
) -> tuple[list[LayerCheck], RowCheck]:
    """Check each parameter on a few data of a mini-batch, or on all if the few miss a layer.

    Args:
        model: The network.
        x: Inputs of the mini-batch.
        owned: Its Bayesian parameters.
        key: Which entries of a mapping run over the data.

    Returns:
        What holds for each parameter, and the pass that showed it.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> [c.status for c in check_parameters(net, torch.ones(3, 2), owned_parameters(net))[0]]
        ['exact', 'exact']
    """
    n = size_of(x, key)
    few = min(n, N_CHECKED)
    rows = check_rows(model, take(x, slice(0, few), key), owned)
    if rows.unreached and few < n:
        few, rows = n, check_rows(model, x, owned)
    found = []
    for p in owned:
        kind, size = type(p.layers[0]).__name__, p.tensor.numel()
        taken = sum(d**2 for d in p.sides) * max(p.tensor.element_size(), 4)
        found.append(LayerCheck(p.name, kind, size, *_status(p, rows, few), taken))
    return found, rows


def _status(p: OwnedParameter, rows: RowCheck, n: int) -> tuple[Status, str]:
    """What holds for one parameter."""
    freeze = f'`model.get_parameter("{p.name}").requires_grad_(False)`'
    if p.name in rows.unreached:
        return "not supported", (
            "no datum of the mini-batch reaches its layer (unused, or routed to rarely). Remedy: "
            f"a larger mini-batch, or freeze it, {freeze}"
        )
    if p.name in rows.detached:
        why = (
            "a call of its layer runs without gradients, or its output is detached or not used. "
            "Remedy: no `no_grad` around it, no call in vain, or "
        )
        return "not supported", why + freeze
    if p.name in rows.unexplained:
        return "not supported", likely_cause(p.layers[0], len(p.layers) > 1)
    if p.name in rows.mixed:
        why = "its layer does not see the data along its first dimension. Remedy: "
        return "not supported", f"{why}`batch_first=True`, or freeze it, {freeze}"
    if p.has_one_factor:
        return "exact", ""
    calls = [call for layer in p.layers for call in rows.calls[layer]]
    positions = sum(call.shape.numel() // call.d_out for call in calls) / n
    notes = []
    if positions > 1:
        notes.append(f"{positions:g} rows per datum, summed by `kfac_approx`")
    if getattr(p.layers[0], "groups", 1) > 1:
        notes.append("inputs averaged over groups")
    return ("approximated", ", ".join(notes)) if notes else ("exact", "")


def check_order(
    model: nn.Module, x: Inputs, key: Keys = "input_ids", whole: bool = False
) -> str | None:
    """Whether outputs belong to their data, in any order and any company.

    Args:
        model: The network.
        x: Inputs of a mini-batch.
        key: Which entries of a mapping run over the data.
        whole: Whether to pass the whole mini-batch as well.

    Returns:
        What is wrong, or ``None``.

    Example:
        >>> print(check_order(nn.Softmax(dim=0), torch.randn(3, 2)))
        an output depends on which data pass together
    """
    n = min(total := size_of(x, key), N_CHECKED)
    devices = devices_of(list(model.parameters()))
    with differentiable(model, []), torch.no_grad(), torch.random.fork_rng(devices):
        few = take(x, slice(0, n), key)
        f = check_outputs(call_model(model, few))
        if whole and not agree(check_outputs(call_model(model, x))[:n], f):
            return "the outputs of some data differ from those of the whole mini-batch"
        if n == 1:
            return None
        order, k = torch.arange(n).roll(1), n - (total > n)  # no datum stays in its place
        other = torch.cat([order[:k], torch.tensor([total - 1])])[:n]  # one gives way to another

        def outputs(inputs: Inputs) -> Tensor:
            return check_outputs(call_model(model, inputs))

        fine = agree(outputs(take(x, other, key))[:k], f[order[:k]])
        if not fine and not agree(outputs(take(few, order, key)), f[order]):
            return "outputs do not follow the order of the data"
        if not fine or not agree(outputs(take(few, slice(0, 1), key)), f[:1]):
            return "an output depends on which data pass together"
    return None


def check_data(
    model: nn.Module, x: Inputs, key: Keys = "input_ids", targets: str = "labels"
) -> str | None:
    """Check that outputs belong to their data; see :func:`check_order`.

    Args:
        model: The network.
        x: Inputs of a mini-batch.
        key: Which entries of a mapping run over the data.
        targets: The entry that holds the targets, if there is one.

    Returns:
        What is wrong, with the likely cause and a remedy, or ``None``.

    Example:
        >>> check_data(nn.Linear(2, 1), torch.ones(3, 2)) is None
        True
    """
    names = rows_of(x, key) if isinstance(x, MutableMapping) else []
    guessed = isinstance(key, str) and len(set(names) - {targets}) > 1
    guessed |= isinstance(x, (tuple, list)) and len(tensors_of(x)) > 1
    cause = (
        "the model reorders or mixes its mini-batch, or draws random numbers. Remedy: give the "
        "outputs back in the order of the inputs, and normalise with statistics of the training"
    )
    if isinstance(x, MutableMapping):
        cause = (
            f"of {sorted(names)} one does not run over the data (a table, anchors), or "
            f"{cause}. Or name those that do: `data_keys=(...)`"
        )
    try:
        wrong = check_order(model, x, key, whole=guessed)
    except (RuntimeError, IndexError) as error:
        if not guessed:
            raise
        wrong = f"the model raises for some of the data ({error})"
    return None if wrong is None else f"{wrong}; likely cause: {cause}"


def verify_layers(
    model: nn.Module,
    x: Inputs,
    key: Keys = "input_ids",
    targets: str = "labels",
    *,
    inside: bool = True,
) -> set[str]:
    """Raise unless K-FAC's factors of a network mean what they say, on a few data.

    Args:
        model: The network; its parameters that require a gradient are Bayesian.
        x: Inputs of the first mini-batch.
        key: Which entries of a mapping run over the data.
        targets: The entry that holds the targets, if there is one.
        inside: Whether the backend looks into layers with a ``forward`` of their own.

    Returns:
        Names of the parameters that the mini-batch reaches.

    Raises:
        ValueError: If rows do not explain a parameter, or outputs do not belong to their data.

    Example:
        >>> sorted(verify_layers(nn.Linear(2, 1), torch.randn(3, 2)))
        ['bias', 'weight']
    """
    owned = owned_parameters(model)
    found, rows = check_parameters(model, x, owned, key)
    refused = {*rows.unexplained, *rows.detached, *rows.mixed}
    wrong = [f"{c.name} ({c.kind}): {c.note}" for c in found if c.name in refused]
    wrong += [
        f"{p.name} ({type(p.layers[0]).__name__}): its layer has a `forward` of its own, which "
        "this backend does not look into. Remedy: leave `backend` out"
        for p in owned
        if not inside and has_own_forward(p.layers[0]) and p.name not in rows.unexplained
    ]
    if wrong:
        raise ValueError(
            "Expected the inputs and output gradients of every layer to explain all that its "
            "parameters do, got other derivatives of the whole network for "
            f"{'; '.join(wrong)}. Remedy: mend or freeze these layers, as said for each. {OFF}"
        )
    verify_data(model, x, key, targets)
    return {p.name for p in owned if p.name not in rows.unreached}


def verify_data(model: nn.Module, x: Inputs, key: Keys, targets: str = "labels") -> None:
    """Raise unless outputs belong to their data.

    Args:
        model: The network.
        x: Inputs of a mini-batch.
        key: Which entries of a mapping run over the data.
        targets: The entry that holds the targets, if there is one.

    Raises:
        ValueError: If they do not.

    Example:
        >>> verify_data(nn.Linear(2, 1), torch.randn(3, 2), "x")
    """
    question = question_of("data", x, key, targets)
    if recall(model, question, x):
        return
    wrong = check_data(model, x, key, targets)
    if wrong is not None:
        raise ValueError(
            f"Expected one row of outputs for each datum, whatever passes with it, got: {wrong}. "
            f"Remedy: let the model treat each datum by itself. {OFF}"
        )
    remember(model, question, x, True)
