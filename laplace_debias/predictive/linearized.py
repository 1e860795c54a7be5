"""The linearised predictive in a single call."""

from __future__ import annotations

import torch
from laplace.baselaplace import KronLaplace

from laplace_debias.data.inputs import Inputs
from laplace_debias.predictive.eigenblocks import PriorPrecisions
from laplace_debias.predictive.predictions import DEFAULT_MEMORY_BUDGET, check_method
from laplace_debias.predictive.predictor import LinearizedPredictive, StructuredPredictor

__all__ = ["linearized_predictive"]


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
            ``"top"`` for exact variances of the classes that carry the probability and the output
            layer's own for the rest; or ``"auto"``: exact, unless another costs a fifth of it.
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
    check_method(method)
    if joint and (diagonal_output or method in ("samples", "top")):
        raise ValueError(
            f"Expected joint=True alone, got it with diagonal_output=True or method={method!r}. "
            "Remedy: drop one of them."
        )
    predictor = StructuredPredictor(la, prior_precisions, memory_budget)
    if method == "auto":
        method = "exact" if joint else predictor.chosen_method(x, n_samples, diagonal_output)
    if method == "top":
        return predictor.top(x, diagonal_output)
    if method == "samples":
        return predictor.sampled(x, n_samples, generator, diagonal_output)
    return predictor(x, diagonal_output, joint)
