"""Which layers own the parameters, and what hooks record of them in one forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from laplace_debias.kfac.grams import (
    SUPPORTED_LAYERS,
    accumulation_dtype,
    add_gradient_gram_,
    input_mean,
    mirror_,
)


class OwnedParameter(NamedTuple):
    """A parameter and the layers it belongs to.

    Attributes:
        name: Its name in the model.
        role: `"weight"` or `"bias"`.
        layers: The layers that hold it; more than one if they share it.
    """

    name: str
    role: str
    layers: tuple[nn.Module, ...]


def owned_parameters(
    model: nn.Module, params: Iterable[nn.Parameter] | None = None
) -> list[OwnedParameter]:
    """Which layers own each parameter, and as what.

    Args:
        model: The network.
        params: Parameters to look up; by default all that require a gradient.

    Returns:
        The parameters in the order of `model.parameters()`.

    Raises:
        ValueError: If there is no parameter, or K-FAC cannot represent one.

    Example:
        >>> [(p.name, p.role) for p in owned_parameters(nn.Linear(2, 1))]
        [('weight', 'weight'), ('bias', 'bias')]
    """
    wanted = None if params is None else {id(p) for p in params}
    chosen = [
        (name, p)
        for name, p in model.named_parameters()
        if (p.requires_grad if wanted is None else id(p) in wanted)
    ]
    if not chosen:
        raise ValueError(
            "Expected a model with at least one parameter that requires a gradient, got none; "
            "unfreeze the layers of interest with `requires_grad_(True)`."
        )
    holders: dict[int, list[tuple[str, nn.Module]]] = {}
    for module in model.modules():
        for role, p in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(p), []).append((role, module))

    owned, unsupported = [], []
    for name, p in chosen:
        roles = {role for role, _ in holders[id(p)]}
        layers = tuple(module for _, module in holders[id(p)])
        if len(roles) > 1 or not all(isinstance(layer, SUPPORTED_LAYERS) for layer in layers):
            kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
            unsupported.append((name, kinds))
        owned.append(OwnedParameter(name, roles.pop(), layers))
    if unsupported:
        found = ", ".join(f"{name} ({kinds})" for name, kinds in unsupported)
        remedy = "; ".join(
            f'model.get_parameter("{name}").requires_grad_(False)' for name, _ in unsupported
        )
        raise ValueError(
            "Expected every parameter that requires a gradient to belong to a Linear, Conv1d, "
            f"Conv2d or Conv3d layer, got {found}. Freeze what K-FAC cannot represent: {remedy}"
        )
    return owned


class Tape:
    """Records, by hooks, layers' input outer products and where their outputs hang in the graph.

    Args:
        owned: Parameters whose layers are recorded.
        inputs: Whether to record the inputs of layers whose weight is among the parameters.
        outputs: Whether to record the outputs of all layers.
        rows_from: Keep the inputs of linear layers of at least that many inputs as well.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> tape = Tape(owned_parameters(layer), inputs=True, outputs=False)
        >>> with tape.recording():
        ...     _ = layer(torch.ones(3, 2))
        >>> tape.input_mean([layer])
        tensor([[1., 1.], [1., 1.]])
    """

    def __init__(
        self,
        owned: list[OwnedParameter],
        *,
        inputs: bool,
        outputs: bool,
        rows_from: float = math.inf,
    ) -> None:
        """See the class."""
        self._owned, self._rows_from = owned, rows_from
        weights = [p for p in owned if p.role == "weight"]
        # Dictionaries serve as ordered sets.
        self._input_layers = {layer: None for p in weights for layer in p.layers} if inputs else {}
        self._output_layers = {layer: None for p in owned for layer in p.layers} if outputs else {}
        self._input_means: dict[nn.Module, list[tuple[Tensor, int]]] = {}
        self._rows: dict[nn.Module, list[Tensor]] = {}
        self._edges: dict[nn.Module, list[GradientEdge]] = {}
        self._outputs: dict[nn.Module, list[tuple[ref[Tensor], int]]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Install the hooks, and remove them at the end; every layer must have been called by then.

        Raises:
            ValueError: If a layer was not called, since its curvature is then unknown.
        """
        handles = [
            layer.register_forward_hook(self._record)
            for layer in {layer: None for p in self._owned for layer in p.layers}
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for p in self._owned:
            for layer in p.layers:
                for layers, seen in (
                    (self._input_layers, self._input_means),
                    (self._output_layers, self._edges),
                ):
                    if layer in layers and layer not in seen:
                        raise ValueError(
                            f"Expected the forward pass to call the layer of parameter {p.name}, "
                            "got no call (it is unused, or its weight is used without it, as in "
                            "MultiheadAttention); freeze it: "
                            f'model.get_parameter("{p.name}").requires_grad_(False)'
                        )

    def _record(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        # With its version, because an in-place operation keeps the tensor and changes its values.
        self._outputs.setdefault(layer, []).append((ref(output), output._version))
        if layer in self._input_layers:
            with torch.no_grad():
                self._input_means.setdefault(layer, []).append(input_mean(layer, args[0]))
        if isinstance(layer, nn.Linear) and layer.in_features >= self._rows_from:
            rows = args[0].detach().to(accumulation_dtype(args[0].dtype), copy=True)
            self._rows.setdefault(layer, []).append(rows)
        if layer in self._output_layers:
            if not output.requires_grad:
                raise ValueError(
                    f"Expected the output of {layer} to require a gradient, got one that does "
                    "not; its parameters must require gradients, and the model must not call it "
                    "under `no_grad`."
                )
            # An edge, not the tensor, which an in-place activation would change.
            self._edges.setdefault(layer, []).append(get_gradient_edge(output))

    def input_mean(self, layers: Iterable[nn.Module]) -> Tensor:
        """A: the mean of `a a^T` over all rows that the layers have seen.

        Args:
            layers: The layers that share a weight.

        Returns:
            Matrix `[d_in, d_in]`.
        """
        calls = [call for layer in layers for call in self._input_means[layer]]
        if len(calls) == 1:
            return calls[0][0]
        n_rows = sum(n for _, n in calls)
        return sum(n / n_rows * A for A, n in calls)

    def input_rows(self, layers: Iterable[nn.Module], n: int) -> Tensor | None:
        """The rows behind A of a wide linear layer.

        Args:
            layers: The layers that share a weight.
            n: Number of data; tokens may have been merged with them.

        Returns:
            Matrix `[n, d_in]`, if it was kept and there is one row per datum; `None` otherwise.
        """
        calls = [rows for layer in layers for rows in self._rows.get(layer, [])]
        if len(calls) != 1 or calls[0].ndim != 2 or len(calls[0]) != n:
            return None
        return calls[0]

    def output_grams(
        self, f: Tensor, columns: Tensor, *, vectorize: bool
    ) -> dict[nn.Module, Tensor]:
        """B of every layer: the sum of `g g^T` over columns, data and positions.

        Args:
            f: Output of the recorded forward pass, `[n, C]`.
            columns: Vectors that are propagated back, `[columns, n, C]`.
            vectorize: Whether to propagate all columns in one batched pass.

        Returns:
            B, `[d_out, d_out]`, for each layer.
        """
        layers = [layer for layer, edges in self._edges.items() for _ in edges]
        edges = [edge for edges in self._edges.values() for edge in edges]
        dtype = accumulation_dtype(f.dtype)
        B = {
            layer: torch.zeros(2 * layer.weight.shape[:1], dtype=dtype, device=f.device)
            for layer in self._edges
        }

        def add(gradients: tuple[Tensor | None, ...]) -> None:
            for layer, g in zip(layers, gradients, strict=True):
                if g is not None:  # None: the output does not depend on the layer
                    add_gradient_gram_(B[layer], layer, g)

        if vectorize:
            gradients = torch.autograd.grad(
                f, edges, columns, is_grads_batched=True, allow_unused=True
            )
            add(tuple(None if g is None else g.flatten(0, 1) for g in gradients))
        else:
            for i, column in enumerate(columns):
                keep = i + 1 < len(columns)
                add(torch.autograd.grad(f, edges, column, retain_graph=keep, allow_unused=True))
        return {layer: mirror_(gram) for layer, gram in B.items()}

    def is_output(self, p: OwnedParameter, f: Tensor) -> bool:
        """Whether the network's output is the output of the one layer that holds the parameter.

        Args:
            p: A recorded parameter.
            f: Output of the recorded forward pass.

        Returns:
            True if B of the parameter is the loss Hessian itself, which needs no backward pass.
        """
        calls = self._outputs[p.layers[0]]
        tensor, version = calls[0]
        return len(p.layers) == len(calls) == 1 and tensor() is f and f._version == version
