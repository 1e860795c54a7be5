"""From a captured run to rotated Jacobians and their contractions, one parameter tensor at a time.

This is where the maths of :mod:`laplace_debias.predictive.contractions` meets the layers that
:mod:`laplace_debias.predictive.probing` recorded.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs, Keys, size_of, take, tensors_of
from laplace_debias.network.layers import has_rows_last, is_norm, is_transposed
from laplace_debias.network.ownership import is_ordinary, owners
from laplace_debias.network.unfold import patch_order
from laplace_debias.network.verify import verify_data
from laplace_debias.predictive import contractions as maths
from laplace_debias.predictive.eigenblocks import EigenBlock
from laplace_debias.predictive.probing import (
    Capture,
    call_gradients,
    call_inputs,
    call_normalised,
    data_dims,
    per_datum_jacobians,
    run,
)
from laplace_debias.predictive.row_check import Source, misplaced_rows


class LayerJacobians:
    """Contract the Jacobian of a model with the blocks of a posterior.

    Args:
        model: The model.
        blocks: The blocks of the posterior, each with its parameter.
        key: Key of the input tensor in a mapping.
        keep_graph: Allow differentiating the results with respect to the inputs.
        verify: Whether to check on a few data that the recorded rows make up the Jacobian.
        targets: Key of the targets in a mapping, if there are any.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[EigenBlock],
        key: Keys,
        keep_graph: bool = False,
        verify: bool = True,
        targets: str = "labels",
    ) -> None:
        self.model, self.blocks, self.key, self.keep_graph = model, blocks, key, keep_graph
        self.owners = owners(model, [block.param for block in blocks])
        self.modules = list(
            dict.fromkeys(m for found in self.owners.values() for m, _ in found if is_ordinary(m))
        )
        self.dims: dict[nn.Module, list[int | None]] | None = None
        self.verify, self.targets, self._verified = verify, targets, set[bool]()
        self._misplaced: set[int] = set()
        self._warned: set[str] = set()
        self._bytes: dict[object, int] = {}
        self._scratch = threading.local()  # two threads must not share an array of gradients

    def prepare(self, x: Inputs) -> int:
        """Look at one or two data; return the bytes that a datum will need.

        Counted are the output gradients of all layers and outputs, the activations the graph
        holds, and the Jacobians that have to be formed.
        """
        n = size_of(x, self.key)
        if self.dims is None and n > 1:
            self.dims = data_dims(self.model, x, self.modules, self.key)
        if self.verify and (n > 1) not in self._verified:
            self._check(x)
            self._verified.add(n > 1)
        known = (n > 1, *((t.shape[1:], t.dtype) for t in tensors_of(x)))
        if known in self._bytes:
            return self._bytes[known]
        m = min(n, 2)  # as many as it takes to tell the data apart
        probe = run(self.model, take(x, slice(0, m), self.key), self.modules)
        C, held = probe.f.shape[1], 1
        for call in (call for calls in probe.calls.values() for call in calls):
            held += ((C + 4) * call.shape.numel() + 2 * call.kept_input.numel()) // m
        for i, block in enumerate(self.blocks):
            if i in self._misplaced or isinstance(self._sources(block, probe, m), str):
                held += 2 * C * block.param.numel()  # its Jacobian will be formed
        self._bytes[known] = (
            held * torch.finfo(torch.promote_types(probe.f.dtype, torch.float32)).bits // 8
        )
        return self._bytes[known]

    def _check(self, x: Inputs) -> None:
        """Find the parameters whose rows do not make up the Jacobian of a few data."""
        verify_data(self.model, x, self.key, self.targets)
        self._misplaced |= misplaced_rows(
            self.model, x, self.key, self.modules, [block.param for block in self.blocks],
            lambda i, capture, n: self._sources(self.blocks[i], capture, n),
        )  # fmt: skip

    def contract(
        self, x: Inputs, mode: str, posteriors: Sequence[list[EigenBlock]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs ``[n, C]`` and, per posterior, the sum of its blocks' contractions.

        The posteriors share the passes through the model.

        Args:
            x: The data.
            mode: ``"variance"`` (``[n, C, k]``), ``"covariance"`` (``[n, C, C, k]``) or
                ``"joint"`` (``[n * C, n * C, k]``).
            posteriors: Blocks of each posterior, for the same parameters as this object's.
        """
        capture = run(self.model, x, self.modules, self.keep_graph)
        n, C = capture.f.shape
        sources: dict[int, list[Source]] = {}
        others: list[int] = []
        slow: dict[str, str] = {}
        for i, block in enumerate(self.blocks):
            found = self._sources(block, capture, n)
            if i in self._misplaced and not isinstance(found, str):
                found = "what its layer recorded is not what the model does, or of other data"
            if isinstance(found, str):
                slow[block.name] = found
                others.append(i)
            elif found:
                sources[i] = found

        self._warn(slow)
        gradients = self._gradients(capture, sources)
        jacobians: dict[int, Tensor] = {}
        if others:
            params = [self.blocks[i].param for i in others]
            dense = per_datum_jacobians(self.model, x, params, self.key, self.keep_graph)
            jacobians = dict(zip(others, dense, strict=True))
        structured = [
            self._structured([blocks[i] for blocks in posteriors], sources[i], gradients, mode)
            for i in sources
        ]
        totals = []
        for number, blocks in enumerate(posteriors):
            parts = [moments[number] for moments in structured]
            for i, J in jacobians.items():
                chunks = maths.dense_jacobians(
                    J.to(blocks[i].lam.dtype), blocks[i].Q, mode == "joint"
                )
                parts.append(maths.contract(chunks, blocks[i].inverses, mode))
            if not parts:  # no parameter has any influence
                shape = {"variance": (n, C), "covariance": (n, C, C), "joint": (n * C, n * C)}
                parts = [blocks[0].lam.new_zeros(*shape[mode], len(blocks[0].delta))]
            totals.append(sum(parts[1:], parts[0])[..., : len(blocks[0].delta)])
        return capture.f, totals

    def _sources(self, block: EigenBlock, capture: Capture, n: int) -> list[Source] | str:
        """Return the calls that make up a block's Jacobian, or why there is no such list."""
        found = self.owners.get(id(block.param), [])
        for module, name in found:
            if name not in ("weight", "bias") or not is_ordinary(module):
                return f"{type(module).__name__} is not an ordinary Linear, Conv2d or norm"
        sources: list[Source] = []
        for module, _ in found:
            calls = capture.calls[module]
            dims = (self.dims or {}).get(module, []) if n > 1 else [None] * len(calls)
            if len(dims) != len(calls):
                return "its layer is not called equally often for all inputs"
            sources += zip(calls, dims, strict=True)
        if any(call.edge is None for call, _ in sources):
            return "its layer runs without gradients"
        if capture.uses[id(block.param)] != len(sources):
            return "it is used outside the layer that owns it"
        for call, dim in sources:
            conv = isinstance(call.module, nn.Conv2d)
            first = conv or not has_rows_last(call.module)  # data first, channels second
            first &= not isinstance(call.module, nn.LayerNorm | nn.RMSNorm)
            if (conv and call.kept_input.ndim != 4) or (
                n > 1 and (dim is None or (first and dim != 0))
            ):
                return "its layer does not keep the data apart along one dimension"
            if n > 1 and dim is not None and call.kept_input.shape[dim] != n:
                return "its layer sees some of the data only"
        if len({getattr(call.module, "groups", 1) for call, _ in sources}) > 1:
            return "it is shared by convolutions with different groups"
        return sources

    def _warn(self, slow: dict[str, str]) -> None:
        """Say once for which parameters the slow exact way is taken, and why."""
        new = {name: reason for name, reason in slow.items() if name not in self._warned}
        self._warned |= set(new)
        if new:
            first, reason = next(iter(new.items()))
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            warnings.warn(
                f"The Jacobian of {first!r}{more} is computed one datum and output at a time, "
                f"which is exact but slow: {reason}. Freeze what is concerned, or write it with "
                f"nn.Linear and nn.Conv2d, to take the fast way. All of them: {', '.join(new)}.",
                stacklevel=6,
            )

    def _gradients(self, capture: Capture, sources: dict[int, list[Source]]) -> dict[int, Tensor]:
        """Return the gradient of every output at every call, ``[n, C, d_out, R]`` by ``id``.

        One backward pass per output, without weight gradients. A loop, because batched passes
        over all outputs leave the cache and were slower by up to three times.
        """
        calls = {id(call): (call, dim) for found in sources.values() for call, dim in found}
        needed = list(calls.values())
        n, C = capture.f.shape
        dtype = torch.promote_types(capture.f.dtype, torch.float32)
        if not needed:
            return {}
        edges = [call.edge for call, _ in needed if call.edge is not None]  # all, see _sources
        shapes = [(n, C, call.d_out, call.positions(n)) for call, _ in needed]
        kept: list[list[Tensor]] = [[] for _ in needed]
        if not self.keep_graph:
            buffers = self._reserve(shapes, capture.f.new_empty(0, dtype=dtype))
        for c in range(C):
            e_c = torch.zeros_like(capture.f)
            e_c[:, c] = 1
            grads = torch.autograd.grad(
                capture.f,
                edges,
                e_c,
                retain_graph=self.keep_graph or c + 1 < C,
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

    def _structured(
        self,
        blocks: Sequence[EigenBlock],
        sources: list[Source],
        gradients: dict[int, Tensor],
        mode: str,
    ) -> list[Tensor]:
        """Contract one parameter's block of every posterior from layer inputs and gradients."""
        with torch.set_grad_enabled(self.keep_graph):
            Gs = [gradients[id(call)] for call, _ in sources]
            G = torch.cat(Gs, dim=-1) if len(Gs) > 1 else Gs[0]  # [n, C, d_out, R]
            n, R = len(G), G.shape[-1]
            module, first = sources[0][0].module, blocks[0]

            def inputs(rows: slice) -> Tensor:
                parts = [
                    call_inputs(call, n, dim, rows).to(first.lam.dtype) for call, dim in sources
                ]
                return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

            J = None
            if first.param is module._parameters.get("bias"):
                J = G.sum(-1)
            elif is_norm(module):
                x_hats = [call_normalised(call, module, n, dim) for call, dim in sources]
                x_hat = torch.cat(x_hats, dim=-1).to(first.lam.dtype)  # [n, d, R]
                J = torch.einsum("ncdr,ndr->ncd", G, x_hat)
            elif len(first.Q) == 1:  # a weight of one element has a single factor
                J = torch.einsum("ncor,nrgi->ncogi", G, inputs(slice(0, n))).flatten(2)
            if J is not None:
                return [
                    maths.contract(
                        maths.dense_jacobians(J, block.Q, mode == "joint"), block.inverses, mode
                    )
                    for block in blocks
                ]
            if is_transposed(module):
                blocks = [block.turned for block in blocks]
            bases = [(block.Q[0], block.Q[1]) for block in blocks]
            if isinstance(module, nn.Conv2d):
                bases = [(Q_B, patch_order(Q_A, module)) for Q_B, Q_A in bases]
            if R == 1 and getattr(module, "groups", 1) == 1 and mode != "joint":
                A, results = inputs(slice(0, n)).flatten(1), []
                for block, (Q_B, Q_A) in zip(blocks, bases, strict=True):
                    g, a = G.squeeze(-1) @ Q_B, A @ Q_A
                    sides = [maths.input_side(a, w) for w in block.inverses(input_first=True)]
                    results.append(maths.contract([g], partial(iter, sides), mode))
                return results
            inverses = [partial(_rows_of, block) for block in blocks]
            return maths.weight_moments(inputs, G, bases, inverses, mode)


def _rows_of(block: EigenBlock, rows: slice) -> Iterable[Tensor]:
    """Posterior variances of some output directions of a weight."""
    return block.inverses(rows=rows)
