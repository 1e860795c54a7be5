r"""Samples at many prior precisions from samples at three.

A sample of the weights is, along an eigenvector with eigenvalue :math:`\lambda`,
:math:`\epsilon / \sqrt{\lambda + \delta}`. All prior precisions :math:`\delta` share
:math:`\epsilon`, so samples of the outputs at a few nodes :math:`\nu_j` give those in between,

.. math::
    \frac{1}{\sqrt{\lambda + \delta}} \approx \sum_j \frac{c_j(\delta)}{\sqrt{\lambda + \nu_j}}.

For all :math:`\lambda \ge 0` at once that takes many nodes
(:mod:`laplace_debias.predictive.prior_nodes`). But only the posterior's own eigenvalues count, and
few of them lie where three nodes do badly: coefficients are those of least squares over the
eigenvalues, weighted by what each adds to a variance. That is
:math:`\lambda / (\lambda + \delta)` for data like those of the training, whose squared Jacobians
have the curvatures' own shares, and :math:`1 / (\lambda + \delta)` for data that know no
direction; half of the weight goes to each. The larger error of a standard deviation under both is
computed, and nodes are added until it is small against what the sampling itself leaves open,
:math:`1 / \sqrt{2 S}`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["FEWEST_NODES", "sample_nodes"]

FEWEST_NODES = 3
TOLERANCE = 0.05
"""Largest relative error of a standard deviation; that of 40 samples is 0.11."""
_BINS_PER_DECADE = 20


def sample_nodes(lams: Sequence[Tensor], deltas: Tensor) -> tuple[Tensor, Tensor] | None:
    r"""Find few prior precisions whose samples give those of all.

    Args:
        lams: Eigenvalues of the blocks.
        deltas: The prior precisions ``[k]``, positive.

    Returns:
        Nodes ``[r]`` and coefficients ``[r, k]``; ``None`` if as many nodes as prior precisions
        are needed.

    Example:
        >>> lams = [torch.logspace(-2, 6, 1000)]
        >>> nodes, coefficients = sample_nodes(lams, torch.logspace(0, 5, 14))
        >>> nodes.shape, coefficients.shape
        (torch.Size([3]), torch.Size([3, 14]))
    """
    k = len(deltas)
    values = deltas.double().cpu().numpy()
    if k <= FEWEST_NODES or values.min() == values.max():
        return None
    lam, n = _histogram(lams)
    for r in range(FEWEST_NODES, k):
        tried = [_fitted(lam, n, values, r, reach) for reach in (0.8, 0.9, 1.0)]
        nodes, coefficients, error = min(tried, key=lambda found: found[2])
        if error <= TOLERANCE:
            return torch.as_tensor(nodes).to(deltas), torch.as_tensor(coefficients).to(deltas)
    return None


def _histogram(lams: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues in logarithmic bins: a value, and how many there are, for each."""
    top = max(float(lam.max()) for lam in lams)
    low = 1e-12 * top
    edge = np.log10(low) if top > 0 else 0.0
    counts = np.zeros(12 * _BINS_PER_DECADE + 1)
    zeros = 0
    for lam in lams:
        positive = lam[lam > low].detach().double().log10()
        zeros += lam.numel() - positive.numel()
        at = ((positive - edge) * _BINS_PER_DECADE).long().clamp(0, len(counts) - 1)
        counts += torch.bincount(at, minlength=len(counts)).cpu().numpy()
    middle = 10 ** (edge + (np.arange(len(counts)) + 0.5) / _BINS_PER_DECADE)
    return np.concatenate([[0.0], middle]), np.concatenate([[float(zeros)], counts])


def _fitted(
    lam: np.ndarray, n: np.ndarray, deltas: np.ndarray, r: int, reach: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Nodes ``[r]`` with evenly spaced logarithms, coefficients ``[r, k]``, the largest error."""
    low, high = deltas.min(), deltas.max()
    middle, half = np.log(low * high) / 2, np.log(high / low) / 2
    nodes = np.exp(middle + reach * half * np.linspace(-1, 1, r))
    columns = [_coefficients(lam, n, nodes, delta) for delta in deltas]
    error = max(error for _, error in columns)
    return nodes, np.stack([c for c, _ in columns], axis=1), error


def _coefficients(
    lam: np.ndarray, n: np.ndarray, nodes: np.ndarray, delta: float
) -> tuple[np.ndarray, float]:
    """Coefficients ``[r]`` for one prior precision, and the error of a standard deviation."""
    shares = [n * lam / (lam + delta), n / (lam + delta)]
    shares = [share / share.sum() for share in shares if share.sum() > 0]
    root = np.sqrt(sum(shares))
    M = np.sqrt((lam[:, None] + delta) / (lam[:, None] + nodes))
    c = np.linalg.lstsq(M * root[:, None], root, rcond=None)[0]
    squares = (M @ c) ** 2
    return c, max(abs(float(np.sqrt(share @ squares)) - 1) for share in shares)
