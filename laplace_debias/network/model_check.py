"""What a Laplace approximation can and cannot do with a model, asked before paying for a fit."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs, Keys, rows_of, size_of, take
from laplace_debias.network.check import N_CHECKED, RowCheck, check_order, check_rows, likely_cause
from laplace_debias.network.loss import likelihood_name
from laplace_debias.network.ownership import (
    OwnedParameter,
    owned_parameters,
    owners,
    unsupported_parameters,
)
from laplace_debias.network.preserve import evaluation_mode
from laplace_debias.network.recorder import Recorder

__all__ = ["LayerCheck", "ModelCheck", "check_data", "check_model", "check_parameters"]

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
    """

    name: str
    kind: str
    n_parameters: int
    status: Status
    note: str = ""


@dataclass(frozen=True)
class ModelCheck:
    """What a fit and a prediction can do with a model; ``print`` shows a table.

    Attributes:
        layers: One entry per parameter that requires a gradient.
        data: What is wrong with the outputs' relation to the data, or ``None``.
        share: Share of all the model's parameters, frozen ones included, that is covered.
        n_data: Number of data that the memory is counted for.
        fit_bytes: Memory of a fit on such mini-batches: activations of the graph, factors of two
            roles, eigenvectors in double precision and as kept.
        predict_bytes: Memory of a prediction for such a mini-batch at once: gradients of all
            outputs at all layers, inputs, eigenvectors. A smaller ``memory_budget`` cuts it.
    """

    layers: tuple[LayerCheck, ...]
    data: str | None
    share: float
    n_data: int
    fit_bytes: int
    predict_bytes: int

    @property
    def supported(self) -> bool:
        """Whether a fit would be accepted."""
        return self.data is None and all(x.status != "not supported" for x in self.layers)

    def __str__(self) -> str:
        """A table, one line per parameter, and a summary."""
        wide = max(len("parameter"), *(len(layer.name) for layer in self.layers))
        kinds = max(len("layer"), *(len(layer.kind) for layer in self.layers))
        lines = [f"{'parameter':<{wide}}  {'layer':<{kinds}}  {'entries':>9}  status"]
        for layer in self.layers:
            note = f": {layer.note}" if layer.note else ""
            lines.append(
                f"{layer.name:<{wide}}  {layer.kind:<{kinds}}  {layer.n_parameters:>9,}  "
                f"{layer.status}{note}"
            )
        lines += [] if self.data is None else [f"data: {self.data}"]
        lines.append(
            f"{self.share:.1%} of the parameters covered; for {self.n_data} data a fit needs about "
            f"{self.fit_bytes / 2**20:,.1f} MiB, a prediction {self.predict_bytes / 2**20:,.1f} MiB"
        )
        return "\n".join(lines)


def check_model(
    model: nn.Module,
    x: Inputs,
    likelihood: str,
    *,
    data_keys: Sequence[str] | None = None,
) -> ModelCheck:
    """Check what a Laplace approximation over all layers of a model can do, without fitting it.

    A few data are passed through the network: what the recorded rows of each layer say is
    compared with derivatives of the whole network, and the data are passed in another order and
    one by one. The model is left as it was.

    Args:
        model: The network; its parameters that require a gradient are looked at.
        x: Inputs of one mini-batch, ``[n, ...]`` or a mapping.
        likelihood: ``"classification"`` or ``"regression"``.
        data_keys: The entries of a mapping that have one row per datum; by default all tensors
            with as many rows.

    Returns:
        What holds for each parameter, for the data, and the memory that is needed.

    Raises:
        ValueError: If the likelihood is unknown, no parameter requires a gradient, or the outputs
            are not ``[n, C]``.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> check = check_model(net, torch.randn(5, 3), "classification")
        >>> check.supported, check.share
        (True, 1.0)
        >>> print(check)
        parameter  layer     entries  status
        0.weight   Linear         12  exact
        0.bias     Linear          4  exact
        2.weight   Linear          8  exact
        2.bias     Linear          2  exact
        100.0% of the parameters covered; for 5 data a fit needs about ... MiB, a prediction ... MiB
    """
    likelihood_name(likelihood)
    key = "input_ids" if data_keys is None else tuple(data_keys)
    refused = set(unsupported_parameters(model))
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    fine = [p for name, p in trainable.items() if name not in refused]
    found: dict[str, LayerCheck] = {}
    rows = None
    if fine or not trainable:
        owned = owned_parameters(model, fine)
        checks, rows = check_parameters(model, x, owned, key)
        found = {check.name: check for check in checks}
    holders = owners(model, trainable.values())
    for name in refused:
        kind = type(holders[id(trainable[name])][0][0]).__name__
        note = f'{kind} has no Kronecker factors. Remedy: model.get_parameter("{name}")'
        found[name] = LayerCheck(
            name, kind, trainable[name].numel(), "not supported", f"{note}.requires_grad_(False)"
        )
    layers = tuple(found[name] for name in trainable)
    covered = sum(layer.n_parameters for layer in layers if layer.status != "not supported")
    n = size_of(x, key)
    shapes = [p for p in fine]
    fit_bytes, predict_bytes = _memory(model, x, key, shapes, rows)
    return ModelCheck(
        layers,
        check_data(model, x, key),
        covered / sum(p.numel() for p in model.parameters()),
        n,
        fit_bytes,
        predict_bytes,
    )


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
        layer = p.layers[0]
        status, note = _status(p, rows, few)
        size = layer.get_parameter(p.role).numel()
        found.append(LayerCheck(p.name, type(layer).__name__, size, status, note))
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
        return "not supported", (
            f"its layer runs without gradients. Remedy: no `no_grad` around it, or {freeze}"
        )
    if p.name in rows.unexplained:
        return "not supported", likely_cause(p.layers[0], len(p.layers) > 1)
    calls = [call for layer in p.layers for call in rows.calls[layer]]
    positions = sum(call.shape.numel() // call.d_out for call in calls) / n
    notes = []
    if positions > 1:
        notes.append(f"{positions:g} rows per datum, summed by `kfac_approx`")
    if getattr(p.layers[0], "groups", 1) > 1:
        notes.append("inputs averaged over groups")
    return ("approximated", ", ".join(notes)) if notes else ("exact", "")


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


def _memory(
    model: nn.Module, x: Inputs, key: Keys, params: Sequence[Tensor], rows: RowCheck | None
) -> tuple[int, int]:
    """Bytes of a fit and of a prediction of the data in ``x``, from the shapes of one datum."""
    n = size_of(x, key)
    recorder = Recorder((m for m in model.modules() if not list(m.children())), edges=False)
    with evaluation_mode(model), torch.no_grad(), recorder.recording():
        model(take(x, slice(0, 1), key))
    calls = [call for found in recorder.calls.values() for call in found]
    held = sum(call.shape.numel() * call.dtype.itemsize for call in calls)
    sides = [(p.shape[0], p[0].numel() if p.ndim > 1 else 0) for p in params]
    squares = sum(d_out**2 + d_in**2 for d_out, d_in in sides)
    wide = max((p.element_size() for p in params), default=4)
    wide = max(wide, 4)
    fit = n * held + squares * (3 * wide + 8)
    if rows is None:
        return fit, n * held
    layers = [m for m in rows.calls if recorder.calls.get(m)]
    seen = [call.shape.numel() for m in layers for call in recorder.calls[m]]
    return fit, n * (held + rows.n_outputs * sum(seen) * wide) + squares * wide
