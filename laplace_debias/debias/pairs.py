r"""Which (datum, class) pairs deserve a backward pass: drawn jointly, by their share of the trace.

The loss Hessian of a datum is a sum over classes, with one backward vector each::

    diag(p) - p p^T = sum_y v_y v_y^T     v_y = sqrt(p_y) (e_y - p)     |v_y|^2 = p_y |e_y - p|^2

(half squared error: ``I = sum_y e_y e_y^T``, yes-or-no outputs: ``sum_y p_y (1 - p_y) e_y e_y^T``).
The curvature of a pool of n data is a sum over n C such pairs. Its trace at the network's output is
the sum of the scores ``|v_y|^2``, which a forward pass tells. m pairs are drawn with the inclusion
probabilities

.. math:: \pi_i = \min(1, a s_i), \qquad \textstyle\sum_i \pi_i = m,

and weighted by :math:`1 / \pi_i` (Horvitz and Thompson 1952): unbiased for every sum over the pool,
no pair is drawn twice, pairs of large score are certain, and all of them if m is large enough. The
draw is systematic: probabilities are laid end to end in an order that puts similar pairs side by
side, and m equidistant points with one random offset pick the pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_debias.debias.sampling import checked_scores
from laplace_debias.network.loss import label_variances
from laplace_debias.network.ownership import OwnedParameter

__all__ = [
    "PairDraw",
    "check_blocks",
    "draw_pairs",
    "inclusion_probabilities",
    "pair_order",
    "pair_scores",
    "pair_vectors",
    "pairs_of_data",
    "spread_order",
]

N_COMPONENTS = 8  # of the features, that an order looks at


@dataclass(frozen=True)
class PairDraw:
    """Pairs of datum and class, in the order of the draw.

    Attributes:
        data: Positions in the pool, ``[m]``.
        classes: Classes (outputs) of the pairs, ``[m]``.
        probabilities: Inclusion probabilities, ``[m]``, in float64.
    """

    data: Tensor
    classes: Tensor
    probabilities: Tensor

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.data)


def check_blocks(owned: Iterable[OwnedParameter]) -> None:
    """Raise where pairs would not be the curvature.

    Args:
        owned: The parameters and their layers.

    Raises:
        ValueError: If some are parametrised weights.

    Example:
        >>> check_blocks([OwnedParameter("weight", "weight", (torch.nn.Linear(2, 1),))])
    """
    originals = [p.name for p in owned if p.original is not None]
    if originals:
        raise ValueError(
            "Expected plain weights, and scales and shifts, with debias='auto', got parametrised "
            f"ones ({originals}). Remedy: debias=True, or `bake_parametrizations(model)`."
        )


def pair_scores(outputs: Tensor, likelihood: str = "classification") -> Tensor:
    """Share of each pair in the trace of the pool's output Hessian.

    Args:
        outputs: Network outputs ``[n, C]``.
        likelihood: ``"classification"`` gives ``p_y |e_y - p|^2``, ``"regression"`` ones,
            ``"bernoulli"`` ``p_y (1 - p_y)``.

    Returns:
        Scores ``[n, C]`` in float64; a classifier's rows sum to ``1 - sum_c p_c^2``.

    Example:
        >>> pair_scores(torch.zeros(1, 2))
        tensor([[0.2500, 0.2500]], dtype=torch.float64)
    """
    if likelihood == "regression":
        return torch.ones(outputs.shape, dtype=torch.float64, device=outputs.device)
    if likelihood == "bernoulli":
        return label_variances(outputs.double())
    log_p = outputs.double().log_softmax(-1)
    p, squares = log_p.exp(), (2 * log_p).exp()
    others = (squares.sum(-1, keepdim=True) - squares).clamp(min=0)  # sum over c != y of p_c^2
    return p * (log_p.expm1().square() + others)


def pair_vectors(outputs: Tensor, classes: Tensor, likelihood: str = "classification") -> Tensor:
    """Backward vectors of pairs, ``sqrt(p_y) (e_y - p)``, ``e_y`` or ``sqrt(p_y (1 - p_y)) e_y``.

    Args:
        outputs: Network outputs ``[m, C]``, one row per pair.
        classes: Class of each pair, ``[m]``.
        likelihood: ``"classification"``, ``"regression"`` or ``"bernoulli"``.

    Returns:
        Vectors ``[m, C]`` in the type of the outputs, at least single precision.

    Example:
        >>> pair_vectors(torch.zeros(1, 2), torch.tensor([1]))
        tensor([[-0.3536,  0.3536]])
    """
    f = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    unit = torch.nn.functional.one_hot(classes, f.shape[-1]).to(f)
    if likelihood == "regression":
        return unit
    if likelihood == "bernoulli":
        return unit * label_variances(f).sqrt()
    log_p = f.log_softmax(-1)
    root = (0.5 * log_p.gather(-1, classes[:, None])).exp()
    return root * (unit - log_p.exp())


def inclusion_probabilities(scores: Tensor, m: int) -> Tensor:
    r"""Probabilities :math:`\min(1, a s_i)` that sum to m.

    Args:
        scores: Non-negative scores ``[n]``.
        m: Number of draws.

    Returns:
        Probabilities ``[n]`` in float64: 0 exactly where a score is 0, and 1 for all others if they
        are no more than m.

    Raises:
        ValueError: If scores are negative or not finite, or m is not positive.

    Example:
        >>> inclusion_probabilities(torch.tensor([6.0, 1.0, 1.0, 0.0]), 2)
        tensor([1.0000, 0.5000, 0.5000, 0.0000], dtype=torch.float64)
    """
    scores = checked_scores(scores)
    if m < 1:
        raise ValueError(f"Expected at least one draw, got {m}. Remedy: pass a larger number.")
    positive = scores > 0
    if int(positive.sum()) <= m:
        return positive.to(scores)
    # With scores descending, the k largest are certain for the least k that leaves a s <= 1.
    ordered = scores.sort(descending=True).values
    left = ordered.flip(0).cumsum(0).flip(0)  # sum of this score and all smaller ones
    places = torch.arange(m, 0, -1, dtype=scores.dtype, device=scores.device)
    fits = places * ordered[:m] <= left[:m]
    k = int(fits.to(torch.int8).argmax()) if bool(fits.any()) else m - 1
    return ((m - k) / left[k] * scores).clamp(max=1.0)


def draw_pairs(
    scores: Tensor, m: int, order: Tensor, generator: torch.Generator | None = None
) -> PairDraw:
    """Draw pairs systematically, each at most once.

    Args:
        scores: Scores ``[n, C]``; pairs with 0 are never drawn.
        m: Number of pairs; fewer are drawn where fewer have a positive score.
        order: Permutation ``[n * C]`` of the pairs ``datum * C + class``.
        generator: Source of the offset; the global one by default.

    Returns:
        The pairs, in their order.

    Example:
        >>> draw = draw_pairs(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), 3, torch.arange(4))
        >>> draw.data.tolist(), draw.classes.tolist(), draw.probabilities.tolist()
        ([0, 1, 1], [0, 0, 1], [1.0, 1.0, 1.0])
    """
    pi = inclusion_probabilities(scores.flatten(), m)[order]
    offset = torch.rand((), dtype=pi.dtype, device=pi.device, generator=generator)
    # Certain pairs stand apart: rounding of the sum must not lose one.
    certain = pi >= 1
    ends = torch.where(certain, 0.0, pi).cumsum(0)
    hits = torch.floor(ends + offset) > torch.floor(
        torch.cat([ends.new_zeros(1), ends[:-1]]) + offset
    )
    picks = order[certain | (hits & (pi > 0))]
    C = scores.shape[1]
    chosen = pi[certain | (hits & (pi > 0))]
    return PairDraw(picks // C, picks % C, chosen)


def pairs_of_data(data: Tensor) -> list[Tensor]:
    """Draws of the same datum together, so that they share its forward pass.

    Args:
        data: Positions in the pool of m draws, ``[m]``.

    Returns:
        For each number k of draws that a datum has, in ascending order, the draws of such data,
        ``[n, k]``. Data follow each other by their first draw.

    Example:
        >>> [part.tolist() for part in pairs_of_data(torch.tensor([7, 4, 7, 5]))]
        [[[1], [3]], [[0, 2]]]
    """
    _, which, counts = data.unique(return_inverse=True, return_counts=True)
    order = which.argsort(stable=True)
    counts = counts[which[order]]  # of the datum of each draw, draws of a datum side by side
    found = []
    for k in counts.unique().tolist():
        draws = order[counts == k].reshape(-1, k)
        found.append(draws[draws[:, 0].argsort()])
    return found


def pair_order(outputs: Tensor, features: Tensor, likelihood: str = "classification") -> Tensor:
    """Order of a pool's pairs that puts similar ones side by side.

    A classifier's pairs are grouped by the two classes that their vector tells apart, the pair's
    and the predicted one; within a group, and for other likelihoods within each output, data follow
    :func:`spread_order` of their features.

    Args:
        outputs: Network outputs ``[n, C]``.
        features: Features ``[n, d]`` of the data.
        likelihood: ``"classification"``, ``"regression"`` or ``"bernoulli"``.

    Returns:
        Permutation ``[n * C]`` of the pairs ``datum * C + class``.

    Example:
        >>> pair_order(torch.zeros(3, 1), torch.tensor([[2.0], [0.0], [1.0]]), "regression")
        tensor([1, 2, 0])
    """
    n, C = outputs.shape
    rank = torch.empty(n, dtype=torch.long, device=outputs.device)
    rank[spread_order(features)] = torch.arange(n, device=outputs.device)
    y = torch.arange(C, device=outputs.device).expand(n, C)
    group = y
    if likelihood == "classification":
        predicted = outputs.argmax(-1, keepdim=True).expand(n, C)
        group = torch.minimum(y, predicted) * C + torch.maximum(y, predicted)
    return (group * n + rank[:, None]).flatten().argsort()


def spread_order(features: Tensor) -> Tensor:
    """Order of points along a tree of halves: neighbours are near each other in all directions.

    The points are halved at the median of their most varied principal component, again and again,
    and every second half is walked backwards. Equidistant points of this order are spread over the
    whole cloud.

    Args:
        features: Points ``[n, d]``.

    Returns:
        Permutation ``[n]``.

    Example:
        >>> spread_order(torch.tensor([[3.0], [1.0], [2.0], [0.0]])).tolist()
        [3, 1, 2, 0]
    """
    X = features.double() - features.double().mean(0)
    if X.shape[1] > N_COMPONENTS:
        vectors = torch.linalg.eigh(X.T @ X)[1][:, -N_COMPONENTS:]
        X = X @ vectors
    parts = [torch.arange(len(X), device=X.device)]
    while any(len(part) > 2 for part in parts):
        halves: list[Tensor] = []
        for part in parts:
            if len(part) <= 2:
                halves.append(part)
                continue
            Z = X[part]
            axis = Z.var(0).argmax()
            sorted_part = part[Z[:, axis].argsort(stable=True)]
            halves += [sorted_part[: len(part) // 2], sorted_part[len(part) // 2 :]]
        parts = halves
    return torch.cat(_snake(parts, X))


def _snake(parts: list[Tensor], X: Tensor) -> list[Tensor]:
    """Pairs of neighbouring leaves, each turned to begin near the end of the one before."""
    turned = parts[:1]
    for part in parts[1:]:
        last = X[turned[-1][-1]]
        near = (X[part] - last).square().sum(1)
        turned.append(part.flip(0) if len(part) > 1 and near[-1] < near[0] else part)
    return turned
