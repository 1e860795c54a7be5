r"""THE engine: run passes, count them, and hand each layer's rows to accumulators.

For each trainable weight the block of the GGN is approximated by ``kron(B, A)``, for each bias by
``B``. With backward vectors ``v_nk`` (:func:`laplace_debias.network.vectors.backward_vectors`)::

    B = sum_n w_n sum_k sum_t g_nkt g_nkt^T      g_nkt = (d f_n / d s_nt)^T v_nk
    A = mean_{n,t} a_nt a_nt^T

with ``a_nt`` and ``s_nt`` the layer's input and output for datum n at position t (other ways to sum
positions: :mod:`laplace_debias.kfac.grams`). B is a SUM over data, A a MEAN. The loss is the
cross-entropy or half the squared error, summed over data. Weights ride on V, for B and the loss
alone: the data worth backward passes for B need not be those that serve A.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add

import torch
from torch import Tensor, nn

from laplace_debias.data.chunks import in_pieces
from laplace_debias.data.inputs import Inputs, size_of
from laplace_debias.data.targets import WeightedTargets, apart, check_targets
from laplace_debias.kfac.factors import Block, Factors
from laplace_debias.kfac.few_rows import KFACApprox, as_matrix, total_of
from laplace_debias.kfac.grams import InputGram
from laplace_debias.kfac.interface import EngineInterface
from laplace_debias.kfac.norms import NormGram
from laplace_debias.kfac.originals import OriginalGram
from laplace_debias.kfac.pixels import PixelGram
from laplace_debias.kfac.rotations import input_gram, output_grams
from laplace_debias.kfac.row_counts import RowCounter, input_rows, output_rows
from laplace_debias.kfac.thin import curvatures_of
from laplace_debias.network.calling import (
    call_model,
    check_positions,
    classes_last,
    weights_of_positions,
)
from laplace_debias.network.check import agree
from laplace_debias.network.layers import has_rows_last, is_kfac_layer, is_norm, n_in
from laplace_debias.network.loss import loss_sum, mean_loss_hessian
from laplace_debias.network.ownership import OwnedParameter
from laplace_debias.network.preserve import evaluation_mode
from laplace_debias.network.recorder import Recorder, check_outputs, inner_product
from laplace_debias.network.responses import normalised
from laplace_debias.network.vectors import Fisher, Sampler

__all__ = ["Engine", "kfac_factors"]


@dataclass
class Engine(EngineInterface):
    """The engine that runs the passes; attributes and arguments as :class:`EngineInterface`'s.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> engine = Engine(model, "classification")
        >>> factors = engine.factors(torch.ones(5, 3), torch.tensor([0, 1, 0, 1, 1]))
        >>> [tuple(len(M) for M in block) for block in factors.blocks], engine.cost.backward
        ([(4, 3), (4,), (2, 4), (2,)], 5)
    """

    def factors(
        self,
        X: Inputs,
        targets: Tensor | WeightedTargets | None = None,
        weights: Tensor | None = None,
        *,
        inputs: bool | Container[str] = True,
        outputs: bool = True,
        rows_from: float = math.inf,
        count_rows: bool = False,
        along: Sequence[Block] | None = None,
        few_rows: bool = False,
        pixels: Container[str] = (),
    ) -> Factors:
        """See :meth:`EngineInterface.factors`."""
        if self.chunk is not None and (n := size_of(X, self.key)) > self.chunk:
            again = partial(self.factors, inputs=inputs, outputs=outputs, rows_from=rows_from)
            again = partial(again, count_rows=count_rows, along=along, few_rows=few_rows)
            again = partial(again, pixels=pixels)
            pieces = in_pieces(X, targets, weights, self.key, n, self.chunk)
            return reduce(add, (again(*piece) for piece in pieces))
        y, own = apart(targets)
        if own is not None:
            weights = own if weights is None else own * weights
        weights_only = [p for p in self.owned if p.role == "weight" and not p.has_one_factor]
        if not isinstance(inputs, bool):
            weights_only, inputs = [p for p in weights_only if p.name in inputs], True
        Q = dict(zip(self.names, along or (), strict=along is not None))
        grams = {
            p.name: PixelGram(name=p.name)
            if p.name in pixels
            else input_gram(self.kfac_approx, p.name, Q.get(p.name), few_rows)
            for p in weights_only
            if inputs
        }
        listeners: dict[nn.Module, list[InputGram]] = {}
        for p in weights_only if inputs else ():
            for layer in p.layers:
                listeners.setdefault(layer, []).append(grams[p.name])
        scaled = {
            layer for p in self.owned if p.scales and p.role == "weight" for layer in p.layers
        }
        behind = {p.layers[0] for p in self.owned if p.original is not None and p.role == "weight"}
        rows: dict[nn.Module, list[Tensor]] = {}
        seen: dict[nn.Module, list[tuple[nn.Module, Tensor]]] = {}  # inputs of parametrised layers
        x_hats: dict[nn.Module, list[Tensor]] = {}  # what normalisations scaled, call by call
        to_last = self.kfac_approx == "reduce"
        count_B = [RowCounter(p.name) for p in self.owned if count_rows and outputs]
        count_A = {p.name: RowCounter(p.name) for p in weights_only if count_rows and inputs}

        def on_input(layer: nn.Module, geometry: nn.Module, a: Tensor) -> None:
            for gram in listeners.get(layer, ()):
                if is_kfac_layer(geometry):
                    gram.add(geometry, a)
                    if count_rows:
                        new = input_rows(geometry, a, self.kfac_approx)
                        count_A[gram.name].add(new, to_last=to_last)
            if outputs and layer in scaled and is_norm(layer):
                x_hats.setdefault(layer, []).append(normalised(layer, a))
            if outputs and layer in behind:
                seen.setdefault(layer, []).append((geometry, a.detach()))
            if has_rows_last(layer) and n_in(layer) >= rows_from:
                kept = a.to(torch.promote_types(a.dtype, torch.float32), copy=True)
                rows.setdefault(layer, []).append(kept)

        recorder = Recorder(self.layers, on_input=on_input)
        with self.cost.stage("passes"), evaluation_mode(self.root):
            x = X if self.embed is None else self.embed(X)
            with torch.set_grad_enabled(outputs), recorder.recording():
                f = check_outputs(call_model(self.root, x))
            check_positions(f, self.likelihood, self.fisher)
            white = classes_last(f.detach())  # [n, *positions, C]
            n, C = len(white), white.shape[-1]
            self._check_first(f.detach())
            self.check_called(recorder, outputs)
            weights = weights_of_positions(white, weights)
            if y is not None:
                check_targets(y, white.shape, self.likelihood, self.objective.ignore_index)
                if self.likelihood == "classification":
                    y, counted = self.objective.targets(y, C, white.dtype)
                    if counted is not None:
                        weights = counted if weights is None else weights * counted
                elif self.likelihood == "regression":
                    white, y = self.objective.whitened(white), self.objective.whitened(y)
            n_vectors, B = 0, dict[str, Tensor]()
            if outputs:
                n_vectors, B = self._outputs(
                    f, X, y, weights, recorder, count_B, x_hats, seen, Q, few_rows
                )
        self.cost.forward += n
        self.cost.backward += n * n_vectors
        return Factors(
            self.names,
            tuple(B.get(p.name) for p in self.owned),
            tuple(self._input_factor(p, grams.get(p.name), n) for p in self.owned),
            n,
            C,
            weight=n,
            loss=None if y is None else self._loss(white, y, weights),
            forward=n,
            backward=n * n_vectors,
            outputs=None if outputs else f,
            rows=tuple(
                _one_row_each([r for layer in p.layers for r in rows.get(layer, [])], n)
                if p.role == "weight" and not p.has_one_factor
                else None
                for p in self.owned
            ),
            at_output=tuple(
                not p.has_one_factor
                and len(p.layers) == 1
                and len(recorder.calls[p.layers[0]]) == 1
                and recorder.calls[p.layers[0]][0].is_output(f)
                for p in self.owned
            ),
            n_rows=tuple(
                grams[p.name].n_rows if p.name in grams and self.kfac_approx == "expand" else n
                for p in self.owned
            ),
            row_counts=tuple(
                (
                    count_B[i].result(n) if outputs else None,
                    count_A[p.name].result(n) if p.name in count_A else None,
                )
                for i, p in enumerate(self.owned)
            )
            if count_rows
            else (),
        )

    def _loss(self, f: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
        """Sum over data, and over the positions that count, at outputs ``[n, *positions, C]``."""
        if f.ndim > 2:
            f, y = f.flatten(0, -2), y.flatten(0, f.ndim - 2)
        return loss_sum(f, y, self.likelihood, None if weights is None else weights.reshape(-1))

    def _input_factor(self, p: OwnedParameter, gram: InputGram | None, n: int) -> Tensor | None:
        """A of a weight, zero if no datum was routed to its layer."""
        if gram is None:
            return None
        layer = p.layers[0]
        assert is_kfac_layer(layer)  # normalisations have one factor
        return gram.result(n) if gram.n_rows else gram.zeros(layer)

    def _outputs(
        self,
        f: Tensor,
        X: Inputs,
        y: Tensor | None,
        weights: Tensor | None,
        recorder: Recorder,
        counters: list[RowCounter],
        x_hats: dict[nn.Module, list[Tensor]],
        seen: dict[nn.Module, list[tuple[nn.Module, Tensor]]],
        Q: Mapping[str, Block],
        few_rows: bool,
    ) -> tuple[int, dict[str, Tensor]]:
        """The number of backward vectors, and B of every parameter, or what it is along Q."""
        known: dict[nn.Module, Tensor] = {}
        if self.knows_hessian and not counters:  # at the output B needs no backward pass
            behind = {p.layers[0] for p in self.owned if p.original is not None}
            ends = [
                x
                for x in self.layers
                if is_kfac_layer(x)
                and x not in behind
                and [c.is_output(f) for c in recorder.calls[x]] == [True]
            ]
            if ends:
                rows = classes_last(f.detach()).flatten(0, -2)  # [n * positions, C]
                shares = None if weights is None else weights.reshape(-1)
                H = len(rows) * mean_loss_hessian(rows, self.likelihood, shares)
                known = dict.fromkeys(ends, H.to(torch.promote_types(f.dtype, torch.float32)))

        def along(M: Tensor, name: str) -> Tensor:
            return curvatures_of(as_matrix(M), Q[name][0]) if Q else M

        layers = [layer for layer in self.layers if layer not in known]
        if not layers:
            return 0, {
                p.name: total_of([along(known[m], p.name) for m in p.layers]) for p in self.owned
            }
        self.choose_fisher(f)
        n_vectors, V = self.backward_vectors_of(X, f.detach(), y, weights)
        owned = [p for p in self.owned if not p.has_one_factor]
        with_factors = {layer for p in owned for layer in p.layers}
        names = {m: self.layer_names[m] for m in layers if is_kfac_layer(m) and m in with_factors}
        grams = output_grams(owned, f, self.kfac_approx, names, Q, few_rows)
        scales = {p.name: NormGram(p, f, few_rows or bool(Q)) for p in self.owned if p.scales}
        originals = {p.name: OriginalGram(p, f) for p in self.owned if p.original is not None}
        calls = [call for layer in layers for call in recorder.calls[layer]]
        edges = [call.edge for call in calls if call.edge is not None]  # all, see check_called
        for k, v in enumerate(V):
            gradients = torch.autograd.grad(  # None: the output does not depend on the layer
                inner_product(v, f), edges, retain_graph=k + 1 < n_vectors, allow_unused=True
            )
            self.cost.tick(len(f) / n_vectors)
            found: dict[nn.Module, list[Tensor]] = {layer: [] for layer in self.layers}
            of_call: dict[nn.Module, list[Tensor | None]] = {layer: [] for layer in self.layers}
            for call, g in zip(calls, gradients, strict=True):
                of_call[call.module].append(g)
                if g is not None:
                    found[call.module].append(g)
            for layer, per_basis in grams.items():
                for gram in {id(gram): gram for gram in per_basis.values()}.values():
                    gram.add(found[layer], len(f))
            summed = {name: gram.add(of_call, x_hats, len(f)) for name, gram in scales.items()}
            for name, original in originals.items():
                summed[name] = original.add(of_call, seen, len(f))
            for p, counter in zip(self.owned, counters, strict=False):  # none, or one each
                parts = [
                    output_rows(layer, g, self.kfac_approx)
                    for layer in p.layers
                    if is_kfac_layer(layer)
                    for g in found[layer]
                ]
                row = summed.get(p.name)
                if row is not None:
                    parts = [row.unsqueeze(1)]
                if parts and self.kfac_approx != "expand":
                    parts = [sum(parts[1:], parts[0])]
                for new in parts:
                    counter.add(new)
        B = {
            p.name: total_of(
                [
                    along(known[m], p.name)
                    if m in known
                    else grams[m][p.name if Q else ""].result()
                    for m in p.layers
                ]
            )
            for p in owned
        }
        for name, whole in (scales | originals).items():
            B[name] = along(whole.result(), name)
        return n_vectors, B

    def _check_first(self, f: Tensor) -> None:
        """Raise if the very first datum's output is another one in its mini-batch."""
        expected, self.first_output = self.first_output, None
        if expected is not None and not agree(f[:1], expected):
            raise ValueError(
                "Expected one row of outputs for each datum, whatever passes with it, got another "
                f"output of the first datum by itself than among {len(f)}. Remedy: let the model "
                "treat each datum by itself, and normalise with statistics of the training. "
                "`verify=False` turns this check off."
            )


