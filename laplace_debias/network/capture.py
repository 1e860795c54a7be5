"""Run a model once and take layer inputs and per-class output gradients from it.

A parameter tensor can be taken apart when every use of it in the graph is a call of an ordinary
``nn.Linear`` or ``nn.Conv2d`` that owns it, and when every such call keeps the data apart along
one dimension. Both are checked, not assumed: uses are counted in the autograd graph, and the
dimension of the data is found by comparing a run of one datum with a run of two.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from laplace_debias.network.preserve import evaluation_mode
from laplace_debias.predictive.contractions import patches

Inputs = Tensor | MutableMapping


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer: its input, and where its output sits in the graph.

    Attributes:
        module: The layer.
        a: Its input, as the model gave it.
        shape: Shape of its output.
        version: How often the input had been changed in place when the layer was called.
        edge: The place in the graph at which the gradient of the output is read, or ``None`` if the
            layer ran without gradients.
    """

    module: nn.Module
    a: Tensor
    shape: torch.Size
    version: int
    edge: GradientEdge | None

    def positions(self, n: int) -> int:
        """Return the number of positions per datum."""
        return self.shape.numel() // (n * self.module.weight.shape[0])

    def inputs(self, n: int, dim: int | None, rows: slice) -> Tensor:
        """Return the inputs (patches of a convolution) of some data, ``[m, R, groups, d_in]``.

        Raises:
            RuntimeError: If the input was changed in place after the call.
        """
        if self.a._version != self.version:
            raise RuntimeError(
                f"Expected the input of {self.module} to stay as it was, got one that the model "
                "changed in place after the layer used it. Replace the in-place operation."
            )
        if isinstance(self.module, nn.Conv2d):
            if len(self.a) == n:
                return patches(self.a[rows], self.module)
            return patches(self.a, self.module).flatten(0, 1).unsqueeze(0)  # a single datum
        a = self.a if dim is None else self.a.movedim(dim, 0)
        a = a.reshape(n, -1, 1, a.shape[-1])
        return a[rows]

    def gradients(self, g: Tensor, n: int, dim: int | None) -> Tensor:
        """Bring a gradient of the layer's output to ``[n, d_out, R]``."""
        if isinstance(self.module, nn.Conv2d):
            g = g.flatten(2)  # [n, d_out, R]
            return g if len(g) == n else g.transpose(0, 1).reshape(n, g.shape[1], -1)
        g = g if dim is None else g.movedim(dim, 0)
        return g.reshape(n, -1, g.shape[-1]).transpose(1, 2)


@dataclass(frozen=True)
class Capture:
    """What one run of the model leaves behind.

    Attributes:
        f: Model outputs ``[n, C]``, attached to the graph.
        calls: The calls of every recorded layer, in order.
        uses: How often the graph uses each parameter, by ``id``.
    """

    f: Tensor
    calls: dict[nn.Module, list[LayerCall]]
    uses: Counter[int]


def size_of(x: Inputs, key: str = "input_ids") -> int:
    """Return the number of data in a tensor, or in a mapping of tensors."""
    if isinstance(x, Tensor):
        return len(x)
    if key in x and isinstance(x[key], Tensor):
        return len(x[key])
    return next(len(value) for value in x.values() if isinstance(value, Tensor))


def take(x: Inputs, rows: slice, key: str = "input_ids") -> Inputs:
    """Return some of the data; in a mapping, of every tensor with one row per datum."""
    if isinstance(x, Tensor):
        return x[rows]
    n, part = size_of(x, key), copy.copy(x)
    for name, value in x.items():
        if isinstance(value, Tensor) and value.ndim > 0 and len(value) == n:
            part[name] = value[rows]
    return part


