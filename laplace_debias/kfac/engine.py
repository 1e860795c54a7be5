r"""THE engine: run passes, count them, and hand each layer's rows to accumulators.

For each trainable weight the block of the GGN is approximated by ``kron(B, A)``, for each bias by
``B``. With backward vectors ``v_nk`` (:func:`laplace_debias.network.loss.backward_vectors`)::

    B = sum_n w_n sum_k sum_t g_nkt g_nkt^T      g_nkt = (d f_n / d s_nt)^T v_nk
    A = mean_{n,t} a_nt a_nt^T

with ``a_nt`` and ``s_nt`` the layer's input and output for datum n at position t (other ways to sum
positions: :mod:`laplace_debias.kfac.grams`). B is a SUM over data, A a MEAN. The loss is the
cross-entropy or half the squared error, summed over data. Weights ride on V, for B and the loss
alone: the data worth backward passes for B need not be those that serve A.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from laplace_debias.data.datum_keys import datum_keys
from laplace_debias.data.inputs import Inputs
from laplace_debias.data.targets import check_targets
from laplace_debias.data.weighted import WeightedTargets, apart
from laplace_debias.kfac.counts import FitCost
from laplace_debias.kfac.factors import Block, Factors
from laplace_debias.kfac.few_rows import total_of
from laplace_debias.kfac.grams import KFAC_APPROXES, InputGram, KFACApprox
from laplace_debias.kfac.norms import NormGram
from laplace_debias.kfac.originals import OriginalGram
from laplace_debias.kfac.rotations import (
    RotatedInputs,
    curvatures_of,
    input_gram,
    output_grams,
)
from laplace_debias.kfac.row_counts import RowCounter, input_rows, output_rows
from laplace_debias.network.calling import call_model
from laplace_debias.network.check import agree
from laplace_debias.network.layers import (
    has_rows_last,
    is_kfac_layer,
    is_norm,
    n_in,
    normalised,
)
from laplace_debias.network.loss import (
    Fisher,
    Sampler,
    backward_vectors,
    likelihood_name,
    loss_sum,
    mean_loss_hessian,
)
from laplace_debias.network.objective import Objective
from laplace_debias.network.ownership import OwnedParameter, owned_parameters
from laplace_debias.network.positions import (
    as_outputs,
    check_positions,
    classes_last,
    n_exact_vectors,
    position_vectors,
    weights_of_positions,
)
from laplace_debias.network.preserve import evaluation_mode
from laplace_debias.network.recorder import Recorder, check_outputs

__all__ = ["Engine", "kfac_factors"]


@dataclass
class Engine:
    """A network as K-FAC sees it, with its passes counted.

    Attributes:
        root: The module whose parameters are Bayesian: linear layers, convolutions and
            normalisations, its output ``[n, C]``; anything else may stand between them if its own
            parameters are frozen. A module that is called several times sees the calls as further
            positions.
        likelihood: ``"classification"`` (softmax cross-entropy) or ``"regression"`` (half squared
            error).
        fisher: Which backward vectors, see :func:`laplace_debias.network.loss.backward_vectors`.
        kfac_approx: How positions are summed, see :mod:`laplace_debias.kfac.grams`.
        sampler: How ``fisher="mc"`` draws its vectors.
        generator: Source of randomness for ``fisher="mc"``; the global one by default.
        embed: Turns a datum's inputs into inputs of ``root`` (features for a last layer).
        params: Parameters that get a block; by default all that require a gradient.
        objective: Class weights, label smoothing or noises of the outputs, if there were any.
        cost: What all passes so far have cost.
        exact_up_to: Most outputs for which ``fisher="exact"`` is kept; with more, one random vector
            per datum takes the place of one per output, and a warning says so.
        reached: Parameters whose layers some datum has reached. A mini-batch that does not reach
            them tells that they have no curvature there; others are refused.
        draw_seed: Key the draws of ``fisher="mc"`` by this number and the datum instead of taking
            them from the generator: whichever process has a datum draws the same for it.
        first_output: What the first datum to come gives by itself, ``[1, C]``, if that is known:
            its mini-batch must give the same.

    Raises:
        ValueError: If the model has no trainable parameter, K-FAC cannot represent one, or an
            option is unknown.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> engine = Engine(model, "classification")
        >>> factors = engine.factors(torch.ones(5, 3), torch.tensor([0, 1, 0, 1, 1]))
        >>> [tuple(len(M) for M in block) for block in factors.blocks], engine.cost.backward
        ([(4, 3), (4,), (2, 4), (2,)], 5)
    """

    root: nn.Module
    likelihood: str
    fisher: Fisher = "exact"
    kfac_approx: KFACApprox = "expand"
    sampler: Sampler = "trace"
    generator: torch.Generator | None = None
    embed: Callable[[Inputs], Inputs] | None = None
    params: Iterable[Tensor] | None = None
    objective: Objective = field(default_factory=Objective)
    cost: FitCost = field(default_factory=FitCost)
    exact_up_to: float = math.inf
    reached: set[str] = field(default_factory=set)
    draw_seed: int | None = None
    first_output: Tensor | None = None

    def __post_init__(self) -> None:
        """Look up who owns the parameters."""
        self.likelihood = likelihood_name(self.likelihood)
        if self.kfac_approx not in KFAC_APPROXES:
            raise ValueError(
                f"Expected `kfac_approx` in {KFAC_APPROXES}, got {self.kfac_approx!r}. Remedy: "
                "pass one of them."
            )
        self.owned = owned_parameters(self.root, self.params)
        shared = [p.name for p in self.owned if len(p.layers) > 1]
        if shared and self.kfac_approx != "expand":
            raise ValueError(
                f"Expected kfac_approx='expand' for parameters that several layers share "
                f"({shared}), got {self.kfac_approx!r}. Remedy: use 'expand', or freeze them."
            )
        self.names = tuple(p.name for p in self.owned)
        layers = {layer: None for p in self.owned for layer in p.layers}  # an ordered set
        self.layers = list(layers)
        found = {module: name for name, module in self.root.named_modules()}
        self._layer_names = {layer: found[layer] or "the model" for layer in layers}

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
    ) -> Factors:
        """Factors of one mini-batch; the network is left as found.

        Args:
            X: Inputs of n data, a tensor or a mapping that the model takes as its one argument.
            targets: ``[n]`` class indices or ``[n, C]`` values, with sample weights or without.
                Needed for the loss and for the empirical Fisher.
            weights: Non-negative weight ``[n]`` of each datum in B and in the loss; 1 by default.
            inputs: Whether to compute A, or the names of the weights that get one.
            outputs: Whether to compute B, which takes backward passes. Without, the network's
                outputs are kept instead.
            rows_from: Keep the rows of linear layers of at least that many inputs, if they see one
                row per datum; by default of none.
            count_rows: Whether to count the rows behind every factor, which takes a Gram matrix
                per datum: for mini-batches of few data.
            along: Eigenvectors of every block. Each factor is then given by its curvatures along
                them, ``diag(Q^T B Q)``, ``[d]`` in float64, and never formed itself.
            few_rows: Whether factors of few rows are given by these, see
                :mod:`laplace_debias.kfac.few_rows`.

        Returns:
            The factors, in at least single precision.

        Raises:
            ValueError: If the forward pass never uses a layer, or if the shapes of outputs, targets
                or weights do not fit.
        """
        y, own = apart(targets)
        if own is not None:
            weights = own if weights is None else own * weights
        weights_only = [p for p in self.owned if p.role == "weight" and not p.has_one_factor]
        if not isinstance(inputs, bool):
            weights_only, inputs = [p for p in weights_only if p.name in inputs], True
        Q = dict(zip(self.names, along or (), strict=along is not None))
        grams = {
            p.name: input_gram(self.kfac_approx, p.name, Q.get(p.name), few_rows)
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
                    y, counted = self.objective.targets(y, C)
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

    def datum_weights(self, y: Tensor, C: int) -> Tensor | None:
        """How much each datum counts in the loss by its target, ``[n]``; ``None`` if all count one.

        Args:
            y: Targets.
            C: Number of outputs.

        Returns:
            Class weights of a classification's data.
        """
        if self.likelihood != "classification":
            return None
        return self.objective.targets(y, C)[1]

    def mean_hessian(self, f: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean over data of the loss Hessian at outputs ``[n, C]``, in float64."""
        H = mean_loss_hessian(f, self.likelihood, weights)
        return self.objective.whitened(self.objective.whitened(H).T)

    def _input_factor(self, p: OwnedParameter, gram: InputGram | None, n: int) -> Tensor | None:
        """A of a weight, zero if no datum was routed to its layer."""
        if gram is None:
            return None
        if gram.n_rows:
            return gram.result(n)
        weight, d_in = p.layers[0].weight, n_in(p.layers[0])
        rotated = isinstance(gram, RotatedInputs)
        dtype = torch.float64 if rotated else torch.promote_types(weight.dtype, torch.float32)
        return weight.new_zeros(d_in if rotated else (d_in, d_in), dtype=dtype)

    def _backward_vectors(
        self, X: Inputs, f: Tensor, y: Tensor | None, weights: Tensor | None
    ) -> tuple[int, Iterable[Tensor]]:
        """Number of vectors, and these, in the shape of f; drawn or keyed by the data."""

        def vectors(at: slice, generator: torch.Generator | None) -> Tensor:
            targets, shares = (t if t is None else t[at] for t in (y, weights))
            if f.ndim > 2:
                drawn = position_vectors(classes_last(f[at]), "mc", generator, shares, self.sampler)
                return torch.stack([as_outputs(v) for v in drawn])
            options = (self.likelihood, self.fisher, generator, shares, self.sampler)
            white = self.objective.whitened(f[at])
            return self.objective.whitened(backward_vectors(white, targets, *options))

        if f.ndim > 2 and self.fisher == "exact":  # one position after the other
            exact = position_vectors(classes_last(f), "exact", weights=weights)
            return n_exact_vectors(classes_last(f), weights), map(as_outputs, exact)
        if self.draw_seed is None or self.fisher != "mc":
            V = vectors(slice(None), self.generator)
            return len(V), V
        parts = []
        for i, key in enumerate(datum_keys(X, len(f), self.draw_seed)):
            own = torch.Generator(f.device).manual_seed(key)
            parts.append(vectors(slice(i, i + 1), own))
        V = torch.cat(parts, dim=1)
        return len(V), V

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
        if self._knows_hessian and not counters:  # at the output B needs no backward pass
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
            return curvatures_of(M, Q[name][0]) if Q else M

        layers = [layer for layer in self.layers if layer not in known]
        if not layers:
            return 0, {
                p.name: total_of([along(known[m], p.name) for m in p.layers]) for p in self.owned
            }
        self._choose_fisher(f)
        n_vectors, V = self._backward_vectors(X, f.detach(), y, weights)
        owned = [p for p in self.owned if not p.has_one_factor]
        with_factors = {layer for p in owned for layer in p.layers}
        names = {m: self._layer_names[m] for m in layers if is_kfac_layer(m) and m in with_factors}
        grams = output_grams(owned, f, self.kfac_approx, names, Q, few_rows)
        scales = {p.name: NormGram(p, f, few_rows or bool(Q)) for p in self.owned if p.scales}
        originals = {p.name: OriginalGram(p, f) for p in self.owned if p.original is not None}
        calls = [call for layer in layers for call in recorder.calls[layer]]
        edges = [call.edge for call in calls if call.edge is not None]  # all, see check_called
        for k, v in enumerate(V):
            gradients = torch.autograd.grad(
                f,
                edges,
                v,
                retain_graph=k + 1 < n_vectors,
                allow_unused=True,  # None: the output does not depend on the layer
            )
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

    @property
    def _knows_hessian(self) -> bool:
        """Whether vectors stand for the loss Hessian, better than by the textbook's labels."""
        if self.objective.output_noise is not None:
            return False
        return self.fisher == "exact" or (self.fisher == "mc" and self.sampler == "trace")

    def _choose_fisher(self, f: Tensor) -> None:
        """Take one random vector per datum where exact ones would be too many."""
        p = classes_last(f)
        positions = p.ndim > 2 and math.isfinite(self.exact_up_to)
        if self.fisher != "exact" or not (positions or p.shape[-1] > self.exact_up_to):
            return
        what = f"{p[0, ..., 0].numel()} positions" if p.ndim > 2 else f"{p.shape[-1]} outputs"
        warnings.warn(
            f"The output Hessians of {what} are sampled, one backward pass per datum instead of "
            f"{n_exact_vectors(p)}: fisher='mc'. Pass fisher='exact' for all of them.",
            stacklevel=2,
        )
        self.fisher = "mc"

    def check_called(self, recorder: Recorder, outputs: bool) -> None:
        """Raise if a layer was never called so far, or called without gradients."""
        self.reached |= {
            p.name for p in self.owned if all(recorder.calls[layer] for layer in p.layers)
        }
        for p in self.owned:
            for layer in p.layers:
                if not recorder.calls[layer] and p.name not in self.reached:
                    raise ValueError(
                        f"Expected the forward pass to call the layer of parameter {p.name}, got "
                        "no call (it is unused, its weight is used without it, as in "
                        "MultiheadAttention, or no datum of the first mini-batch is routed to it). "
                        "Remedy: take a larger mini-batch, or freeze it, "
                        f'`model.get_parameter("{p.name}").requires_grad_(False)`.'
                    )
                if outputs and any(call.edge is None for call in recorder.calls[layer]):
                    raise ValueError(
                        f"Expected the output of '{self._layer_names[layer]}' to require a "
                        "gradient, got one that does not. Remedy: let its parameters require "
                        "gradients, and do not call it under `no_grad`."
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
