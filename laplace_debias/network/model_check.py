"""What a Laplace approximation can and cannot do with a model, asked before paying for a fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs, Keys, size_of, take
from laplace_debias.network.calling import call_model
from laplace_debias.network.check import RowCheck
from laplace_debias.network.freezing import REASONS, unsupported_parameters
from laplace_debias.network.loss import likelihood_name
from laplace_debias.network.ownership import OwnedParameter, owned_parameters, owners
from laplace_debias.network.preserve import devices_of, differentiable
from laplace_debias.network.recorder import Recorder
from laplace_debias.network.verify import LayerCheck, check_data, check_parameters

__all__ = ["ModelCheck", "check_model"]


@dataclass(frozen=True)
class ModelCheck:
    """What a fit and a prediction can do with a model; ``print`` shows a table.

    Attributes:
        layers: One entry per parameter that requires a gradient.
        data: What is wrong with the outputs' relation to the data, or ``None``.
        share: Share of all the model's parameters, frozen ones included, that is covered.
        n_data: Number of data that the memory is counted for.
        fit_bytes: Memory of a fit on such mini-batches, besides the model: activations, gradients,
            eigenvectors in double precision and as kept. Counted ones were between 0.7 and 1.4
            times as large on the networks of its test.
        predict_bytes: The same of a prediction for such a mini-batch at once: gradients of all
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
        """A table, one line per parameter with the memory of its factors, and a summary."""
        wide = max(len("parameter"), *(len(layer.name) for layer in self.layers))
        kinds = max(len("layer"), *(len(layer.kind) for layer in self.layers))
        lines = [f"{'parameter':<{wide}}  {'layer':<{kinds}}  {'entries':>9}  {'MiB':>7}  status"]
        for layer in self.layers:
            note = f": {layer.note}" if layer.note else ""
            lines.append(
                f"{layer.name:<{wide}}  {layer.kind:<{kinds}}  {layer.n_parameters:>9,}  "
                f"{layer.factor_bytes / 2**20:>7.1f}  {layer.status}{note}"
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
        parameter  layer     entries      MiB  status
        0.weight   Linear         12      0.0  exact
        0.bias     Linear          4      0.0  exact
        2.weight   Linear          8      0.0  exact
        2.bias     Linear          2      0.0  exact
        100.0% of the parameters covered; for 5 data a fit needs about ... MiB, a prediction ... MiB
    """
    likelihood_name(likelihood)
    key = "input_ids" if data_keys is None else tuple(data_keys)
    refused = set(unsupported_parameters(model))
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    fine = [p for name, p in trainable.items() if name not in refused]
    found: dict[str, LayerCheck] = {}
    rows, owned = None, list[OwnedParameter]()
    if fine or not trainable:
        owned = owned_parameters(model, fine)
        checks, rows = check_parameters(model, x, owned, key)
        found = {check.name: check for check in checks}
    holders = owners(model, trainable.values())
    for name in refused:
        kind = type(holders[id(trainable[name])][0][0]).__name__
        why = REASONS.get(kind, f"{kind} has no Kronecker factors")
        note = f'{why}. Remedy: model.get_parameter("{name}")'
        found[name] = LayerCheck(
            name, kind, trainable[name].numel(), "not supported", f"{note}.requires_grad_(False)"
        )
    layers = tuple(found[name] for name in trainable)
    covered = sum(layer.n_parameters for layer in layers if layer.status != "not supported")
    n = size_of(x, key)
    fit_bytes, predict_bytes = _memory(model, x, key, fine, owned, rows)
    return ModelCheck(
        layers,
        check_data(model, x, key),
        covered / sum(p.numel() for p in model.parameters()),
        n,
        fit_bytes,
        predict_bytes,
    )


def _memory(
    model: nn.Module,
    x: Inputs,
    key: Keys,
    params: Sequence[Tensor],
    owned: Sequence[OwnedParameter],
    rows: RowCheck | None,
) -> tuple[int, int]:
    r"""Bytes of a fit and of a prediction of the data in ``x``, from the shapes of one datum.

    A fit holds what autograd saves of the mini-batch and gradients of the same size, bases in
    double precision and what is kept of them. A prediction holds what autograd saves, the
    gradients of all outputs at all layers, a rotated copy of the largest, and bases twice.
    """
    n = size_of(x, key)
    recorder = Recorder((m for m in model.modules() if not list(m.children())), edges=False)
    saved: dict[int, int] = {p.data_ptr(): 0 for p in model.parameters()}

    def pack(t: Tensor) -> Tensor:
        saved.setdefault(t.untyped_storage().data_ptr(), t.numel() * t.element_size())
        return t

    with (
        differentiable(model, params),
        torch.random.fork_rng(devices_of(list(model.parameters()))),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        recorder.recording(),
    ):
        f = call_model(model, take(x, slice(0, 1), key))
    held = sum(saved.values())
    del f
    n_outputs = 1 if rows is None else rows.n_outputs
    kept = 0  # entries of all bases
    for p in owned:
        R = sum(c.shape.numel() // c.d_out for m in p.layers for c in recorder.calls.get(m, []))
        if p.has_one_factor or p.role == "bias":
            kept += _basis(p.tensor.numel(), n * n_outputs * (1 if p.has_one_factor else R))
        else:
            kept += _basis(p.tensor.shape[0], n * n_outputs * R)
            kept += _basis(p.tensor[0].numel(), n * R)
    wide = max(max((p.element_size() for p in params), default=4), 4)
    fit = 2 * n * held + kept * (wide + 8)
    if rows is None:
        return fit, n * held
    layers = [m for m in rows.calls if recorder.calls.get(m)]
    seen = [call.shape.numel() for m in layers for call in recorder.calls[m]]
    gradients = n_outputs * (sum(seen) + max(seen, default=0)) * wide
    return fit, n * (held + gradients) + 2 * kept * wide


def _basis(d: int, n_rows: int) -> int:
    """Entries of an eigenbasis of ``[d, d]``, thin if the rows are few."""
    return d * n_rows if 2 * n_rows < d else d**2
