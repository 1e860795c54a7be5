r"""Many prior precisions from a few: the posterior variance as a rational function of it.

For one eigenvalue :math:`\lambda \ge 0` of the curvature, the posterior variance
:math:`1 / (\lambda + \delta)` is a smooth function of the logarithm of the prior precision
:math:`\delta`. So its values at r nodes :math:`\nu_j` give it everywhere between them,

.. math::
    \frac{1}{\lambda + \delta} \approx \sum_{j=1}^{r} \frac{c_j(\delta)}{\lambda + \nu_j}
    \quad \text{for all } \lambda \ge 0,

with coefficients that do not depend on :math:`\lambda`. Every predictive (co)variance is a sum of
such terms with weights :math:`\tilde J_c \tilde J_d`, and so obeys the same formula: a grid of a
hundred prior precisions costs what r nodes cost. The *relative* error of a variance is at most
:math:`\epsilon = \max_\lambda |(\lambda + \delta) \sum_j c_j / (\lambda + \nu_j) - 1|`, whatever
the network and the data; it is computed here and kept at the rounding error of the arithmetic.

The grid is cut into segments with 16 Chebyshev nodes in :math:`\log \delta` each, which keeps
:math:`\sum_j |c_j|` small: 2.5 decades reach 1.3e-7, one decade 1.5e-13.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

__all__ = ["prior_nodes"]

N_NODES = 16  # per segment; a multiple of what matrix kernels like
TOLERANCE = {torch.float32: 2e-7, torch.float64: 1e-12}


def prior_nodes(deltas: Tensor) -> tuple[Tensor, Tensor] | None:
    r"""Find few prior precisions whose posterior variances give those of all.

    Args:
        deltas: The prior precisions ``[k]``, positive.

    Returns:
        Nodes ``[r]`` and coefficients ``[r, k]`` such that
        ``(1 / (lam + nodes)) @ coefficients`` is ``1 / (lam + deltas)`` for every ``lam >= 0``, to
        a relative error of 2e-7 (float32) or 1e-12 (float64); ``None`` if that takes as many nodes
        as there are prior precisions.

    Example:
        >>> deltas = torch.logspace(-2, 3, 100)
        >>> nodes, coefficients = prior_nodes(deltas)
        >>> nodes.shape, coefficients.shape
        (torch.Size([32]), torch.Size([32, 100]))
        >>> variances = (1 / (5.0 + nodes)) @ coefficients
        >>> torch.allclose(variances, 1 / (5.0 + deltas), rtol=1e-6)
        True
    """
    if len(deltas) <= N_NODES:
        return None
    tolerance = TOLERANCE[deltas.dtype]
    found = _nodes(tuple(deltas.double().tolist()), tolerance)
    if found is None:
        return None
    nodes, coefficients = (torch.as_tensor(part).to(deltas) for part in found)
    return nodes, coefficients


@lru_cache(maxsize=16)
def _nodes(deltas: tuple[float, ...], tolerance: float) -> tuple[np.ndarray, np.ndarray] | None:
    """Nodes and coefficients in float64, with as few segments as the tolerance allows."""
    values = np.asarray(deltas)
    low, high = values.min(), values.max()
    if high == low:
        return None
    for n_segments in range(1, math.ceil(len(values) / N_NODES)):
        borders = np.geomspace(low, high, n_segments + 1)
        segment = np.clip(np.searchsorted(borders, values, side="right") - 1, 0, n_segments - 1)
        nodes = np.zeros(n_segments * N_NODES)
        coefficients = np.zeros((len(nodes), len(values)))
        error = 0.0
        for i in range(n_segments):
            part, mine = slice(i * N_NODES, (i + 1) * N_NODES), segment == i
            nodes[part] = _chebyshev(borders[i], borders[i + 1])
            coefficients[part, mine], worst = _coefficients(values[mine], nodes[part])
            error = max(error, worst)
        if error <= tolerance:
            return nodes, coefficients
    return None


def _chebyshev(low: float, high: float) -> np.ndarray:
    """Chebyshev points of the logarithm, stretched so that the outermost are the ends."""
    t = -np.cos(np.pi * (np.arange(N_NODES) + 0.5) / N_NODES)
    middle, half = np.log(low * high) / 2, np.log(high / low) / 2
    return np.asarray(np.exp(middle + half * t / t[-1]))


def _coefficients(values: np.ndarray, nodes: np.ndarray) -> tuple[np.ndarray, float]:
    """Least-squares coefficients ``[r, k]`` over all eigenvalues, and their largest error."""
    lam = np.geomspace(nodes[0] * 1e-3, nodes[-1] * 1e3, 40 * len(nodes))
    lam = np.concatenate([[0.0], lam, [nodes[-1] * 1e12]])[:, None]
    columns, error = np.zeros((len(nodes), len(values))), 0.0
    for i, delta in enumerate(values):
        M = (lam + delta) / (lam + nodes)
        columns[:, i] = np.linalg.lstsq(M, np.ones(len(lam)), rcond=1e-15)[0]
        error = max(error, np.abs(M @ columns[:, i] - 1).max())
    return columns, error