@contextlib.contextmanager
def prediction_mode(model: nn.Module, params: list[nn.Parameter]) -> Iterator[None]:
    """Eval mode, gradients on, ``params`` differentiable; everything is put back afterwards."""
    frozen = [p for p in params if not p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_(True)
        with evaluation_mode(model), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def owners(model: nn.Module, params: list[nn.Parameter]) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return, for the ``id`` of each parameter, the modules that own it and its name there."""
    wanted = {id(p) for p in params}
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if id(p) in wanted:
                found.setdefault(id(p), []).append((module, name))
    return found


def is_ordinary(module: nn.Module) -> bool:
    """Say whether the module computes what ``nn.Linear`` or ``nn.Conv2d`` does, and no more."""
    if "forward" in module.__dict__:
        return False
    cls = type(module)
    if isinstance(module, nn.Conv2d):
        return cls.forward is nn.Conv2d.forward and cls._conv_forward is nn.Conv2d._conv_forward
    return isinstance(module, nn.Linear) and cls.forward is nn.Linear.forward


def run(model: nn.Module, x: Inputs, modules: list[nn.Module], keep_graph: bool = False) -> Capture:
    """Run the model and record the calls of the given layers.

    Args:
        model: The model, inside :func:`prediction_mode`.
        x: A tensor or a mapping of tensors.
        modules: The layers to record.
        keep_graph: Keep the layer inputs attached, to differentiate through them.

    Raises:
        ValueError: If the model's output is not ``[n, C]``.
    """
    calls: dict[nn.Module, list[LayerCall]] = {module: [] for module in modules}

    def record(module: nn.Module, args: tuple, kwargs: Mapping, output: Tensor) -> None:
        a = args[0] if args else kwargs["input"]
        # the edge, not the tensor: an in-place activation would move the tensor on in the graph
        edge = get_gradient_edge(output) if output.requires_grad else None
        a = a if keep_graph else a.detach()
        calls[module].append(LayerCall(module, a, output.shape, a._version, edge))

    handles = [module.register_forward_hook(record, with_kwargs=True) for module in modules]
    try:
        f = model(x)
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(f, Tensor) or f.ndim != 2:
        got = tuple(f.shape) if isinstance(f, Tensor) else type(f).__name__
        raise ValueError(
            f"Expected a model output of shape [n, outputs], got {got}. "
            "Wrap the model so that it returns one row of outputs per datum."
        )
    return Capture(f, calls, count_uses(f))


def count_uses(f: Tensor) -> Counter[int]:
    """Count how often the graph of ``f`` uses each leaf, by ``id`` of the leaf."""
    uses: Counter[int] = Counter()
    seen, stack = set(), [f.grad_fn]
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


def data_dims(
    model: nn.Module, x: Inputs, modules: list[nn.Module], key: str
) -> dict[nn.Module, list[int | None]]:
    """Find the dimension that runs over the data, for every call of every layer.

    A run of one datum is compared with a run of two: the dimension is the one that grows from
    1 to 2. ``None`` where there is no such dimension (data merged with positions, or inputs that
    do not depend on the data).
    """
    one = run(model, take(x, slice(0, 1), key), modules).calls
    two = run(model, take(x, slice(0, 2), key), modules).calls
    dims: dict[nn.Module, list[int | None]] = {}
    for module in modules:
        dims[module] = []
        for p, q in zip(one[module], two[module], strict=False):
            sizes = list(zip(p.a.shape, q.a.shape, strict=False))
            grown = [i for i, (u, v) in enumerate(sizes) if u != v]
            single = p.a.ndim == q.a.ndim and [sizes[i] for i in grown] == [(1, 2)]
            dims[module].append(grown[0] if single else None)
    return dims


def per_datum_jacobians(
    model: nn.Module, x: Inputs, params: list[nn.Parameter], key: str, keep_graph: bool = False
) -> list[Tensor]:
    """Return exact Jacobians ``[n, C, D]`` of some parameters, one datum and output at a time.

    The slow way that works for anything autograd can differentiate.
    """
    rows: list[list[Tensor]] = [[] for _ in params]
    for i in range(size_of(x, key)):
        f = model(take(x, slice(i, i + 1), key)).reshape(-1)
        for c in range(len(f)):
            grads = torch.autograd.grad(
                f[c], params, retain_graph=True, create_graph=keep_graph, allow_unused=True
            )
            for row, g, p in zip(rows, grads, params, strict=True):
                row.append((torch.zeros_like(p) if g is None else g).flatten())
    return [torch.stack(row).unflatten(0, (-1, len(f))) for row in rows]
