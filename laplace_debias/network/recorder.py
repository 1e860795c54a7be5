"""ONE set of hooks: what layers see in a forward pass, and where their outputs hang in the graph.

An edge of the graph, not the output tensor, marks where a gradient is read: an in-place activation
would move the tensor on. An output that is a view (a linear layer over tokens) is replaced by a
copy of itself, because an in-place activation on a view rewrites the graph behind the edge, and
every gradient there would be zero. The hooks run before the user's own, which may change a layer's
output. A layer with a ``forward`` of its own (a convolution that pads its input itself) is looked
into: if it multiplies its very weight with something, that product is what is recorded.

Hooks sit on modules, which threads share. So a recorder listens to the thread that records, and
to no other.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from laplace_debias.network.layers import has_products, has_rows_last
from laplace_debias.network.products import Products

__all__ = ["LayerCall", "Recorder", "check_outputs", "count_uses", "inner_product"]


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer: its input, and where its output sits in the graph.

    Attributes:
        module: The layer.
        a: Its input, as the model gave it, if inputs are kept.
        shape: Shape of its output.
        dtype: Type of its output.
        version: How often the input had been changed in place when the layer was called.
        edge: The place in the graph at which the gradient of the output is read, or ``None`` if the
            layer ran without gradients.
        output: The output, as long as somebody else holds it, with its version.
        geometry: A layer of the kernel, stride and padding that were used: the layer itself, but
            for one that pads its input itself.
        used: Names of the layer's parameters that the recorded product multiplies or adds: none if
            its ``forward`` makes something else of them.
    """

    module: nn.Module
    a: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    version: int
    edge: GradientEdge | None
    output: tuple[ref[Tensor], int]
    geometry: nn.Module
    used: tuple[str, ...] = ("weight", "bias")

    def is_output(self, f: Tensor) -> bool:
        """Whether the network's output ``f`` is this very output, unchanged."""
        tensor, version = self.output
        return tensor() is f and _version(f) == version

    def positions(self, n: int) -> int:
        """Number of positions per datum, of n data."""
        return self.shape.numel() // (n * self.d_out)

    @property
    def d_out(self) -> int:
        """Number of outputs (channels) of a layer at each position."""
        if isinstance(self.module, nn.LayerNorm | nn.RMSNorm):
            return self.module.get_parameter("weight").numel()
        return self.shape[-1] if has_rows_last(self.module) else self.shape[1]

    @property
    def kept_input(self) -> Tensor:
        """The input, as the model gave it.

        Raises:
            RuntimeError: If it was not kept.
        """
        if self.a is None:
            raise RuntimeError(
                f"Expected the input of {self.module}, got none: the recorder kept no inputs, or "
                "the layer was called without a tensor. Remedy: Recorder(..., keep_inputs=True)."
            )
        return self.a


