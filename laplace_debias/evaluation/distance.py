r"""How far one posterior is from another, where it matters: in the uncertainty of predictions.

.. math:: \mathrm{mean}_{n, c} \left| \log \frac{\sigma_{nc}}{\sigma^{ref}_{nc}} \right|

with :math:`\sigma_{nc}` the standard deviation of output c (logit, or value) of the linearised
network at input n: 0.1 is 10 % off. Unlike the NLL on test data it sees every output and every
input that it is asked about; far inputs (:func:`far_inputs`) ask about directions that no datum
determines.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from laplace.baselaplace import KronLaplace
from torch import Tensor

from laplace_debias.data.inputs import Inputs
from laplace_debias.predictive.predictor import (
    LinearizedPredictive,
    SharedPredictor,
    StructuredPredictor,
)

__all__ = [
    "diagonal_predictives",
    "far_inputs",
    "log_ratio_of_deviations",
    "posterior_distance",
]


def posterior_distance(la: KronLaplace, reference: KronLaplace, x: Inputs) -> float:
    """Mean absolute log ratio of the predictive standard deviations of two posteriors.

    Args:
        la: A fitted Kron Laplace approximation, at its prior precision.
        reference: Another one around the same network, at its own prior precision.
        x: Inputs ``[n, ...]``, or a mapping of tensors.

    Returns:
        The distance; 0 for equal predictive variances.

    Raises:
        ValueError: If the two predict different numbers of outputs, or a variance is not positive.

    Example:
        >>> from laplace_debias import Laplace
        >>> net, X, y = torch.nn.Linear(2, 3), torch.randn(8, 2), torch.arange(8) % 3
        >>> las = [Laplace(net, "classification", "all", "kron", debias="single") for _ in "ab"]
        >>> for la in las:
        ...     la.fit((X, y), n_data=8)
        >>> posterior_distance(*las, X)
        0.0
    """
    predictors = [StructuredPredictor(one, keep_graph=False) for one in (la, reference)]
    found, exact = (result.covariance for result in diagonal_predictives(predictors, x))
    return float(log_ratio_of_deviations(found, exact).mean())


def log_ratio_of_deviations(variances: Tensor, reference: Tensor) -> Tensor:
    """Absolute log ratio of standard deviations, mean over inputs and outputs.

    Args:
        variances: Predictive variances ``[..., n, C]``.
        reference: Those of the reference, of the same shape.

    Returns:
        Distances ``[...]``, in float64.

    Raises:
        ValueError: If shapes differ, or a variance is not positive.

    Example:
        >>> log_ratio_of_deviations(torch.full((5, 1), 4.0), torch.ones(5, 1)).exp()
        tensor(2., dtype=torch.float64)
    """
    if variances.shape != reference.shape:
        raise ValueError(
            f"Expected two posteriors with the same outputs, got {list(variances.shape)} and "
            f"{list(reference.shape)}. Remedy: build both around the same network."
        )
    both = variances.double(), reference.double()
    if not all(bool((v > 0).all() & torch.isfinite(v).all()) for v in both):
        raise ValueError(
            "Expected positive, finite predictive variances, got others. Remedy: fit in float64 "
            "(`model.double()`), or raise the prior precision."
        )
    return 0.5 * (both[0].log() - both[1].log()).abs().mean((-2, -1))


def diagonal_predictives(
    predictors: Sequence[StructuredPredictor], x: Inputs
) -> list[LinearizedPredictive]:
    """Predictives with variances only, from shared passes where all are around one network."""
    ids = {tuple(id(p) for p in predictor.params) for predictor in predictors}
    with torch.no_grad():
        if len(ids) == 1:
            return SharedPredictor(predictors)(x, diagonal_output=True)
        return [predictor(x, diagonal_output=True) for predictor in predictors]


def far_inputs(x: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
    """Inputs far from the data: Gaussian, with their mean and twice their deviation per feature.

    Args:
        x: Training inputs ``[N, ...]``, at least two.
        n: How many.
        generator: Source of randomness, on the CPU; the global one by default.

    Returns:
        Inputs ``[n, ...]`` like ``x``.

    Example:
        >>> far_inputs(torch.tensor([[0.0, 5.0], [2.0, 5.0]]), 3)[:, 1]
        tensor([5., 5., 5.])
    """
    if len(x) < 2 or not x.is_floating_point():
        raise ValueError(
            f"Expected at least two floating point inputs, got {len(x)} of {x.dtype}. Remedy: pass "
            "the training inputs."
        )
    noise = torch.randn(n, *x.shape[1:], generator=generator, dtype=torch.float64).to(x)
    return x.mean(0) + 2 * x.std(0) * noise
