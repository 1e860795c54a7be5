"""Which way ``method="auto"`` takes to the variances of outputs, by what each way costs."""

from __future__ import annotations

from laplace_debias.predictive.sample_nodes import FEWEST_NODES

__all__ = ["N_TOP", "cheapest_method"]

N_TOP = 20
"""Most classes whose variances the way ``"top"`` makes exact."""


def cheapest_method(
    n_outputs: int, n_priors: int, n_samples: int, *, diagonal: bool, top: bool, shared: bool = True
) -> str:
    """The exact way, unless it costs more than five times another.

    Counted in forward passes, as measured on EfficientNet-Lite0: one backward pass costs about one,
    the contraction of its output two to three, a product of the Jacobian with a step of the weights
    four to five. The exact way takes a backward pass and a contraction per output (of all
    positions), and, unless only diagonals are needed, C products per output and prior precision;
    ``"top"`` does so for at most 20 outputs; S samples take a product each at every prior
    precision, or at three that give the others.

    Args:
        n_outputs: Number C of a datum's outputs.
        n_priors: Number k of prior precisions.
        n_samples: Number S of samples.
        diagonal: Whether variances are enough.
        top: Whether ``"top"`` can be taken.
        shared: Whether prior precisions are numbers, which a few nodes give.

    Returns:
        ``"exact"``, ``"top"`` or ``"samples"``.

    Example:
        >>> cheapest_method(10, 14, 100, diagonal=True, top=True)
        'exact'
        >>> cheapest_method(1000, 1, 100, diagonal=True, top=True)
        'top'
        >>> cheapest_method(1000, 1, 100, diagonal=False, top=False)
        'samples'
    """
    nodes = min(n_priors, FEWEST_NODES) if shared else n_priors
    costs = {"samples": 4 * max(n_samples, 20) * nodes}
    exact = 4 * n_outputs + (0 if diagonal else n_outputs * n_priors)
    if top and diagonal:
        costs["top"] = 4 * N_TOP
    best = min(costs, key=lambda name: costs[name])
    return "exact" if 5 * costs[best] >= exact else best
