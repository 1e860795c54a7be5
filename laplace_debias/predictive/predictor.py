r"""The linearised predictive of a Kron Laplace approximation, for one or many prior precisions.

The network is linearised at its weights, :math:`f_{lin}(x) = f(x) + J(x) (\theta - \theta^*)`, so
its outputs are Gaussian with mean :math:`f(x)` and covariance :math:`J(x) P^{-1} J(x)^\top`. The
Jacobian is never formed: layer inputs and output gradients are rotated into the eigenbasis of the
posterior and contracted there (:mod:`laplace_debias.predictive.contractions`), once for all prior
precisions.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch
from laplace.baselaplace import KronLaplace
from torch import Tensor

from laplace_debias.network.capture import Inputs, prediction_mode, size_of, take
from laplace_debias.predictive import contractions as maths
from laplace_debias.predictive.eigenblocks import (
    EigenBlock,
    PriorPrecisions,
    check_fitted,
    compute_dtype,
    eigen_blocks,
    is_last_layer,
    prior_grid,
)
from laplace_debias.predictive.layer_jacobians import LayerJacobians
from laplace_debias.predictive.prior_nodes import prior_nodes
from laplace_debias.predictive.weight_samples import WeightSampler

DEFAULT_MEMORY_BUDGET = 512 * 2**20
METHODS = ("exact", "samples", "auto")


@dataclass(frozen=True)
class LinearizedPredictive:
    """Gaussian over the outputs of the linearised network.

    Attributes:
        mean: Means ``[n, C]``; they do not depend on the prior precision.
        covariance: ``[n, C, C]``; only the diagonal ``[n, C]`` with ``diagonal_output``; the joint
            covariance of all data ``[n * C, n * C]`` with ``joint``. With many prior precisions
            a leading dimension k in front.
        prior_precisions: The prior precisions ``[k, n_blocks]``.
        method: ``"exact"`` or ``"samples"``.
    """

    mean: Tensor
    covariance: Tensor
    prior_precisions: Tensor
    method: str


class StructuredPredictor:
    """The linearised predictive with everything that does not depend on the data prepared once.

    Use :func:`linearized_predictive` for a single call; this class for many batches.

    Args:
        la: A fitted ``KronLaplace`` or ``KronLLLaplace``.
        prior_precisions: See `prior_grid`; ``None`` takes the one
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
        """Check the arguments and prepare the blocks of the posterior."""
        check_fitted(la)
        if not memory_budget > 0:
            raise ValueError(
                f"Expected a positive memory budget in bytes, got {memory_budget}. "
                "Pass e.g. memory_budget=2**29."
            )
        dtype = compute_dtype(la._dtype)
        like = torch.empty(0, dtype=dtype, device=la._device)
        current = prior_precisions is None
        if current:
            prior_precisions = la.prior_precision.reshape(1, -1)
        self.deltas, many = prior_grid(prior_precisions, len(la.H), like)
        self.many = many and not current
        self.la, self.memory_budget = la, int(memory_budget)
        self.keep_graph = la.enable_backprop if keep_graph is None else keep_graph
        nodes = None
        if not is_last_layer(la) and (self.deltas == self.deltas[:, :1]).all():
            nodes = prior_nodes(self.deltas[:, 0])
        self._coefficients = None if nodes is None else nodes[1]
        deltas = self.deltas if nodes is None else nodes[0].unsqueeze(1).expand(-1, len(la.H))
        self.blocks = eigen_blocks(la, deltas, self.memory_budget)
        self.params = [block.param for block in self.blocks]
        self._layers: LayerJacobians | None = None

    def __call__(
        self, x: Inputs, diagonal_output: bool = False, joint: bool = False
    ) -> LinearizedPredictive:
        """Return the exact linearised predictive at ``x``."""
        x = self._inputs(x)
        mode = "joint" if joint else "variance" if diagonal_output else "covariance"
        with prediction_mode(self.la.model, self.params):
            if is_last_layer(self.la):
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
        f, samples = self.samples(x, n_samples, generator)
        moments = torch.stack([_second_moment(d - f, diagonal_output) for d in samples], dim=-1)
        return self._result(f, moments, "samples")

    def samples(
        self, x: Inputs, n_samples: int = 100, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs ``[n, C]`` and samples of them ``[k, n_samples, n, C]``."""
        blocks = self.blocks
        if self._coefficients is not None:  # samples are of each prior precision itself
            blocks = eigen_blocks(self.la, self.deltas, self.memory_budget)
        sampler = WeightSampler(self.la, blocks, self.memory_budget, self.keep_graph)
        with prediction_mode(self.la.model, self.params):
            return sampler(self._inputs(x), n_samples, generator)

    def prefers_samples(self, n_samples: int, diagonal_output: bool) -> bool:
        """Say whether ``n_samples`` samples cost less than the exact covariances.

        Counted in forward passes: a backward pass or a forward-mode product costs about two. The
        exact way takes one backward pass and as much again for the contraction per output, and,
        unless only diagonals are needed, C products per output. The last layer's closed form is
        always exact: it needs no pass at all.
        """
        if is_last_layer(self.la):
            return False
        C = self.la.n_outputs
        exact = 4 * C + (0 if diagonal_output else C * len(self.deltas))
        return 2 * n_samples * len(self.deltas) < exact

    def _inputs(self, x: Inputs) -> Inputs:
        """Bring a tensor to the model's device, out of inference mode."""
        if not isinstance(x, (Tensor, MutableMapping)):
            raise ValueError(
                f"Expected inputs as a tensor or a mapping, got {type(x).__name__}. Remedy: "
                "`torch.as_tensor(x)`."
            )
        n = size_of(x, self.la.dict_key_x)
        if n == 0:
            raise ValueError("Expected at least one datum, got an empty batch. Skip empty batches.")
        if not isinstance(x, Tensor):
            return x
        x = x.to(self.la._device)
        with torch.inference_mode(False):
            return x.clone() if x.is_inference() else x

    def _result(self, f: Tensor, moments: Tensor, method: str) -> LinearizedPredictive:
        """Bring ``[..., k]`` to ``[k, ...]``, or drop k for a single prior precision."""
        if method == "exact" and self._coefficients is not None:  # moments are those of the nodes
            moments = moments @ self._coefficients
        moments = moments.movedim(-1, 0) if self.many else moments.squeeze(-1)
        return LinearizedPredictive(f, moments.to(f.dtype), self.deltas, method)

    def _all_layers(
        self, x: Inputs, mode: str, posteriors: Sequence[list[EigenBlock]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Contract chunk by chunk of data; a joint covariance takes all data at once."""
        key = self.la.dict_key_x
        if self._layers is None or self._layers.dims is None:
            self._layers = LayerJacobians(self.la.model, self.blocks, key, self.keep_graph)
        n, bytes_per_datum = size_of(x, key), self._layers.prepare(x)
        size = n if mode == "joint" else max(1, self.memory_budget // bytes_per_datum)
        if size >= n:
            return self._layers.contract(x, mode, posteriors)
        size = -(-n // -(-n // size))  # chunks of one size: a small last one costs more per datum
        parts = []
        for start in range(0, n, size):
            rows = take(x, slice(start, start + size), key)
            f, moments = self._layers.contract(rows, mode, posteriors)
            parts.append((f if self.keep_graph else f.detach(), moments))
        columns = zip(*(moments for _, moments in parts), strict=True)
        return torch.cat([f for f, _ in parts]), [torch.cat(column) for column in columns]

    def _last_layer(self, x: Inputs, mode: str) -> tuple[Tensor, Tensor]:
        r"""Closed form: the Jacobian of output c is the input features in row c.

        So :math:`\tilde g_{ci} = Q_{B,ci}` for every datum, and with the features :math:`\phi`,
        :math:`s_i = \sum_j w_{ij} (Q_A^\top \phi)_j^2`, the weight block adds
        :math:`\sum_i Q_{B,ci} s_i Q_{B,di}` and the bias block
        :math:`(Q \, \mathrm{diag}(w) \, Q^\top)_{cd}`.
        """
        with torch.set_grad_enabled(self.keep_graph):
            f, phi = self.la.model.forward_with_features(x)
            if phi.ndim == 1 and len(f) == 1:
                phi = phi.unsqueeze(0)
            if f.ndim != 2 or phi.ndim != 2:
                raise ValueError(
                    f"Expected outputs [n, C] and features [n, d], got {tuple(f.shape)} and "
                    f"{tuple(phi.shape)}. Set feature_reduction, or return one row per datum."
                )
            phi = phi.to(self.deltas.dtype)
            parts = [_last_layer_block(block, phi, mode) for block in self.blocks]
            return f, sum(parts[1:], parts[0])


def _second_moment(d: Tensor, diagonal: bool) -> Tensor:
    """Mean of ``d d^T`` (or its diagonal) over the first dimension of ``d [S, n, C]``."""
    if diagonal:
        return d.square().mean(0)
    return torch.einsum("snc,snd->ncd", d, d) / len(d)


def _last_layer_block(block: EigenBlock, phi: Tensor, mode: str) -> Tensor:
    """Contract one block of the last layer; see :meth:`StructuredPredictor._last_layer`."""
    Q_B, n = block.Q[0], len(phi)
    rows = Q_B.expand(n, *Q_B.shape)  # the same rotated gradients for every datum
    if mode == "joint":
        if len(block.Q) == 1:
            J = rows if block.param.ndim == 1 else (phi @ block.Q[0]).unsqueeze(1)
        else:
            J = (rows.unsqueeze(-1) * (phi @ block.Q[1])[:, None, None, :]).flatten(2)
        return maths.contract([J.clone()], block.inverses, mode)[..., : len(block.delta)]
    if len(block.Q) == 1 and block.param.ndim > 1:  # one output, one feature
        J = (phi @ block.Q[0]).unsqueeze(1)
        return maths.contract([J], block.inverses, mode)[..., : len(block.delta)]
    phi2 = None if len(block.Q) == 1 else (phi @ block.Q[1]).square()
    parts = []
    for delta in block.delta:
        w = (block.lam + delta).reciprocal()
        s = w.unsqueeze(0) if phi2 is None else phi2 @ w.T  # [n, C], or [1, C] for a bias
        if mode == "variance":
            parts.append(s @ Q_B.square().T)
        else:
            parts.append((Q_B * s.unsqueeze(1)) @ Q_B.T)
    part = torch.stack(parts, dim=-1)
    return part.expand(n, *part.shape[1:])


def linearized_predictive(
    la: KronLaplace,
    x: Inputs,
    prior_precisions: PriorPrecisions | None = None,
    *,
    diagonal_output: bool = False,
    joint: bool = False,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    method: str = "exact",
    n_samples: int = 100,
    generator: torch.Generator | None = None,
) -> LinearizedPredictive:
    r"""Mean and covariance of the linearised network's outputs.

    Computes :math:`f(x)` and :math:`J(x) (H + \delta I)^{-1} J(x)^\top` without forming the
    Jacobian, for all prior precisions :math:`\delta` at once.

    Args:
        la: A fitted ``KronLaplace`` or ``KronLLLaplace``; nothing in it is changed.
        x: Inputs ``[n, ...]``, or a mapping of tensors.
        prior_precisions: ``None`` for the one ``la`` has; a number; k numbers; or ``[k, n_blocks]``
            for k layer-wise ones.
        diagonal_output: Return the diagonals of the covariances only, which is cheaper.
        joint: Return the covariance across data as well; all data are then one chunk.
        memory_budget: Bytes to stay within by cutting the data into chunks.
        method: ``"exact"``; ``"samples"`` to estimate the covariances from samples of the weights
            through the linearised network, whose cost does not grow with the number of outputs;
            or ``"auto"``, whichever of the two costs less.
        n_samples: Number of samples, if any.
        generator: Random number generator for the samples.

    Returns:
        A :class:`LinearizedPredictive`.

    Raises:
        ValueError: For a bad prior precision, method or combination.
        AttributeError: If ``la`` is not fitted.

    Example:
        >>> from laplace import Laplace
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> data = TensorDataset(torch.randn(8, 3), torch.randint(2, (8,)))
        >>> la = Laplace(model, "classification", "all", "kron")
        >>> la.fit(DataLoader(data, batch_size=8))
        >>> result = linearized_predictive(la, torch.randn(5, 3), [0.1, 1.0, 10.0])
        >>> result.mean.shape, result.covariance.shape
        (torch.Size([5, 2]), torch.Size([3, 5, 2, 2]))
    """
    if method not in METHODS:
        raise ValueError(
            f"Expected method to be one of {METHODS}, got {method!r}. Remedy: pass one of them."
        )
    if joint and (diagonal_output or method == "samples"):
        raise ValueError(
            "Expected joint=True alone, got it with diagonal_output=True or method='samples'. "
            "Drop one of them."
        )
    predictor = StructuredPredictor(la, prior_precisions, memory_budget)
    if method == "auto":
        sampling = not joint and predictor.prefers_samples(n_samples, diagonal_output)
        method = "samples" if sampling else "exact"
    if method == "samples":
        return predictor.sampled(x, n_samples, generator, diagonal_output)
    return predictor(x, diagonal_output, joint)
