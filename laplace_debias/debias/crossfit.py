"""Fit a cross-fitted posterior: read the data, form the factors of every fold, count the passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from laplace_debias.data.pool import Batch, MapStyle, concatenate, is_map_style, segments
from laplace_debias.data.reading import check_targets
from laplace_debias.data.reading import read as read_batches
from laplace_debias.debias.few_rows import few_rows_from
from laplace_debias.debias.fitting import Fitted
from laplace_debias.debias.fold_blocks import crossfit_kron
from laplace_debias.debias.options import CrossfitOptions, even_parts
from laplace_debias.debias.pool_pass import PoolPass
from laplace_debias.debias.reservoirs import Reservoirs
from laplace_debias.debias.sampling import (
    WeightedDraw,
    curvature_order,
    curvature_scores,
    draw_weighted,
)
from laplace_debias.kfac.counted import FitCost, Network
from laplace_debias.kfac.engine import KFACFactors
from laplace_debias.kfac.input_factors import InputFactors
from laplace_debias.network.capture import take
from laplace_debias.network.loss import loss_sum, mean_loss_hessian

__all__ = ["CrossFitted", "fit_crossfit"]


@dataclass(frozen=True)
class CrossFitted:
    """A cross-fitted posterior and what it stands on.

    Attributes:
        fitted: The decomposition, scaled to N data.
        loss: Mean loss per datum over the data whose targets were read.
        n_outputs: Number C of outputs.
        n_seen: Number of distinct rows that were read.
        cost: Passes through the network.
    """

    fitted: Fitted
    loss: Tensor
    n_outputs: int
    n_seen: int
    cost: FitCost


def fit_crossfit(
    network: Network,
    loader: Iterable[Any],
    options: CrossfitOptions,
    n_data: int,
    *,
    device: torch.device,
    dict_key_x: str = "input_ids",
    dict_key_y: str = "labels",
    progress_bar: bool = False,
) -> CrossFitted:
    """Read data, form the factors of every fold, and cross-fit them.

    Args:
        network: The network, in evaluation mode.
        loader: A loader, or any iterable of mini-batches.
        options: Folds, sampling and numbers of data.
        n_data: Number N of training data that the posterior stands for.
        device: Device of the network.
        dict_key_x: Key of the inputs in mappings.
        dict_key_y: Key of the targets in mappings.
        progress_bar: Whether to show one.

    Returns:
        The posterior's parts.

    Raises:
        ValueError: If there are too few data for the folds, or scores that do not fit.

    Example:
        >>> from torch import nn
        >>> net = Network(nn.Linear(3, 2), lambda X: X, "classification")
        >>> batches = [(torch.randn(8, 3), torch.arange(8) % 2) for _ in range(4)]
        >>> result = fit_crossfit(
        ...     net, batches, CrossfitOptions(), n_data=100, device=torch.device("cpu")
        ... )
        >>> result.cost
        FitCost(forward=16, backward=16)
    """
    with tqdm(disable=not progress_bar, unit="batch") as bar:

        def read(batches: Iterable[Any], phase: str) -> Iterator[Batch]:
            bar.set_description(f"[K-FAC: {phase}]")
            for X, y in read_batches(batches, device, dict_key_y, name="train_loader"):
                yield X, y
                bar.update()

        if options.sampling == "uniform":
            return _uniform(network, read(loader, "folds"), options, n_data, dict_key_x)
        if is_map_style(loader):
            return _curvature_map(network, loader, read, options, n_data, dict_key_x)
        return _curvature_stream(network, read(loader, "pool"), options, n_data, dict_key_x)


def _uniform(
    network: Network, batches: Iterator[Batch], options: CrossfitOptions, N: int, key: str
) -> CrossFitted:
    """Consecutive data of the loader, cut into folds; further ones for the input factors."""
    first = next(batches)
    options = options.resolved(len(first[1]))
    K, M = options.n_folds, options.n_curvature
    extra = max(0, options.n_input - M)
    sizes = even_parts(M, K) + even_parts(extra, K)
    folds: list[list[KFACFactors]] = [[] for _ in range(K)]
    more: list[list[InputFactors]] = [[] for _ in range(K)]
    loss, n_seen, C = 0.0, 0, 0

    def stream() -> Iterator[Batch]:
        yield first
        if sum(sizes) > len(first[1]):  # nothing is read that is not used
            seen = len(first[1])
            for X, y in batches:
                yield X, y
                seen += len(y)
                if seen >= sum(sizes):
                    return

    for number, X, y in segments(stream(), sizes, key):
        if number == 2 * K:
            break
        if number < K:
            folds[number].append(network.factors(X, y, inputs=not extra))
            loss, C = loss + folds[number][-1].loss, folds[number][-1].n_outputs
        if extra:
            more[number % K].append(network.inputs(X, few_rows_from(options.n_input)))
        if number >= K:
            check_targets(y, more[number % K][-1].outputs.shape, network.likelihood)
            loss = loss + loss_sum(more[number % K][-1].outputs, y, network.likelihood)
        n_seen += len(y)
    if n_seen < sum(sizes):
        raise _too_few(n_seen, sum(sizes), options)
    summed = [reduce(add, parts) for parts in folds]
    inputs = [reduce(add, parts) for parts in more] if extra else None
    fitted = crossfit_kron(summed, inputs, n_data=N)
    return CrossFitted(fitted, loss / n_seen, C, n_seen, network.cost)


def _from_pool(passed: PoolPass, folds: list[KFACFactors], N: int, *, whole: bool) -> CrossFitted:
    """Cross-fit; ``whole`` says whether the pass saw all that the draws came from."""
    if len(passed.A) < passed.options.n_folds:
        raise _too_few(sum(map(len, passed.outputs)), passed.options.n_folds, passed.options)
    f = torch.cat(passed.outputs)
    hessian = mean_loss_hessian(f, passed.network.likelihood)
    exact = whole and passed.network.fisher != "ef"
    fitted = crossfit_kron(
        folds,
        [passed.A[k] for k in range(passed.options.n_folds)],
        n_data=N,
        output_hessian=hessian if exact else None,
        rows=passed.rows(),
    )
    return CrossFitted(fitted, passed.loss / len(f), f.shape[1], len(f), passed.network.cost)


def _curvature_map(
    network: Network,
    loader: Any,
    read: Callable[[Iterable[Any], str], Iterator[Batch]],
    options: CrossfitOptions,
    N: int,
    key: str,
) -> CrossFitted:
    """Score a pool of positions, draw systematically, fetch the drawn data again."""
    batch_size = getattr(loader.batch_sampler, "batch_size", None) or MapStyle(loader, 1).batch_size
    asked = options.n_curvature
    options = options.resolved(min(batch_size, len(loader.dataset)))
    given = options.scores
    limit = options.n_pool if given is None else None
    pool = MapStyle(loader, limit, options.generator)
    passed = PoolPass(network, options, key)
    n_input = min(options.n_input, len(pool))
    for X, y in read(pool.read(range(n_input), at_once=options.n_folds), "pool"):
        passed.add(X, y)  # in passes of one mini-batch, as each fold takes its share
    if given is None and n_input < len(pool):
        for X, y in read(pool.read(range(n_input, len(pool))), "pool"):
            passed.add(X, y)
    if given is None:
        f = torch.cat(passed.outputs)
        scores = curvature_scores(f, network.likelihood)
        classes = network.likelihood == "classification"
        order = curvature_order(f) if classes else torch.arange(len(f), device=f.device)
    else:
        if len(given) != len(loader.dataset):
            raise ValueError(
                f"Expected one score for each of the {len(loader.dataset)} data of the dataset, "
                f"got {len(given)}. Remedy: keep the scores in the order of the dataset."
            )
        scores = given[torch.tensor(pool.positions)]
        order = scores.argsort()
    folds = []
    M = options.n_curvature if asked is not None else min(options.n_curvature, len(pool))
    for m in even_parts(M, options.n_folds):
        draw = draw_weighted(scores, m, order=order, generator=options.generator)
        rows, weights = _distinct(draw)
        parts, start = [], 0
        for X, y in read(pool.read(rows), "draws"):
            w = weights[start : start + len(y)]
            parts.append(network.factors(X, y, w, inputs=False))
            start += len(y)
        folds.append(replace(reduce(add, parts), n_data=m))
    return _from_pool(passed, folds, N, whole=given is None)


def _curvature_stream(
    network: Network, batches: Iterator[Batch], options: CrossfitOptions, N: int, key: str
) -> CrossFitted:
    """Score and draw in one pass; only what the reservoirs hold is kept."""
    if options.scores is not None:
        raise ValueError(
            "Expected no `scores` with a stream, whose data have no positions, got some. Remedy: "
            "pass a DataLoader over a map-style dataset, or leave `scores` out."
        )
    passed: PoolPass | None = None
    reservoirs: list[Reservoirs] = []
    kept: list[dict[int, Batch]] = []
    seen = 0
    for X, y in batches:
        if passed is None:
            options = options.resolved(len(y))
            passed = PoolPass(network, options, key)
            for m in even_parts(options.n_curvature, options.n_folds):
                reservoirs.append(Reservoirs(m, generator=options.generator, device=y.device))
                kept.append({})
        scores = curvature_scores(passed.add(X, y), network.likelihood)
        for fold, items in zip(reservoirs, kept, strict=True):
            slots, positions = fold.update(scores)
            for slot, i in zip(slots.tolist(), positions.tolist(), strict=True):
                items[slot] = (take(X, slice(i, i + 1), key), y[i : i + 1])
        seen += len(y)
        if seen >= options.n_pool:
            break
    folds = []
    for fold, items in zip(reservoirs, kept, strict=True):
        draw = fold.draw()
        data = [items[slot] for slot in range(len(items))]
        X, y = concatenate([X for X, _ in data]), torch.cat([y for _, y in data])
        folds.append(network.factors(X, y, draw.weights, inputs=False))
    return _from_pool(passed, folds, N, whole=True)


def _distinct(draw: WeightedDraw) -> tuple[list[int], Tensor]:
    """Each datum once, with the sum of its weights: no backward pass is made twice."""
    rows, where = draw.indices.unique(return_inverse=True)
    weights = torch.zeros(len(rows), dtype=draw.weights.dtype, device=draw.weights.device)
    return rows.tolist(), weights.index_add(0, where, draw.weights)


def _too_few(got: int, wanted: int, options: CrossfitOptions) -> ValueError:
    """The error for a loader that ends before the folds are full."""
    return ValueError(
        f"Expected at least {wanted} data for {options.n_folds} folds (by default one mini-batch "
        f"each), got {got} from the loader. Remedy: pass a loader with more mini-batches, a "
        "smaller `n_curvature`, `n_input` or `n_folds`."
    )
