"""What methods of fitting ask of an engine: the network as K-FAC sees it, and its factors.

:class:`laplace_debias.kfac.engine.Engine` is the one that runs passes.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs, Keys, tensors_of
from laplace_debias.data.targets import WeightedTargets
from laplace_debias.kfac.counts import FitCost
from laplace_debias.kfac.factors import Block, Factors
from laplace_debias.kfac.few_rows import KFAC_APPROXES, KFACApprox
from laplace_debias.network.calling import (
    as_outputs,
    classes_last,
)
from laplace_debias.network.loss import likelihood_name, mean_loss_hessian
from laplace_debias.network.objective import Objective
from laplace_debias.network.ownership import owned_parameters
from laplace_debias.network.recorder import Recorder
from laplace_debias.network.vectors import (
    Fisher,
    Sampler,
    backward_vectors,
    n_exact_vectors,
    position_vectors,
)

__all__ = ["EngineInterface", "FactorEngine", "datum_keys"]


class FactorEngine(Protocol):
    """What turns a mini-batch into factors: the engine, or one of laplace-torch's backends."""

    cost: FitCost

    def factors(self, X: Inputs, y: Tensor) -> Factors:
        """Factors of one mini-batch."""
        ...


@dataclass
class EngineInterface:
    """A network as K-FAC sees it, with its passes counted: what methods of fitting ask of one.

    Attributes:
        root: The module whose parameters are Bayesian: linear layers, convolutions and
            normalisations, its output ``[n, C]``; anything else may stand between them if its own
            parameters are frozen. A module that is called several times sees the calls as further
            positions.
        likelihood: ``"classification"`` (softmax cross-entropy) or ``"regression"`` (half squared
            error).
        fisher: Which backward vectors, see :func:`laplace_debias.network.vectors.backward_vectors`.
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
        chunk: Most data of one pass; larger mini-batches are passed in pieces, and summed.
        key: Which entries of inputs that are mappings run over the data, for the pieces.
        budget: Bytes that a fit may add to what is there, ``None`` for any.
        pixels_per_patch: Their number for weights that have patches of several, if rows are these.

    Raises:
        ValueError: If the model has no trainable parameter, K-FAC cannot represent one, or an
            option is unknown.

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
    chunk: int | None = None
    key: Keys = "input_ids"
    budget: int | None = None

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
        patches = [p for p in self.owned if p.n_pixels > 1 and self.kfac_approx == "expand"]
        self.pixels_per_patch = {p.name: p.n_pixels for p in patches}
        layers = {layer: None for p in self.owned for layer in p.layers}  # an ordered set
        self.layers = list(layers)
        found = {module: name for name, module in self.root.named_modules()}
        self.layer_names = {layer: found[layer] or "the model" for layer in layers}

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
            pixels: Names of convolutions' weights whose A is but the covariance of their pixels,
                see :mod:`laplace_debias.kfac.pixels`.

        Returns:
            The factors, in at least single precision.

        Raises:
            ValueError: If the forward pass never uses a layer, or if the shapes of outputs, targets
                or weights do not fit.
        """
        raise NotImplementedError

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
        dtype = next(self.root.parameters()).dtype
        return self.objective.targets(y, C, dtype)[1]

    def mean_hessian(self, f: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean over data of the loss Hessian at outputs ``[n, C]``, in float64."""
        H = mean_loss_hessian(f, self.likelihood, weights)
        return self.objective.whitened(self.objective.whitened(H).T)

    def backward_vectors_of(
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

    @property
    def knows_hessian(self) -> bool:
        """Whether vectors stand for the loss Hessian, better than by the textbook's labels."""
        if self.objective.output_noise is not None:
            return False
        return self.fisher == "exact" or (self.fisher == "mc" and self.sampler == "trace")

    def choose_fisher(self, f: Tensor) -> None:
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
                        f"Expected the output of '{self.layer_names[layer]}' to require a "
                        "gradient, got one that does not. Remedy: let its parameters require "
                        "gradients, and do not call it under `no_grad`."
                    )


def datum_keys(X: Inputs, n: int, seed: int) -> list[int]:
    """One number per datum, for a random number generator of its own.

    Equal data have equal keys. Draws that are keyed by the datum do not depend on the mini-batch
    or the process in which it is met.

    Args:
        X: Inputs of n data, a tensor ``[n, ...]``, or a mapping or tuple of such.
        n: Number of data.
        seed: Other seeds give other keys.

    Returns:
        n whole numbers from 0 to ``2**63 - 1``.

    Example:
        >>> X = torch.tensor([[1.0], [2.0], [1.0]])
        >>> keys = datum_keys(X, 3, seed=0)
        >>> keys[0] == keys[2], keys[0] == keys[1], keys == datum_keys(X, 3, seed=1)
        (True, False, False)
    """
    rows = [
        part.detach().reshape(n, -1).contiguous().view(torch.uint8).cpu().numpy()
        for part in tensors_of(X)
        if part.ndim > 0 and len(part) == n
    ]
    salt = seed.to_bytes(8, "little", signed=True)
    keys = []
    for i in range(n):
        digest = hashlib.blake2b(digest_size=8, key=salt)
        for part in rows:
            digest.update(part[i])
        keys.append(int.from_bytes(digest.digest(), "little") >> 1)
    return keys
