r"""Which data deserve backward passes: draw them by the curvature they carry, and weight them back.

A datum adds to every output factor B in proportion to its output Hessian, whose trace is
``1 - sum_c p_c^2`` for softmax. In a well-trained classifier it nearly vanishes for most data, so
that a uniform draw wastes its backward passes on them. Instead, data are drawn with replacement,
with probabilities ``q`` from their scores ``s`` mixed with a little of the uniform distribution
over the ``n`` data of a pool, and each gets an importance weight::

    q_i = (1 - u) s_i / sum_j s_j + u / n            w_i = 1 / (n q_i)

For any function h, ``1/m sum_{j=1}^m w_{i_j} h_{i_j}`` is then unbiased for the pool's mean of h.
The uniform part bounds the weights by ``1 / u``. Its share matters little: 2 to 10 per cent came
out the same within errors, see ``examples/research/debiasing_losers.py``.

``laplace_debias.debias.reservoirs`` makes the independent draw from a stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_debias.network.loss import curvature_scores

DEFAULT_SHARE = 0.05
"""Share of the uniform distribution in the mixture.

See ``examples/research/debiasing_losers.py``.
"""


@dataclass(frozen=True)
class WeightedDraw:
    """Data drawn from a pool, with importance weights.

    Attributes:
        indices: Positions in the pool, ``[m]``; a datum may occur more than once.
        weights: ``1 / (n_pool q)`` of each, ``[m]``, in float64.
        n_pool: Number of data in the pool.
    """

    indices: Tensor
    weights: Tensor
    n_pool: int


def sampling_probabilities(scores: Tensor, uniform: float = DEFAULT_SHARE) -> Tensor:
    """Probabilities proportional to the scores, mixed with the uniform distribution.

    Args:
        scores: Non-negative score ``[n]`` of each datum in the pool.
        uniform: Share u of the uniform distribution, in ``[0, 1]``.

    Returns:
        Probabilities q, ``[n]``, in float64.

    Raises:
        ValueError: If scores are negative, not finite or all zero, or ``uniform`` lies outside
            ``[0, 1]``.

    Example:
        >>> sampling_probabilities(torch.tensor([0.0, 1.0]), uniform=0.2)
        tensor([0.1000, 0.9000], dtype=torch.float64)
    """
    scores = checked_scores(scores)
    check_share(uniform)
    total = scores.sum()
    if not total > 0:
        raise ValueError(
            f"Expected at least one positive score, got {len(scores)} zeros: the model is so sure "
            "of every datum that none carries curvature. Remedy: sample uniformly."
        )
    return (1 - uniform) * scores / total + uniform / len(scores)


def draw_weighted(
    scores: Tensor,
    m: int,
    *,
    uniform: float = DEFAULT_SHARE,
    order: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> WeightedDraw:
    """Draw data from a pool by their scores, with replacement.

    Without ``order`` the draws are independent. With it they are systematic: the probabilities are
    laid end to end in that order, and m equidistant points with one random offset pick the data.
    Every datum is expected as often as before, so the weights and unbiasedness are the same; but
    data that are neighbours in the order now share their draws evenly, which takes away the
    variance between groups of neighbours.

    Draws for different folds must come from different calls, to be independent of each other: the
    folds of one systematic draw exclude each other's data, and so under-estimate the curvature
    along each other's directions.

    Args:
        scores: Non-negative score ``[n]`` of each datum in the pool.
        m: Number of data to draw.
        uniform: Share of the uniform distribution in the mixture.
        order: Permutation ``[n]`` of the pool that puts similar data side by side, for instance
            ``curvature_order(outputs)``.
        generator: Source of randomness on the scores' device; the global one by default.

    Returns:
        The data's positions and weights.

    Raises:
        ValueError: As ``sampling_probabilities``, or if the pool is smaller than the draw, or
            ``order`` has the wrong length.

    Example:
        >>> draw = draw_weighted(torch.tensor([0.0, 1.0, 1.0, 0.0]), 2, uniform=0.0)
        >>> draw.weights
        tensor([0.5000, 0.5000], dtype=torch.float64)
        >>> draw_weighted(torch.ones(4), 4, order=torch.arange(4)).indices.sort().values
        tensor([0, 1, 2, 3])
    """
    q = sampling_probabilities(scores, uniform)
    n = len(q)
    if not 1 <= m <= n:
        raise ValueError(
            f"Expected to draw between 1 and {n} data from a pool of {n}, got {m}. Remedy: score a "
            "larger pool, or draw fewer data."
        )
    if order is None:
        u = torch.rand(m, dtype=torch.float64, device=q.device, generator=generator)
    elif order.shape != q.shape:
        raise ValueError(
            f"Expected an order of shape [{n}], got {list(order.shape)}. Remedy: pass a "
            "permutation of the pool."
        )
    else:
        offset = torch.rand(1, dtype=torch.float64, device=q.device, generator=generator)
        u = (torch.arange(m, device=q.device) + offset) / m
    cumulative = (q if order is None else q[order]).cumsum(0)
    # The last point may be rounded up to the end, behind all data.
    picks = torch.searchsorted(cumulative, u * cumulative[-1], right=True).clamp(max=n - 1)
    indices = picks if order is None else order[picks]
    return WeightedDraw(indices, 1 / (n * q[indices]), n)


def distinct(draw: WeightedDraw) -> tuple[list[int], Tensor]:
    """Each datum once, with the sum of its weights: no backward pass is made twice.

    Args:
        draw: A draw, in which data may occur several times.

    Returns:
        Positions in the pool, ascending, and their weights.

    Example:
        >>> distinct(WeightedDraw(torch.tensor([3, 1, 3]), torch.tensor([1.0, 2.0, 1.0]), 4))
        ([1, 3], tensor([2., 2.]))
    """
    rows, where = draw.indices.unique(return_inverse=True)
    weights = torch.zeros(len(rows), dtype=draw.weights.dtype, device=draw.weights.device)
    return rows.tolist(), weights.index_add(0, where, draw.weights)


def curvature_order(outputs: Tensor) -> Tensor:
    """Order of a pool for systematic draws: by predicted class, then by score.

    Args:
        outputs: Network outputs ``[n, C]`` of a classifier.

    Returns:
        Permutation ``[n]``.

    Example:
        >>> curvature_order(torch.tensor([[0.0, 9.0], [1.0, 0.0], [0.0, 1.0], [9.0, 0.0]]))
        tensor([3, 1, 0, 2])
    """
    return torch.argsort(outputs.argmax(-1) + 0.5 * curvature_scores(outputs))  # scores are below 1


def effective_sample_size(weights: Tensor) -> float:
    """How many equal contributions vary as little as these: ``(sum w)^2 / sum w^2``.

    Args:
        weights: Non-negative contributions ``[n]``: scores for a uniform draw, or
            ``weights * scores`` for a weighted one.

    Returns:
        A number between 1 and n.

    Raises:
        ValueError: If the contributions are negative, not finite or all zero.

    Example:
        >>> effective_sample_size(torch.tensor([1.0, 1.0, 0.0, 0.0]))
        2.0
    """
    weights = checked_scores(weights)
    if not weights.sum() > 0:
        raise ValueError(
            f"Expected a positive contribution, got {len(weights)} zeros. Remedy: pass scores of "
            "which at least one is positive; a model that is sure of every datum gives none."
        )
    return float(weights.sum() ** 2 / weights.square().sum())


def checked_scores(scores: Tensor) -> Tensor:
    """Raise unless there is one finite, non-negative number per datum.

    Args:
        scores: Scores ``[n]``.

    Returns:
        The scores in float64.

    Raises:
        ValueError: If the shape is wrong, or a score is negative or not finite.

    Example:
        >>> checked_scores(torch.tensor([0.0, 2.0]))
        tensor([0., 2.], dtype=torch.float64)
    """
    if scores.ndim != 1 or not len(scores):
        raise ValueError(
            f"Expected scores of shape [n], got {list(scores.shape)}. Remedy: pass one score per "
            "datum."
        )
    scores = scores.double()
    bad = ~(torch.isfinite(scores) & (scores >= 0))
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise ValueError(
            f"Expected finite, non-negative scores, got {float(scores[first])} for datum {first} "
            f"and {int(bad.sum())} such scores in all. Remedy: check the model's outputs for "
            "these data."
        )
    return scores


def check_share(uniform: float) -> None:
    """Raise unless a share lies between 0 and 1.

    Args:
        uniform: The share.

    Raises:
        ValueError: If it does not.

    Example:
        >>> check_share(0.05)
    """
    if not 0 <= uniform <= 1:
        raise ValueError(
            f"Expected the uniform share to lie in [0, 1], got {uniform}. "
            f"Remedy: pass a share in between; {DEFAULT_SHARE} is a good choice."
        )


def even_parts(n: int, k: int) -> list[int]:
    """Cut n into k whole numbers that differ by one at most.

    Args:
        n: The number.
        k: How many parts.

    Returns:
        The parts, larger ones first.

    Example:
        >>> even_parts(10, 4)
        [3, 3, 2, 2]
    """
    return [n // k + (i < n % k) for i in range(k)]
