"""From a captured run to rotated Jacobians and their contractions, one parameter tensor at a time.

This is where the maths of :mod:`laplace_debias.predictive.contractions` meets the layers that
:mod:`laplace_debias.predictive.probing` recorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs, Keys, size_of, take, tensors_of
from laplace_debias.kfac.thin import coordinates
from laplace_debias.network.layers import has_rows_last, is_norm, is_transposed
from laplace_debias.network.ownership import owners
from laplace_debias.network.recorder import LayerCall
from laplace_debias.network.unfold import patch_order
from laplace_debias.network.verify import verify_data
from laplace_debias.predictive import contractions as maths
from laplace_debias.predictive.eigenblocks import EigenBlock
from laplace_debias.predictive.last_layer import last_layer_moments
from laplace_debias.predictive.output_gradients import (
    Choose,
    OutputGradients,
    all_classes,
    grouped_moments,
    with_exact,
)
from laplace_debias.predictive.position_pairs import pair_moments, pairs_pay
from laplace_debias.predictive.probing import (
    Capture,
    Source,
    call_inputs,
    call_normalised,
    data_dims,
    is_recorded,
    per_datum_jacobians,
    run,
)
from laplace_debias.predictive.row_check import misplaced_rows


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
            dict.fromkeys(m for found in self.owners.values() for m, _ in found if is_recorded(m))
        )
        self.dims: dict[nn.Module, list[int | None]] | None = None
        self.verify, self.targets, self._verified = verify, targets, set[bool]()
        self._misplaced: set[int] = set()
        self._warned: set[str] = set()
        self._bytes: dict[object, tuple[int, int]] = {}
        self._sizes: dict[object, tuple[int, int]] = {}
        self._gradients = OutputGradients(keep_graph)
        self.has_output_layer = False

    def prepare(self, x: Inputs) -> tuple[int, int]:
        """Look at one or two data; return the bytes that a datum needs, and each of its outputs.

        Counted are the activations the graph holds, and for each output the gradients at all layers
        and the Jacobians that have to be formed.
        """
        n = size_of(x, self.key)
        if self.dims is None and n > 1:
            self.dims = data_dims(self.model, x, self.modules, self.key)
        if self.verify and (n > 1) not in self._verified:
            self._check(x)
            self._verified.add(n > 1)
        known = self._form(x, n)
        if known in self._bytes:
            return self._bytes[known]
        m = min(n, 2)  # as many as it takes to tell the data apart
        probe = run(self.model, take(x, slice(0, m), self.key), self.modules)
        held, per_output = 1, 1
        for call in (call for calls in probe.calls.values() for call in calls):
            held += (4 * call.shape.numel() + 2 * call.kept_input.numel()) // m
            per_output += call.shape.numel() // m
        for i, block in enumerate(self.blocks):
            if i in self._misplaced or isinstance(self._sources(block, probe, m), str):
                per_output += 2 * block.param.numel()  # its Jacobian will be formed
        self.has_output_layer = bool(self._output_layer(probe))
        size = torch.finfo(torch.promote_types(probe.f.dtype, torch.float32)).bits // 8
        self._sizes[known] = (probe.f.shape[1], probe.shape[-1])
        self._bytes[known] = (held * size, per_output * size)
        return self._bytes[known]

    def _form(self, x: Inputs, n: int) -> tuple[object, ...]:
        """What the memory of a datum and the number of its outputs depend on."""
        return (n > 1, *((t.shape[1:], t.dtype) for t in tensors_of(x)))

    def n_outputs(self, x: Inputs) -> tuple[int, int]:
        """Number of a datum's outputs, of all positions and of each; see :meth:`prepare`."""
        self.prepare(x)
        return self._sizes[self._form(x, size_of(x, self.key))]

    def _check(self, x: Inputs) -> None:
        """Find the parameters whose rows do not make up the Jacobian of a few data."""
        verify_data(self.model, x, self.key, self.targets)
        self._misplaced |= misplaced_rows(
            self.model, x, self.key, self.modules, [block.param for block in self.blocks],
            lambda i, capture, n: self._sources(self.blocks[i], capture, n),
        )  # fmt: skip

    def contract(
        self,
        x: Inputs,
        mode: str,
        posteriors: Sequence[list[EigenBlock]],
        at_once: int | None = None,
        choose: Choose | None = None,
        *,
        apart: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs ``[n, *positions, C]`` and, per posterior, the sum over its blocks.

        The posteriors share the passes through the model.

        Args:
            x: The data.
            mode: ``"variance"`` (``[n, *positions, C, k]``), ``"covariance"``
                (``[n, *positions, C, C, k]``) or ``"joint"`` (``[n * C, n * C, k]``).
            posteriors: Blocks of each posterior, for the same parameters as this object's.
            at_once: Most outputs whose gradients are held at once; all by default. Covariances of
                outputs in different parts take their passes once per pair of parts.
            choose: For ``"variance"``: turns outputs into classes ``[n, m]`` and which of them get
                exact variances. Those of all others are the output layer's alone.
            apart: Whether to leave the blocks apart, ``[n_blocks, ...]``, instead of their sum.
        """
        capture = run(self.model, x, self.modules, self.keep_graph)
        n = len(capture.f)
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
        moments = partial(self._moments, x, capture, mode, posteriors, sources, others, apart)
        classes, needed = (all_classes(capture.f), None) if choose is None else choose(capture.f)
        totals = grouped_moments(moments, classes, mode, capture.shape[-1], at_once, apart=apart)
        if needed is not None:
            rest = [self._output_layer_moments(capture, blocks) for blocks in posteriors]
            both = zip(rest, totals, strict=True)
            totals = [with_exact(own, exact, classes, needed) for own, exact in both]
        if mode == "covariance":  # positions, then classes
            totals = [t.unflatten(1 + apart, capture.shape[1:-1] or (1,)) for t in totals]
            if len(capture.shape) == 2:
                totals = [t.squeeze(1 + apart) for t in totals]
        elif mode == "variance" and len(capture.shape) > 2:
            totals = [t.unflatten(1 + apart, capture.shape[1:]) for t in totals]
        return capture.f.reshape(capture.shape), totals

    def _moments(
        self,
        x: Inputs,
        capture: Capture,
        mode: str,
        posteriors: Sequence[list[EigenBlock]],
        sources: dict[int, list[Source]],
        others: list[int],
        apart: bool,
        classes: Tensor,
        last: bool = True,
    ) -> list[Tensor]:
        """Contractions of the chosen outputs ``classes [n, m]``, one per posterior."""
        n, m = classes.shape
        gradients = self._gradients(capture, sources, classes, last)
        jacobians: dict[int, Tensor] = {}
        if others:
            params = [self.blocks[i].param for i in others]
            dense = per_datum_jacobians(self.model, x, params, self.key, self.keep_graph, classes)
            jacobians = dict(zip(others, dense, strict=True))
        structured = [
            self._structured([blocks[i] for blocks in posteriors], sources[i], gradients, mode)
            for i in sources
        ]
        totals = []
        for number, blocks in enumerate(posteriors):
            parts = {i: moments[number] for i, moments in zip(sources, structured, strict=True)}
            for i, J in jacobians.items():
                chunks = maths.dense_jacobians(
                    J.to(blocks[i].lam.dtype), blocks[i].Q, mode == "joint"
                )
                parts[i] = maths.contract(chunks, blocks[i].inverses, mode)
            k, names = len(blocks[0].delta), range(len(blocks)) if apart or not parts else parts
            shape = {"variance": (n, m), "covariance": (n, m, m), "joint": (n * m, n * m)}[mode]
            nothing = blocks[0].lam.new_zeros(()).expand(*shape, k)  # parameter without influence
            kept = [parts.get(i, nothing)[..., :k] for i in names]
            totals.append(torch.stack(kept) if apart else sum(kept[1:], kept[0]))
        return totals

    def _output_layer(self, capture: Capture) -> dict[int, LayerCall]:
        """The blocks of a linear layer whose output is the network's, with its call."""
        found = {}
        for i, block in enumerate(self.blocks):
            owners = self.owners.get(id(block.param), [])
            calls = [call for module, _ in owners for call in capture.calls.get(module, [])]
            if len(calls) == 1 and capture.f.shape == capture.shape:
                if not calls[0].is_output(capture.f):
                    continue
                if isinstance(calls[0].module, nn.Linear) and len(block.Q) <= 2:
                    found[i] = calls[0]
        return found

    def _output_layer_moments(self, capture: Capture, blocks: list[EigenBlock]) -> Tensor:
        """Variances ``[n, C, k]`` of all outputs from the output layer alone."""
        found = self._output_layer(capture)
        phi = next(iter(found.values())).kept_input.to(blocks[0].lam.dtype)
        with torch.set_grad_enabled(self.keep_graph):
            return last_layer_moments([blocks[i] for i in found], capture.f, phi, "variance")

    def _sources(self, block: EigenBlock, capture: Capture, n: int) -> list[Source] | str:
        """Return the calls that make up a block's Jacobian, or why there is no such list."""
        found = self.owners.get(id(block.param), [])
        for module, name in found:
            if name not in ("weight", "bias") or not is_recorded(module):
                return f"{type(module).__name__} is not a Linear, Conv2d or norm"
        sources: list[Source] = []
        for module, name in found:
            calls = capture.calls[module]
            if any(name not in call.used for call in calls):
                return f"{type(module).__name__} has a forward of its own that changes it"
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
        if len({getattr(call.geometry, "groups", 1) for call, _ in sources}) > 1:
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
            module, first = sources[0][0].module, blocks[0]
            G = torch.cat(Gs, dim=-1) if len(Gs) > 1 else Gs[0]  # [n, C, d_out, R]
            n, C, _, R = (G := G.to(first.lam.dtype)).shape
            geometry = sources[0][0].geometry  # of the kernel that was used

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
            if isinstance(geometry, nn.Conv2d):
                bases = [(Q_B, patch_order(Q_A, geometry)) for Q_B, Q_A in bases]
            one = getattr(geometry, "groups", 1) == 1
            if R == 1 and one and mode != "joint":
                A, results = inputs(slice(0, n)).flatten(1), []
                for block, (Q_B, Q_A) in zip(blocks, bases, strict=True):
                    g, a = coordinates(G.squeeze(-1), Q_B), coordinates(A, Q_A)
                    sides = [maths.input_side(a, w) for w in block.inverses(input_first=True)]
                    results.append(maths.contract([g], partial(iter, sides), mode))
                return results
            if one and mode == "variance" and R < 3 * C and pairs_pay(G, bases[0], first.delta):
                ws = [partial(block.inverses, input_first=True) for block in blocks]
                return [pair_moments(inputs, G, *Q, w) for Q, w in zip(bases, ws, strict=True)]
            inverses = [lambda rows, b=block: b.inverses(rows=rows) for block in blocks]
            return maths.weight_moments(inputs, G, bases, inverses, mode)
