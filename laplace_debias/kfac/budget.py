r"""How many data a pass may take within a budget of memory, and what factors take in any case.

Factors add up over data, so that a mini-batch may be passed in pieces: the sums are the same. What
a piece of n data takes is measured, on one datum and on two, by counting the bytes of live tensors
(:mod:`laplace_debias.network.live_bytes`); it grows with n by the difference of the two. Beside it
live the factors so far and their sum with the new ones, and while one is decomposed its copies in
double precision. Folds are kept side by side, and one factor of all of them is copied in double
precision four times: as it is, scaled, and added up from both ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from copy import copy

import torch

from laplace_debias.data.inputs import Inputs, Keys, size_of, take
from laplace_debias.kfac.counts import FitCost
from laplace_debias.kfac.interface import EngineInterface
from laplace_debias.network.live_bytes import LiveBytes
from laplace_debias.network.ownership import OwnedParameter

__all__ = ["data_at_once", "factor_bytes", "peak_of", "within_budget"]


def within_budget(
    engine: object,
    budget: float | None,
    key: Keys,
    check: Callable[[Inputs], None],
    checks: bool = True,
    n_folds: int = 0,
) -> Callable[[Inputs], None] | None:
    """What to do with the first mini-batch of a fit, so that it keeps to a budget.

    Args:
        engine: Makes the factors.
        budget: Bytes that the fit may add to what is there; ``None`` for any.
        key: Which entries of inputs that are mappings run over the data.
        check: What is to be done with the mini-batch besides.
        checks: Whether that is to be done.
        n_folds: Number of folds that are kept side by side, if any are.

    Returns:
        A function of the inputs, which sets how many data one pass takes; ``None`` if there is
        nothing to do. The engine knows the budget.

    Raises:
        ValueError: If the budget is no positive number, or a backend of laplace-torch's makes the
            factors.

    Example:
        >>> from laplace_debias.kfac.engine import Engine
        >>> engine = Engine(torch.nn.Linear(3, 2), "classification")
        >>> within_budget(engine, 1e6, "x", print, checks=False)(torch.ones(8, 3))
        >>> engine.chunk
        8
    """
    if budget is None:
        return check if checks else None
    if not isinstance(engine, EngineInterface):
        raise ValueError(
            "Expected the backend HookGGN or HookEF with a `memory_budget`, got one of "
            "laplace-torch's, which passes a mini-batch at once. Remedy: leave `backend` out."
        )
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0:
        raise ValueError(
            f"Expected `memory_budget` as a positive number of bytes, got {budget!r}. Remedy: e.g. "
            "4 * 2**30."
        )
    own: EngineInterface = engine
    own.budget = int(budget)

    def plan(X: Inputs) -> None:
        own.key, own.chunk = key, data_at_once(own, X, int(budget), key, n_folds)
        if checks:
            check(X)

    return plan


def factor_bytes(owned: Sequence[OwnedParameter]) -> dict[str, int]:
    """Bytes of the Kronecker factors of every parameter, in at least single precision.

    Args:
        owned: The parameters.

    Returns:
        By name: ``d_out^2 + d_in^2`` numbers of a weight, ``d^2`` of any other.

    Example:
        >>> from laplace_debias.network.ownership import owned_parameters
        >>> factor_bytes(owned_parameters(torch.nn.Linear(3, 2)))
        {'weight': 52, 'bias': 16}
    """
    return {p.name: sum(d**2 for d in p.sides) * _itemsize(p) for p in owned}


def data_at_once(
    engine: EngineInterface, X: Inputs, budget: int, key: Keys = "input_ids", n_folds: int = 0
) -> int:
    """Number of data that one pass may take, so that a fit stays within a budget.

    Args:
        engine: The engine; neither its counts nor its generator are touched.
        X: Inputs of the first mini-batch.
        budget: Bytes that a fit may add to what is there.
        key: Key of the inputs in a mapping.
        n_folds: Number of folds that are kept side by side, if any are.

    Returns:
        At least 1, at most the size of the mini-batch.

    Raises:
        ValueError: If the factors alone are more, or the pass of one datum with them.

    Example:
        >>> from laplace_debias.kfac.engine import Engine
        >>> engine = Engine(torch.nn.Linear(3, 2), "classification")
        >>> data_at_once(engine, torch.ones(8, 3), 10**6)
        8
    """
    sizes = factor_bytes(engine.owned)
    whole = sum(sizes.values())
    largest = max(sizes, key=lambda name: sizes[name])
    widest = max(side for p in engine.owned for side in p.sides)
    # the sum of what was there and what is new; or a factor's copies, its eigenvectors among them
    least, kept = max(3 * whole, 2 * whole + 3 * 8 * widest**2), 3 * whole
    if n_folds:  # their bases in double precision, and copies of one factor of all folds
        doubles = sum(8 * d**2 for p in engine.owned for d in p.sides)
        kept = (n_folds + 2) * whole  # with the sum over pieces, before and after
        least = max(3 * whole, n_folds * whole + doubles + (32 * n_folds + 8) * widest**2)
    said = (
        f"the Kronecker factors of all parameters take {whole:,} bytes, those of '{largest}' "
        f"{sizes[largest]:,} of them, and a fit has up to {least:,} at a time"
    )
    remedy = f"Remedy: a larger budget, freeze '{largest}', or subset_of_weights=\"last_layer\"."
    if least > budget:
        raise ValueError(
            f"Expected a `memory_budget` that holds the factors, got {budget:,} bytes: {said}. "
            f"{remedy}"
        )
    one = peak_of(engine, lambda trial: trial.factors(take(X, slice(0, 1), key)))
    free = budget - kept - one
    if free < 0:
        raise ValueError(
            f"Expected a `memory_budget` for the pass of at least one datum, got {budget:,} bytes: "
            f"it takes {one:,} itself, and {said}. {remedy}"
        )
    n = size_of(X, key)
    if n == 1:
        return 1
    two = peak_of(engine, lambda trial: trial.factors(take(X, slice(0, 2), key)))
    each = max(two - one, 1)
    return int(min(n, 1 + free // each))


def peak_of(engine: EngineInterface, passing: Callable[[EngineInterface], object]) -> int:
    """Bytes that passes take.

    Args:
        engine: The engine; neither its counts nor its generator are touched.
        passing: Makes the passes, by an engine whose counts nobody reads.

    Returns:
        The peak of live tensors.

    Example:
        >>> from laplace_debias.kfac.engine import Engine
        >>> engine = Engine(torch.nn.Linear(3, 2), "classification")
        >>> peak_of(engine, lambda trial: trial.factors(torch.ones(8, 3))) > 4 * 8 * 3
        True
    """
    trial = copy(engine)
    trial.cost, trial.first_output, trial.reached = FitCost(), None, set(engine.names)
    trial.generator = torch.Generator(next(engine.root.parameters()).device)
    trial.chunk = None
    trial.fisher = "mc" if engine.fisher == "empirical" else engine.fisher  # no labels are known
    with warnings.catch_warnings(), LiveBytes() as live:
        warnings.simplefilter("ignore")
        passing(trial)
    peak: int = live.peak
    return peak


def _itemsize(p: OwnedParameter) -> int:
    """Bytes of a number of its factors."""
    return torch.promote_types(p.tensor.dtype, torch.float32).itemsize
