"""Gradients of chosen outputs at every layer: one backward pass per column of classes."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from laplace_debias.predictive.probing import Capture, Source, call_gradients

__all__ = ["OutputGradients", "all_classes", "top_classes"]


def all_classes(f: Tensor) -> Tensor:
    """Every class of every datum.

    Args:
        f: Network outputs ``[n, C]``.

    Returns:
        Indices ``[n, C]``.

    Example:
        >>> all_classes(torch.zeros(2, 3))
        tensor([[0, 1, 2], [0, 1, 2]])
    """
    return torch.arange(f.shape[1], device=f.device).expand(f.shape)


def top_classes(f: Tensor, mass: float = 1e-4, most: int = 20) -> Tensor:
    r"""The classes that carry the probability: all but ``mass`` of it for every datum, if few do.

    Args:
        f: Logits ``[n, C]``.
        mass: Probability that may be left out.
        most: Most classes to choose.

    Returns:
        Indices ``[n, m]``, the most probable first; m is the same for all data.

    Example:
        >>> top_classes(torch.tensor([[0.0, 30.0, 1.0], [30.0, 0.0, 1.0]]))
        tensor([[1], [0]])
    """
    p, order = f.detach().double().softmax(-1).sort(-1, descending=True)
    left_out = 1 - p.cumsum(-1)  # after the first, the second, ...
    needed = int((left_out > mass).sum(-1).max()) + 1
    return order[:, : min(needed, most, f.shape[1])]


class OutputGradients:
    """Backward passes of single outputs, with arrays that are used again from chunk to chunk.

    Args:
        keep_graph: Whether the gradients stay attached, to differentiate through them.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self.keep_graph = keep_graph
        self._scratch = threading.local()  # two threads must not share an array of gradients

    def __call__(
        self, capture: Capture, sources: dict[int, list[Source]], classes: Tensor, last: bool = True
    ) -> dict[int, Tensor]:
        """Gradients of the chosen outputs at every call.

        One backward pass per column of classes, without weight gradients. A loop, because batched
        passes over all outputs leave the cache and were slower by up to three times.

        Args:
            capture: A run of the model.
            sources: The calls that make up each block's Jacobian.
            classes: The outputs, ``[n, m]``.
            last: Whether the graph may be freed at the end.

        Returns:
            ``[n, m, d_out, R]`` by the ``id`` of each call.
        """
        calls = {id(call): (call, dim) for found in sources.values() for call, dim in found}
        needed = list(calls.values())
        n, m = classes.shape
        dtype = torch.promote_types(capture.f.dtype, torch.float32)
        if not needed:
            return {}
        edges = [call.edge for call, _ in needed if call.edge is not None]  # all, see _sources
        shapes = [(n, m, call.d_out, call.positions(n)) for call, _ in needed]
        kept: list[list[Tensor]] = [[] for _ in needed]
        if not self.keep_graph:
            buffers = self._reserve(shapes, capture.f.new_empty(0, dtype=dtype))
        for c in range(m):
            e_c = torch.zeros_like(capture.f).scatter_(1, classes[:, c : c + 1], 1)
            grads = torch.autograd.grad(
                capture.f,
                edges,
                e_c,
                retain_graph=self.keep_graph or c + 1 < m or not last,
                create_graph=self.keep_graph,
                allow_unused=True,
            )
            for i, ((call, dim), g) in enumerate(zip(needed, grads, strict=True)):
                g = capture.f.new_zeros(call.shape) if g is None else g
                g = call_gradients(call, g, n, dim)
                if self.keep_graph:
                    kept[i].append(g.to(dtype))
                else:
                    buffers[i][:, c].copy_(g)
        if self.keep_graph:
            buffers = [torch.stack(g, dim=1) for g in kept]
        return {id(call): G for (call, _), G in zip(needed, buffers, strict=True)}

    def _reserve(self, shapes: Sequence[tuple[int, ...]], like: Tensor) -> list[Tensor]:
        """Return arrays of the given shapes, from the last chunk's memory where it suffices.

        Fresh pages for every chunk would cost as much as writing the gradients to them.
        """
        numels = [math.prod(shape) for shape in shapes]
        flat = getattr(self._scratch, "flat", None)
        if flat is None or flat.dtype != like.dtype or flat.numel() < sum(numels):
            flat = self._scratch.flat = like.new_empty(sum(numels))
        parts = flat[: sum(numels)].split(numels)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
