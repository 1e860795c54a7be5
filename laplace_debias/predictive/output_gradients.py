"""Gradients of chosen outputs at every layer: one backward pass per column of classes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs, Keys, size_of, take
from laplace_debias.network.calling import call_model, flat_outputs
from laplace_debias.predictive.probing import Capture, Source, call_gradients

__all__ = [
    "Choose",
    "OutputGradients",
    "all_classes",
    "by_need",
    "grouped_moments",
    "top_classes",
    "with_exact",
]

Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Turns outputs ``[n, C]`` into classes ``[n, m]`` and which of them each datum needs."""


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


def top_classes(
    f: Tensor, mass: float = 1e-4, most: int = 20, least: int = 1
) -> tuple[Tensor, Tensor]:
    r"""The classes that carry the probability: all but ``mass`` of each datum's, if few do.

    What a datum needs depends on itself alone; m is what the neediest of them needs.

    Args:
        f: Logits ``[n, C]``.
        mass: Probability that may be left out.
        most: Most classes to choose.
        least: Fewest classes that a datum needs.

    Returns:
        Indices ``[n, m]``, the most probable first, and which of them each datum needs, ``[n, m]``.

    Example:
        >>> top_classes(torch.tensor([[0.0, 30.0, 1.0], [30.0, 30.0, 1.0]]))
        (tensor([[1, 2], [0, 1]]), tensor([[ True, False], [ True,  True]]))
    """
    p, order = f.detach().double().softmax(-1).sort(stable=True, dim=-1, descending=True)
    left_out = 1 - p.cumsum(-1)  # after the first, the second, ...
    needed = ((left_out > mass).sum(-1) + 1).clamp(least, most).clamp(max=f.shape[1])
    m = int(needed.max())
    return order[:, :m], torch.arange(m, device=f.device) < needed.unsqueeze(-1)


def by_need(
    model: nn.Module, x: Inputs, key: Keys, choose: Choose, size: int, few: int = 32
) -> Tensor:
    """Numbers of the data, those that need the fewest classes first.

    A chunk of data takes a backward pass for every class that its neediest datum needs.

    Args:
        model: The model.
        x: The data.
        key: Key of the input tensor in a mapping.
        choose: Says which classes are needed, e.g. :func:`top_classes`.
        size: Number of data that may run through the model at once.
        few: Fewer data than these are left as they are, without a pass.

    Returns:
        Indices ``[n]``.

    Example:
        >>> f = torch.tensor([[9.0, 9.0, 9.0], [30.0, 0.0, 0.0], [9.0, 9.0, 0.0]])
        >>> by_need(nn.Identity(), f, "x", top_classes, size=2, few=2)
        tensor([1, 2, 0])
    """
    n, step = size_of(x, key), max(1, size)
    if n < few:
        return torch.arange(n)
    with torch.no_grad():
        parts = [take(x, slice(i, i + step), key) for i in range(0, n, step)]
        f = torch.cat([flat_outputs(call_model(model, part)) for part in parts])
    return choose(f)[1].sum(-1).argsort(stable=True)


def with_exact(rest: Tensor, exact: Tensor, classes: Tensor, needed: Tensor) -> Tensor:
    """Put exact variances ``[n, m, k]`` of the needed classes ``[n, m]`` into ``rest [n, C, k]``.

    Example:
        >>> rest, classes = torch.zeros(1, 3, 1), torch.tensor([[2, 0]])
        >>> with_exact(rest, torch.ones(1, 2, 1), classes, torch.tensor([[True, False]])).flatten()
        tensor([0., 0., 1.])
    """
    index = classes.unsqueeze(-1).expand(exact.shape)
    return rest.scatter(1, index, exact.where(needed.unsqueeze(-1), rest.gather(1, index)))


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
            with torch.enable_grad():
                f_c = capture.f.gather(1, classes[:, c : c + 1]).sum()
            grads = torch.autograd.grad(
                f_c,
                edges,
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


def grouped_moments(
    moments: Callable[[Tensor, bool], list[Tensor]],
    classes: Tensor,
    mode: str,
    group: int,
    at_once: int | None = None,
    *,
    apart: bool = False,
) -> list[Tensor]:
    """Moments of all outputs of a datum.

    Args:
        moments: Contracts some outputs; the second argument says whether they are the last.
        classes: Numbers of the outputs, ``[n, F]``, position by position.
        mode: ``"variance"``, ``"covariance"`` or ``"joint"``.
        group: Number C of outputs of a position.
        at_once: Most outputs to contract at once; all by default.
        apart: Whether moments have a leading dimension of blocks.

    Returns:
        Per posterior ``[n, F, k]``, ``[n, F / C, C, C, k]`` or what ``"joint"`` gives.

    Example:
        >>> def moments(classes, last):
        ...     one = classes.double()
        ...     return [(one.unsqueeze(2) * one.unsqueeze(1)).unsqueeze(-1)]
        >>> grouped_moments(moments, torch.arange(6).expand(2, 6), "covariance", 3)[0].shape
        torch.Size([2, 2, 3, 3, 1])
    """
    F = classes.shape[1]
    if mode == "joint":
        return moments(classes, True)
    if mode == "variance":
        parts = classes.split(at_once or F, dim=1)
        pieces = [moments(part, i + 1 == len(parts)) for i, part in enumerate(parts)]
        if len(pieces) == 1:
            return pieces[0]
        return [torch.cat(c, dim=1 + apart) for c in zip(*pieces, strict=True)]
    found = []
    positions = classes.split(group, dim=1)
    for i, own in enumerate(positions):
        last = i + 1 == len(positions)
        if at_once is None or at_once >= own.shape[1]:
            found.append(moments(own, last))
        else:
            found.append(_by_pairs(moments, own.split(max(1, at_once // 2), dim=1), last))
    return [torch.stack(c, dim=1 + apart) for c in zip(*found, strict=True)]


def _by_pairs(
    moments: Callable[[Tensor, bool], list[Tensor]], parts: Sequence[Tensor], last: bool
) -> list[Tensor]:
    """Covariances of all outputs from those of any two parts of them."""
    rows: list[list[list[Tensor]]] = []  # [part][other part][posterior]
    for i, one in enumerate(parts):
        rows.append([[t.transpose(1, 2) for t in rows[j][i]] for j in range(i)])
        for j, two in enumerate(parts[i:], i):
            both = moments(
                one if i == j else torch.cat([one, two], dim=1), last and i + 1 == len(parts)
            )
            m = one.shape[1]
            rows[i].append([t if i == j else t[:, :m, m:] for t in both])
    n_posteriors = len(rows[0][0])
    return [
        torch.cat([torch.cat([piece[p] for piece in row], dim=2) for row in rows], dim=1)
        for p in range(n_posteriors)
    ]