class Recorder:
    """Records the calls of some layers in a forward pass.

    Args:
        layers: The layers to record.
        on_input: Called with every layer, its geometry and its input, when the layer is called:
            what it computes cannot be spoilt by later in-place operations, and the input need not
            be kept.
        keep_inputs: Whether the calls keep their inputs.
        keep_graph: Keep these inputs attached, to differentiate through them.
        edges: Whether to record where gradients are read; without, the graph is left untouched.

    Attributes:
        calls: The calls of every layer, in order.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True))
        >>> recorder = Recorder([net[0]], keep_inputs=True)
        >>> with recorder.recording():
        ...     f = net(torch.ones(4, 2))
        >>> [(call.a.shape, call.shape, call.is_output(f)) for call in recorder.calls[net[0]]]
        [(torch.Size([4, 2]), torch.Size([4, 3]), False)]
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        *,
        on_input: Callable[[nn.Module, nn.Module, Tensor], None] | None = None,
        keep_inputs: bool = False,
        keep_graph: bool = False,
        edges: bool = True,
    ) -> None:
        self.calls: dict[nn.Module, list[LayerCall]] = {layer: [] for layer in layers}
        self._on_input = on_input
        self._keep_inputs, self._keep_graph, self._edges = keep_inputs, keep_graph, edges
        self._inside: list[tuple[Products, ExitStack]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Install the hooks, and remove them at the end."""
        recording = threading.get_ident()

        def look_inside(layer: nn.Module, _: tuple[Any, ...]) -> None:
            if threading.get_ident() == recording:
                self._look_inside(layer)

        def hook(layer: nn.Module, args: tuple[Any, ...], *rest: Any) -> Tensor | None:
            # another thread may see a hook that is being removed, without its keyword arguments
            if threading.get_ident() != recording:
                return None
            kwargs, output = rest
            return self._record(layer, args, kwargs, output)

        handles = []
        for layer in self.calls:
            if self._edges and has_products(layer):
                handles.append(layer.register_forward_pre_hook(look_inside))
            handles.append(layer.register_forward_hook(hook, prepend=True, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            while self._inside:  # a forward pass that raised
                self._inside.pop()[1].close()

    def _look_inside(self, layer: nn.Module) -> None:
        mode, stack = Products(layer, self.add), ExitStack()
        stack.enter_context(mode)
        self._inside.append((mode, stack))

    def _record(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> Tensor | None:
        used: tuple[str, ...] = ("weight", "bias")
        if self._inside and self._inside[-1][0].layer is layer:
            mode, stack = self._inside.pop()
            stack.close()
            if mode.found:
                return None
            used = ()
        if not isinstance(output, Tensor):
            return None
        replaced = self.add(layer, layer, args[0] if args else kwargs.get("input"), output, used)
        return None if replaced is output else replaced

    def add(
        self,
        layer: nn.Module,
        geometry: nn.Module,
        a: Any,
        output: Tensor,
        used: tuple[str, ...] = ("weight", "bias"),
    ) -> Tensor:
        """Record a call of a layer.

        Args:
            layer: The layer.
            geometry: A layer of the kernel, stride and padding that were used.
            a: Its input.
            output: Its output.
            used: Names of the layer's parameters that take part as they are.

        Returns:
            The output, or what has to take its place.
        """
        attached = self._edges and output.requires_grad
        replaced = output.clone() if attached and output._is_view() else output
        edge = get_gradient_edge(replaced) if attached else None
        kept, version = None, 0
        if isinstance(a, Tensor):
            if self._on_input is not None:
                with torch.no_grad():
                    self._on_input(layer, geometry, a)
            if self._keep_inputs:
                kept = a if self._keep_graph else a.detach()
                version = _version(kept)
        end = (ref(replaced), _version(replaced))
        self.calls[layer].append(
            LayerCall(
                layer, kept, replaced.shape, replaced.dtype, version, edge, end, geometry, used
            )
        )
        return replaced


def _version(t: Tensor) -> int:
    """How often a tensor was changed in place, which those of inference mode do not count."""
    return 0 if t.is_inference() else t._version


def check_outputs(f: Any) -> Tensor:
    """Raise unless a network returns outputs for each datum.

    Args:
        f: What the network returned.

    Returns:
        The same, ``[n, C]``, or with positions (:mod:`laplace_debias.network.calling`).

    Raises:
        ValueError: If it is not a tensor of that shape.

    Example:
        >>> check_outputs(torch.zeros(2, 3)).shape
        torch.Size([2, 3])
    """
    if not isinstance(f, Tensor) or f.ndim < 2:
        got = tuple(f.shape) if isinstance(f, Tensor) else type(f).__name__
        raise ValueError(
            f"Expected a model output of shape [n, C], or with classes of positions [n, T, C] or "
            f"[n, C, H, W], got {got}. Remedy: wrap the model so that it returns one row of "
            "outputs per datum, also for a single one: name the dimension of a `.squeeze()`."
        )
    return f


def inner_product(v: Tensor, f: Tensor) -> Tensor:
    """``<v, f>``, whose gradients are those of ``f`` along the backward vectors ``v``, to the bit.

    ``torch.autograd.grad(f, ..., v)`` imports sympy, 0.6 s in a new process; this does not.

    Args:
        v: Backward vectors in the shape of ``f``.
        f: Outputs, attached to their graph.

    Example:
        >>> inner_product(torch.ones(2), torch.ones(2))
        tensor(2.)
    """
    with torch.enable_grad():
        return (f * v).sum()


def count_uses(f: Tensor) -> Counter[int]:
    """Count how often the graph of ``f`` uses each leaf.

    Args:
        f: Output of a network, attached to its graph.

    Returns:
        Numbers of uses by ``id`` of the leaf.

    Example:
        >>> w = torch.ones(1, requires_grad=True)
        >>> count_uses(w * 2 + w)[id(w)]
        2
    """
    uses: Counter[int] = Counter()
    seen: set[Any] = set()
    stack = [f.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for child, _ in node.next_functions:
            if child is not None and hasattr(child, "variable"):
                uses[id(child.variable)] += 1
            else:
                stack.append(child)
    return uses
