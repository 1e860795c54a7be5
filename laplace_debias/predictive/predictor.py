r"""The linearised predictive of a Kron Laplace approximation, for one or many prior precisions.

The network is linearised at its weights, :math:`f_{lin}(x) = f(x) + J(x) (\theta - \theta^*)`, so
its outputs are Gaussian with mean :math:`f(x)` and covariance :math:`J(x) P^{-1} J(x)^\top`. The
Jacobian is never formed: layer inputs and output gradients are rotated into the eigenbasis of the
posterior and contracted there (:mod:`laplace_debias.predictive.contractions`), once for all prior
precisions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from laplace.baselaplace import KronLaplace
from torch import Tensor

from laplace_debias.data.inputs import INPUT_TYPES, Inputs, on_device, size_of, take
from laplace_debias.network.features import outputs_and_features
from laplace_debias.network.last_layer import verify_last_layer
from laplace_debias.network.loss import likelihood_name
from laplace_debias.network.preserve import differentiable, no_autocast
from laplace_debias.network.upstream import (
    decomposed,
    device_of,
    dtype_of,
    feature_extractor,
    row_keys,
)
from laplace_debias.predictive.eigenblocks import (
    EigenBlock,
    PriorPrecisions,
    check_fitted,
    eigen_blocks,
    has_closed_form,
    prior_grid,
)
from laplace_debias.predictive.last_layer import last_layer_moments
from laplace_debias.predictive.layer_jacobians import LayerJacobians
from laplace_debias.predictive.output_gradients import Choose, by_need, top_classes
from laplace_debias.predictive.predictions import (
    DEFAULT_MEMORY_BUDGET,
    N_TOP,
    cheapest_method,
    chunk_sizes,
)
from laplace_debias.predictive.prior_nodes import N_NODES, prior_nodes
from laplace_debias.predictive.sample_nodes import sample_nodes
from laplace_debias.predictive.weight_samples import WeightSampler


@dataclass(frozen=True)
class LinearizedPredictive:
    """Gaussian over the outputs of the linearised network.

    Attributes:
        mean: Means ``[n, C]``, with positions (tokens, pixels) ``[n, *positions, C]``; they do not
            depend on the prior precision.
        covariance: ``[n, C, C]`` or ``[n, *positions, C, C]``, of the outputs of one position; only
            the diagonal, in the shape of the mean, with ``diagonal_output``; the joint covariance
            of all data ``[n * C, n * C]`` with ``joint``. With many prior precisions a leading
            dimension k in front.
        prior_precisions: The prior precisions ``[k, n_blocks]``.
        method: ``"exact"``, ``"top"`` or ``"samples"``.
    """

    mean: Tensor
    covariance: Tensor
    prior_precisions: Tensor
    method: str


class StructuredPredictor:
    """The linearised predictive with everything that does not depend on the data prepared once.

    Use :func:`laplace_debias.linearized_predictive` for a single call; this class for many batches.
    Nothing in it changes after construction but what it remembers, so several threads may use it.

    Args:
        la: A fitted ``KronLaplace`` or ``KronLLLaplace``.
        prior_precisions: See ``prior_grid``; ``None`` takes the one
            that ``la`` has.
        memory_budget: Bytes to stay within; the data are cut into chunks accordingly.
        keep_graph: Allow differentiating with respect to the inputs; ``None`` asks ``la``.
    """

    def __init__(
        self,
        la: KronLaplace,
        prior_precisions: PriorPrecisions | None = None,
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
        keep_graph: bool | None = None,
    ) -> None:
        check_fitted(la)
        if not memory_budget > 0:
            raise ValueError(
                f"Expected a positive memory budget in bytes, got {memory_budget}. "
                "Remedy: pass e.g. memory_budget=2**29."
            )
        dtype = torch.promote_types(dtype_of(la), torch.float32)
        like = torch.empty(0, dtype=dtype, device=device_of(la))
        n_blocks = len(decomposed(la))
        if prior_precisions is None:
            self.deltas, _ = prior_grid(la.prior_precision.reshape(1, -1), n_blocks, like)
            self.many = False
        else:
            self.deltas, self.many = prior_grid(prior_precisions, n_blocks, like)
        self.la, self.memory_budget = la, int(memory_budget)
        self._verified, self._said = not getattr(la, "verify", True), False
        self.keep_graph = la.enable_backprop if keep_graph is None else keep_graph
        nodes = None
        self._scalar = bool((self.deltas == self.deltas[:, :1]).all())
        self._sampled_from: tuple[tuple[Tensor, Tensor] | None] | None = None
        if self._scalar and len(self.deltas) > N_NODES and not has_closed_form(la):
            nodes = prior_nodes(self.deltas[:, 0])
        self._coefficients = None if nodes is None else nodes[1]
        deltas = self.deltas if nodes is None else nodes[0].unsqueeze(1).expand(-1, n_blocks)
        self.blocks = eigen_blocks(la, deltas, self.memory_budget)
        self.params = [block.param for block in self.blocks]
        self._layers = LayerJacobians(
            la.model, self.blocks, row_keys(la), self.keep_graph, not self._verified, la.dict_key_y
        )

    def __call__(
        self, x: Inputs, diagonal_output: bool = False, joint: bool = False
    ) -> LinearizedPredictive:
        """Return the exact linearised predictive at ``x``."""
        x = self._inputs(x)
        mode = "joint" if joint else "variance" if diagonal_output else "covariance"
        with differentiable(self.la.model, self.params):
            if has_closed_form(self.la):
                f, moments = self._last_layer(x, mode)
            else:
                f, (moments,) = self._all_layers(x, mode, [self.blocks])
        if not self.keep_graph:
            f, moments = f.detach(), moments.detach()
        return self._result(f, moments, "exact")

    def sampled(
        self,
        x: Inputs,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        diagonal_output: bool = False,
    ) -> LinearizedPredictive:
        r"""Return the predictive with covariances estimated from samples of the weights.

        :math:`\hat\Sigma = \frac{1}{S} \sum_s (f_s - f) (f_s - f)^\top`; the mean is exact.
        """
        with self._sampler() as sampler:
            f, moments = sampler.moments(self._inputs(x), n_samples, generator, diagonal_output)
        return self._result(f, moments, "samples")

    def samples(
        self, x: Inputs, n_samples: int = 100, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs ``[n, C]`` and samples of them ``[k, n_samples, n, C]``."""
        with self._sampler() as sampler:
            return sampler(self._inputs(x), n_samples, generator)

    @contextmanager
    def _sampler(self) -> Iterator[WeightSampler]:
        """What draws from the posteriors, while the model can be differentiated."""
        deltas, coefficients = self.deltas, None
        if self._scalar and not has_closed_form(self.la):
            if self._sampled_from is None:
                lams = [block.lam for block in self.blocks]
                self._sampled_from = (sample_nodes(lams, deltas[:, 0]),)
            if self._sampled_from[0] is not None:
                nodes, coefficients = self._sampled_from[0]
                deltas = nodes.unsqueeze(1).expand(-1, len(self.blocks))
        blocks = self.blocks
        if deltas is not self.deltas or self._coefficients is not None:
            blocks = eigen_blocks(self.la, deltas, self.memory_budget)
        with differentiable(self.la.model, self.params):
            yield WeightSampler(self.la, blocks, self.memory_budget, self.keep_graph, coefficients)

    def top(self, x: Inputs, diagonal_output: bool = True) -> LinearizedPredictive:
        r"""Return exact variances of the classes that carry the probability.

        Those are all but 1e-4 of each datum's mass, and 5 to 20 classes, whatever data stand beside
        it. The variances of the others are the output layer's alone, in closed form: too
        small, which matters where more than 20 classes carry probability.

        Args:
            x: Inputs ``[n, ...]``, or a mapping of tensors.
            diagonal_output: Must be true: there are no covariances.

        Raises:
            ValueError: If covariances are asked for, or the network does not end in a linear layer
                with Bayesian parameters.
        """
        if not diagonal_output or has_closed_form(self.la):
            raise ValueError(
                "Expected method='top' for variances of an all-layer posterior, got a link that "
                "needs covariances, or a last layer, which is exact anyway. Remedy: "
                "method='exact' or 'samples', or link_approx='probit'."
            )
        x = self._inputs(x)
        with differentiable(self.la.model, self.params):
            held, _ = self._layers.prepare(x)
            if not self._layers.has_output_layer:
                raise ValueError(
                    "Expected a network that ends in an nn.Linear with Bayesian parameters for "
                    "method='top', got another one. Remedy: method='samples' or 'exact'."
                )
            choose, key = partial(top_classes, least=5), row_keys(self.la)
            order = by_need(self.la.model, x, key, choose, self.memory_budget // held)
            f, (m,) = self._all_layers(take(x, order, key), "variance", [self.blocks], choose)
            f, moments = f[order.argsort()], m[order.argsort()]
        if not self.keep_graph:
            f, moments = f.detach(), moments.detach()
        return self._result(f, moments, "top")

    def chosen_method(self, x: Inputs, n_samples: int, diagonal_output: bool) -> str:
        """The way that ``method="auto"`` takes, by :func:`cheapest_method`.

        A last layer's closed form is always exact: it needs no pass at all.
        """
        if has_closed_form(self.la):
            return "exact"
        with differentiable(self.la.model, self.params):
            C, _ = self._layers.n_outputs(self._inputs(x))
        classes = likelihood_name(self.la.likelihood) == "classification"
        best = cheapest_method(
            C, len(self.deltas), n_samples, diagonal=diagonal_output,
            top=classes and self._layers.has_output_layer, shared=self._scalar,
        )  # fmt: skip
        if best == "exact":
            return best
        if not self._said:
            self._said = True
            warnings.warn(
                f"Predictions for {C} outputs take method={best!r}, because exact (co)variances of "
                "all of them cost more than five times as much. Set `predictive_method` (or "
                "`method`) to 'exact' for these.",
                stacklevel=4,
            )
        return best

    def apart(self, x: Inputs, diagonal_output: bool = False) -> tuple[Tensor, Tensor]:
        """Return the outputs ``[n, C]`` and what each block adds to their exact (co)variances.

        The latter is ``[n_blocks, n, C, C, k]``, with ``diagonal_output`` ``[n_blocks, n, C, k]``.
        """
        x, mode = self._inputs(x), "variance" if diagonal_output else "covariance"
        with differentiable(self.la.model, self.params):
            if has_closed_form(self.la):
                f, moments = self._last_layer(x, mode, apart=True)
            else:
                f, (moments,) = self._all_layers(x, mode, [self.blocks], apart=True)
        c = self._coefficients
        return f.detach(), moments.detach() if c is None else moments.detach() @ c

    def _inputs(self, x: Inputs) -> Inputs:
        """Bring tensors to the model's device, out of inference mode."""
        if not isinstance(x, INPUT_TYPES):
            raise ValueError(
                f"Expected inputs as a tensor, a mapping or a tuple, got {type(x).__name__}. "
                "Remedy: `torch.as_tensor(x)`."
            )
        n = size_of(x, row_keys(self.la))
        if n == 0:
            raise ValueError(
                "Expected at least one datum, got an empty batch. Remedy: skip empty batches."
            )
        return on_device(x, device_of(self.la))

    @no_autocast()
    def _result(self, f: Tensor, moments: Tensor, method: str) -> LinearizedPredictive:
        """Bring ``[..., k]`` to ``[k, ...]``, or drop k for a single prior precision."""
        if method != "samples" and self._coefficients is not None:  # moments are those of the nodes
            moments = moments @ self._coefficients
        moments = moments.movedim(-1, 0) if self.many else moments.squeeze(-1)
        return LinearizedPredictive(f, moments.to(f.dtype), self.deltas, method)

    def _all_layers(
        self,
        x: Inputs,
        mode: str,
        posteriors: Sequence[list[EigenBlock]],
        choose: Choose | None = None,
        *,
        apart: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """Contract chunk by chunk of data; a joint covariance takes all data at once.

        A datum with too many outputs for the memory budget is cut over these as well.
        """
        key = row_keys(self.la)
        n, (held, per_output) = size_of(x, key), self._layers.prepare(x)
        outputs, group = self._layers.n_outputs(x)
        if mode == "joint" and outputs != group:
            raise ValueError(
                "Expected joint=False for outputs with positions (tokens, pixels), got True. "
                "Remedy: leave it out for the covariances of each position."
            )
        C = min(N_TOP, outputs) if choose else group if mode == "covariance" else outputs
        needs = ("top" if choose else mode, self.memory_budget, held, per_output)
        size, at_once = chunk_sizes(n, C, *needs, apart=apart)
        options = (mode, posteriors, at_once, choose)
        if size >= n:
            return self._layers.contract(x, *options, apart=apart)
        size = -(-n // -(-n // size))  # chunks of one size: a small last one costs more per datum
        parts = []
        for rows in (take(x, slice(i, i + size), key) for i in range(0, n, size)):
            f, moments = self._layers.contract(rows, *options, apart=apart)
            parts.append((f if self.keep_graph else f.detach(), moments))
        columns = zip(*(moments for _, moments in parts), strict=True)
        return torch.cat([f for f, _ in parts]), [torch.cat(c, dim=int(apart)) for c in columns]

    def _last_layer(self, x: Inputs, mode: str, apart: bool = False) -> tuple[Tensor, Tensor]:
        """The closed form of a last layer, from its features."""
        if not self._verified:
            verify_last_layer(self.la.model, x, row_keys(self.la), self.la.dict_key_y)
        self._verified = True
        with torch.set_grad_enabled(self.keep_graph):
            f, phi = outputs_and_features(feature_extractor(self.la.model), x)
            phi = phi.to(self.deltas.dtype)
            if f.ndim == 2 or f.ndim != phi.ndim or mode == "joint":
                return f, last_layer_moments(self.blocks, f, phi, mode, apart=apart)
            rows = (f.flatten(0, -2), phi.flatten(0, -2))  # one for each position
            moments = last_layer_moments(self.blocks, *rows, mode, apart=apart)
            return f, moments.unflatten(int(apart), f.shape[:-1])


class SharedPredictor:
    """Exact linearised predictives of several posteriors, one after the other from shared passes.

    Args:
        predictors: One per posterior, around the same model and the same parameters. The first
            one's memory budget holds; no graph is kept.

    Raises:
        ValueError: If there is no predictor, or their parameters differ.

    Example:
        >>> import torch
        >>> from laplace_debias import Laplace
        >>> net = torch.nn.Linear(2, 3)
        >>> batch = (torch.randn(8, 2), torch.arange(8) % 3)
        >>> predictors = []
        >>> for n in (4, 8):
        ...     la = Laplace(net, "classification", "all", "kron", debias="single")
        ...     la.fit((batch[0][:n], batch[1][:n]), n_data=100)
        ...     predictors.append(StructuredPredictor(la, [1.0, 10.0]))
        >>> [tuple(result.covariance.shape) for result in SharedPredictor(predictors)(batch[0])]
        [(2, 8, 3, 3), (2, 8, 3, 3)]
    """

    def __init__(self, predictors: Sequence[StructuredPredictor]) -> None:
        if not predictors:
            raise ValueError("Expected at least one predictor, got none. Remedy: pass some.")
        self.predictors = tuple(predictors)
        params = [[id(p) for p in predictor.params] for predictor in predictors]
        if not has_closed_form(predictors[0].la) and any(ids != params[0] for ids in params):
            raise ValueError(
                "Expected posteriors over the same parameters of one model, got others. Remedy: "
                "build every Laplace approximation around the same model object, with the same "
                "parameters frozen."
            )

    def __call__(self, x: Inputs, diagonal_output: bool = False) -> list[LinearizedPredictive]:
        """Return the predictive of each posterior at ``x``.

        Args:
            x: Inputs ``[n, ...]``, or a mapping of tensors.
            diagonal_output: Return the diagonals of the covariances only, which is cheaper.
        """
        first = self.predictors[0]
        if has_closed_form(first.la):  # a closed form without backward passes
            return [predictor(x, diagonal_output) for predictor in self.predictors]
        x = first._inputs(x)
        mode = "variance" if diagonal_output else "covariance"
        with differentiable(first.la.model, first.params):
            f, moments = first._all_layers(x, mode, [p.blocks for p in self.predictors])
        f = f.detach()
        return [
            predictor._result(f, part.detach(), "exact")
            for predictor, part in zip(self.predictors, moments, strict=True)
        ]
