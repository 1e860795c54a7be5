r"""The linearised predictive of a diagonal posterior, linear in the batch.

A diagonal curvature :math:`h` is a block whose eigenvectors are the axes, :math:`Q_A = Q_B = I`,
with ``lam`` the diagonal itself: :math:`\Sigma_{cd} = \sum_i J_{ci} J_{di} / (h_i + \delta)` takes
the contractions of a Kronecker block. (laplace-torch's own goes through Jacobians of the whole
batch, quadratic in its size.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from laplace.baselaplace import KronLaplace
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from laplace_debias.data.inputs import Inputs, map_tensors, size_of, take
from laplace_debias.data.reading import read
from laplace_debias.network.loss import Likelihood
from laplace_debias.network.preserve import evaluation_mode
from laplace_debias.network.upstream import decomposed, hessian_factor
from laplace_debias.network.vectors import backward_vectors
from laplace_debias.predictive.eigenblocks import PriorPrecisions
from laplace_debias.predictive.predictions import DEFAULT_MEMORY_BUDGET
from laplace_debias.predictive.predictor import StructuredPredictor

__all__ = ["DiagonalPredictor", "diagonal_ggn"]


def diagonal_ggn(
    model: nn.Module,
    names: Sequence[str],
    loader: Iterable[Any],
    likelihood: Likelihood,
    *,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    progress_bar: bool | None = None,
) -> list[Tensor]:
    r"""Diagonal of the generalised Gauss-Newton matrix, a sum over data.

    :math:`h_i = \sum_n \sum_k (J_n^\top v_{nk})_i^2` with :math:`v_{nk}` the columns of a root of
    the loss Hessian: per-datum gradients, as many at a time as fit.

    Args:
        model: The network.
        names: Its parameters to take.
        loader: Mini-batches ``(X, y)`` or mappings.
        likelihood: ``"classification"`` or ``"regression"``.
        memory_budget: Bytes for per-datum gradients.
        progress_bar: Show a progress bar; by default on a terminal, if it takes some seconds.

    Returns:
        One tensor per parameter, of its shape.

    Example:
        >>> net, X = nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 2.0], [3.0, 0.0]])
        >>> diagonal_ggn(net, ["weight"], (X, torch.zeros(2, 1)), "regression")
        [tensor([[10.,  4.]])]
    """
    params = {name: model.get_parameter(name).detach() for name in names}
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    device = next(iter(params.values())).device
    n_params = sum(p.numel() for p in params.values())
    size = max(1, memory_budget // (4 * n_params))

    def scalar(params: dict[str, Tensor], x: Inputs, v: Tensor) -> Tensor:
        one = map_tensors(x, lambda t: t[None])
        f: Tensor = functional_call(model, params, (one,))
        return (f[0] * v).sum()

    per_datum = vmap(grad(scalar), in_dims=(None, 0, 0))
    shown: dict[str, Any] = {"progress": "diagonal", "progress_bar": progress_bar}
    with torch.inference_mode(False), evaluation_mode(model):
        for X, y in read(loader, device, **shown):
            for start in range(0, size_of(X), size):
                rows = slice(start, start + size)
                part = take(X, rows)
                with torch.no_grad():
                    f = model(part)
                    if f.ndim > 2:
                        raise ValueError(
                            f"Expected outputs [n, C] for the diagonal, got {list(f.shape)}. "
                            "Remedy: leave the baseline 'diagonal' out for tokens and pixels."
                        )
                    V = backward_vectors(f, y[rows], likelihood)  # [k, n, C]
                for v in V:
                    for name, g in per_datum(params, part, v).items():
                        total[name] += g.square().sum(0)
    return [total[name].detach() for name in names]


class DiagonalPredictor(StructuredPredictor):
    """The exact linearised predictive of a diagonal posterior.

    Args:
        la: A Kron approximation without curvature, in the basis of the axes: see
            :func:`laplace_debias.comparison.fitting.prior_only`.
        diagonal: The curvature of every parameter, of its shape.
        prior_precisions: See :class:`StructuredPredictor`.
        memory_budget: See :class:`StructuredPredictor`.

    Raises:
        ValueError: If the basis is another, or the shapes differ.
    """

    def __init__(
        self,
        la: KronLaplace,
        diagonal: Sequence[Tensor],
        prior_precisions: PriorPrecisions | None = None,
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
    ) -> None:
        super().__init__(la, prior_precisions, memory_budget, keep_graph=False)
        shapes = [list(h.shape) for h in diagonal]
        wanted = [list(block.param.shape) for block in self.blocks]
        axes = all(
            torch.equal(Q, torch.eye(len(Q)).to(Q))
            for Qs in decomposed(la).eigenvectors
            for Q in Qs
        )
        if shapes != wanted or not axes:
            raise ValueError(
                f"Expected a diagonal of shapes {wanted} and a posterior in the basis of the axes, "
                f"got {shapes} and {'that basis' if axes else 'another one'}. Remedy: make both "
                "from the same model, the posterior with `prior_only`."
            )
        h = hessian_factor(la).detach()
        self.blocks = [
            replace(block, lam=(h * d).to(block.lam).reshape(block.lam.shape), _kept={})
            for block, d in zip(self.blocks, diagonal, strict=True)
        ]

    def samples(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse: weights are sampled for Kronecker blocks only.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "Expected method='exact' for a diagonal posterior, got 'samples'. Remedy: leave "
            "`method` out."
        )