def kfac_factors(
    model: nn.Module,
    X: Inputs,
    y: Tensor | None = None,
    *,
    likelihood: str,
    params: Iterable[Tensor] | None = None,
    weights: Tensor | None = None,
    fisher: Fisher = "exact",
    kfac_approx: KFACApprox = "expand",
    sampler: Sampler = "trace",
    generator: torch.Generator | None = None,
    inputs: bool = True,
    outputs: bool = True,
    rows_from: float = math.inf,
    count_rows: bool = False,
) -> Factors:
    """K-FAC factors of one mini-batch: an :class:`Engine` for a single use.

    Args:
        model: See :class:`Engine`.
        X: See :meth:`Engine.factors`.
        y: See :meth:`Engine.factors`.
        likelihood: See :class:`Engine`.
        params: See :class:`Engine`.
        weights: See :meth:`Engine.factors`.
        fisher: See :class:`Engine`.
        kfac_approx: See :class:`Engine`.
        sampler: See :class:`Engine`.
        generator: See :class:`Engine`.
        inputs: See :meth:`Engine.factors`.
        outputs: See :meth:`Engine.factors`.
        rows_from: See :meth:`Engine.factors`.
        count_rows: See :meth:`Engine.factors`.

    Returns:
        The factors.

    Raises:
        ValueError: As :class:`Engine` and :meth:`Engine.factors`.

    Example:
        >>> X = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
        >>> kfac_factors(nn.Linear(2, 1), X, likelihood="regression", outputs=False).A[0]
        tensor([[0.5000, 0.0000], [0.0000, 4.5000]])
    """
    engine = Engine(model, likelihood, fisher, kfac_approx, sampler, generator, params=params)
    return engine.factors(
        X,
        y,
        weights,
        inputs=inputs,
        outputs=outputs,
        rows_from=rows_from,
        count_rows=count_rows,
    )


def _one_row_each(calls: list[Tensor], n: int) -> Tensor | None:
    """The kept rows of a linear layer, if it was called once and saw one row for each of n data."""
    return calls[0] if len(calls) == 1 and calls[0].ndim == 2 and len(calls[0]) == n else None
