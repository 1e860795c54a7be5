"""How many data a budget of backward passes pays for.

A datum takes one backward pass for each of its backward vectors: one that is drawn
(``fisher="mc"``) or the gradient itself (``"empirical"``), or all columns of a root of its loss
Hessian (``"exact"``: C - 1 for a softmax over C classes, C otherwise).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from laplace_debias.data.inputs import Inputs
from laplace_debias.debias.options import CrossfitOptions
from laplace_debias.kfac.interface import EngineInterface
from laplace_debias.network.calling import call_model
from laplace_debias.network.preserve import evaluation_mode

__all__ = ["paid_for", "passes_per_datum"]


def passes_per_datum(engine: EngineInterface, X: Inputs) -> int:
    """Backward passes that a datum takes.

    With exact vectors a forward pass of the datum tells. Like those that check a model it is not
    counted: each of several processes makes its own.

    Args:
        engine: Knows its vectors; may choose to draw them where a datum has too many.
        X: Inputs of one datum.

    Returns:
        1, or the number of exact vectors.

    Raises:
        ValueError: If data may differ in that, with one set of vectors for each token or pixel.

    Example:
        >>> from laplace_debias.kfac.engine import Engine
        >>> net = torch.nn.Linear(3, 10)
        >>> passes_per_datum(Engine(net, "classification"), torch.randn(1, 3))
        9
        >>> passes_per_datum(Engine(net, "classification", fisher="mc"), torch.randn(1, 3))
        1
    """
    if engine.fisher != "exact":
        return 1
    with engine.cost.stage("verification"), torch.no_grad(), evaluation_mode(engine.root):
        f = call_model(engine.root, X if engine.embed is None else engine.embed(X))
    engine.choose_fisher(f)
    if engine.fisher == "exact" and f.ndim > 2:
        raise ValueError(
            "Expected outputs [n, C] with `n_passes` and exact vectors, so that all data take "
            f"equally many passes, got {list(f.shape)}. Remedy: fisher='mc', or `n_curvature`, the "
            "number of data."
        )
    return engine.backward_vectors_of(X, f, None, None)[0]


def paid_for(options: CrossfitOptions, n_vectors: int) -> CrossfitOptions:
    """Options with the number of data that their budget pays for.

    Args:
        options: With ``n_passes``, which are never exceeded.
        n_vectors: Passes of each datum.

    Returns:
        The same options, ``n_curvature = n_passes // n_vectors`` instead of ``n_passes``.

    Raises:
        ValueError: If that is not enough for the folds, or more than the pool has.

    Example:
        >>> paid_for(CrossfitOptions(n_passes=60), 9).n_curvature
        6
    """
    assert options.n_passes is not None
    n, K = options.n_passes // n_vectors, options.n_folds
    if n < K:
        raise ValueError(
            f"Expected `n_passes` of at least {K * n_vectors}, one datum with {n_vectors} backward "
            f"passes for each of {K} folds, got {options.n_passes}. Remedy: pass a larger number, "
            "or fisher='mc', one pass per datum."
        )
    return replace(options, n_passes=None, n_curvature=n)
