"""Cross-fitting: read the data, form the factors of every fold, cross-fit them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from laplace_debias.data.inputs import Batch, Inputs, concatenate, datum_shapes, take
from laplace_debias.data.loaders import bar, warn_if_sequential
from laplace_debias.data.map_style import MapStyle, is_map_style
from laplace_debias.data.pool import segments
from laplace_debias.data.processes import processes
from laplace_debias.data.roles import TrainingData
from laplace_debias.debias.checkpoint import Checkpoint
from laplace_debias.debias.few_rows import few_rows_from
from laplace_debias.debias.fold_blocks import crossfit_kron
from laplace_debias.debias.options import CrossfitOptions, ResolvedOptions
from laplace_debias.debias.pass_budget import paid_for, passes_per_datum
from laplace_debias.debias.pool_pass import PoolPass
from laplace_debias.debias.reservoirs import Reservoirs
from laplace_debias.debias.sampling import distinct, draw_weighted, even_parts
from laplace_debias.debias.shared_folds import fit_shared_folds
from laplace_debias.debias.spectrum import FitResult
from laplace_debias.kfac.factors import Factors
from laplace_debias.kfac.interface import EngineInterface
from laplace_debias.network.loss import curvature_scores

__all__ = ["fit_crossfit"]


def fit_crossfit(
    engine: EngineInterface,
    data: TrainingData,
    options: CrossfitOptions,
    *,
    progress_bar: bool | None = None,
    checkpoint: Checkpoint | None = None,
) -> FitResult:
    """Read data, form the factors of every fold, and cross-fit them.

    Args:
        engine: Makes factors and counts its passes.
        data: The loader and N.
        options: Folds, sampling and numbers of data.
        progress_bar: Whether to show one.
        checkpoint: Where to keep what was done so far, and to go on from; not for draws from a
            stream, nor for several processes.

    Returns:
        The fit.

    Raises:
        ValueError: If there are too few data for the folds or more than N, or scores that do not
            fit.

    Example:
        >>> from torch import nn
        >>> from laplace_debias.kfac.engine import Engine
        >>> engine = Engine(nn.Linear(3, 2), "classification")
        >>> batches = [(torch.randn(8, 3), torch.arange(8) % 2) for _ in range(4)]
        >>> data = TrainingData(batches, None, 100, torch.device("cpu"))
        >>> fit_crossfit(engine, data, CrossfitOptions()).n_data
        100
        >>> engine.cost.forward, engine.cost.backward
        (16, 0)
    """
    warn_if_sequential(data.loader)
    if processes() is not None:
        return fit_shared_folds(engine, data, options, progress_bar=progress_bar)
    with bar(shown=progress_bar, total=0, unit="datum") as shown:
        run = _Run(engine, data, options, shown, checkpoint)
        if options.sampling == "uniform":
            return run.uniform()
        return run.curvature_map() if is_map_style(data.loader) else run.curvature_stream()


class _Run:
    """One fit: what its ways to read the data share."""

    def __init__(
        self,
        engine: EngineInterface,
        data: TrainingData,
        options: CrossfitOptions,
        bar: tqdm,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.engine, self.data, self.options, self.bar = engine, data, options, bar
        self.checkpoint, self.kept = checkpoint, dict[str, Any]()
        if checkpoint is not None:
            self.kept = checkpoint.content
            checkpoint.begin(engine.cost)

    def left(self, batches: Iterator[tuple[str, Batch]]) -> Iterator[tuple[str, Batch]]:
        """Mini-batches whose passes are still to be made."""
        return batches if self.checkpoint is None else self.checkpoint.following(batches)

    def keep(self, content: dict[str, Any], *, now: bool = False) -> None:
        """Keep what was accumulated, after a mini-batch or after all of them."""
        if self.checkpoint is not None:
            note = self.checkpoint.write if now else self.checkpoint.processed
            note(self.engine.cost, **content)

    def read(self, phase: str, batches: Iterable[Any] | None = None, n: int = 0) -> Iterator[Batch]:
        """Mini-batches, shown in the progress bar, which expects n more data."""
        self.bar.total += n
        self.bar.set_description(f"[K-FAC: {phase}]", refresh=False)
        for X, y in self.data.read(batches):
            self.bar.update(len(y))
            yield X, y

    def resolved(self, batch_size: int, X: Inputs | None) -> ResolvedOptions:
        """Options with all their numbers; a budget of passes is in terms of a datum's vectors."""
        if X is None or self.options.n_passes is None:
            return self.options.resolved(batch_size)
        n_vectors = passes_per_datum(self.engine, take(X, slice(0, 1), self.data.key_x))
        return paid_for(self.options, n_vectors).resolved(batch_size)

    def uniform(self) -> FitResult:
        """Consecutive data of the loader, cut into folds; further ones for the input factors."""
        K, sizes = self.options.n_folds, list[int]()  # known from the first mini-batch on
        found: dict[str, Any] = {"folds": {}, "more": {}, "loss": 0.0, "n": 0, **self.kept}
        folds: dict[int, Factors] = found["folds"]
        more: dict[int, Factors] = found["more"]

        def stream() -> Iterator[tuple[str, Batch]]:
            seen = 0
            for X, y in self.read("folds"):
                if not sizes:
                    options = self.resolved(len(y), X)
                    M, extra = options.n_curvature, max(0, options.n_input - options.n_curvature)
                    sizes.extend(even_parts(M, K) + even_parts(extra, K))
                    self.bar.total += sum(sizes)
                yield "folds", (X, y)
                seen += len(y)
                if seen >= sum(sizes):  # nothing is read that is not used
                    return

        for _, batch in self.left(stream()):
            extra, rows_from = sum(sizes[K:]), few_rows_from(sum(sizes))
            for number, X, y in segments([batch], sizes, self.data.key_x, found["n"]):
                if number == 2 * K:
                    break
                k = number % K
                if number < K:
                    new = self.engine.factors(X, y, inputs=not extra)
                    folds[k] = folds[k] + new if k in folds else new
                    found["loss"] = found["loss"] + new.summed_loss
                if extra:
                    new = self.engine.factors(X, y, outputs=False, rows_from=rows_from)
                    more[k] = more[k] + new if k in more else new
                    if number >= K:
                        found["loss"] = found["loss"] + new.summed_loss
                found["n"] += len(y)
            self.keep(found)
        self.keep(found, now=True)
        n_seen = found["n"]
        if n_seen < sum(sizes):
            raise self.too_few(n_seen, sum(sizes))
        self.data.check_seen({"folds": n_seen}, disjoint=True)
        with self.engine.cost.stage("decompositions"):
            return crossfit_kron(
                [folds[k] for k in range(K)],
                [more[k] for k in range(K)] if more else None,
                n_data=self.data.n_data,
                loss=found["loss"] / n_seen,
            )

    def from_pool(self, passed: PoolPass, folds: list[Factors], *, whole: bool) -> FitResult:
        """Cross-fit; ``whole`` says whether the pass saw all that the draws came from."""
        K = self.options.n_folds
        if len(passed.A) < K:
            raise self.too_few(sum(map(len, passed.outputs)), K)
        f = torch.cat(passed.outputs)
        self.data.check_seen({"pool": len(f)}, disjoint=True)
        hessian = self.engine.mean_hessian(f)
        exact = whole and self.engine.fisher != "empirical"
        with self.engine.cost.stage("decompositions"):
            return crossfit_kron(
                folds,
                [passed.A[k] for k in range(K)],
                n_data=self.data.n_data,
                output_hessian=hessian if exact else None,
                rows=passed.rows(),
                loss=passed.loss / len(f),
            )

    def curvature_map(self) -> FitResult:
        """Score a pool of positions, draw systematically, fetch the drawn data again."""
        loader: Any = self.data.loader  # a DataLoader, see is_map_style
        engine = self.engine
        pool = MapStyle(loader, None, self.options.generator)
        X = None if self.options.n_passes is None else next(self.data.read(pool.first()))[0]
        options = self.resolved(pool.batch_size, X)
        given = options.scores
        if given is None:
            pool.keep(options.n_pool)
        found: dict[str, Any] = {"pool": {}, "draws": [], "folds": {}, **self.kept}
        passed = PoolPass(engine, options, self.data.key_x, **found["pool"])
        draws: list[tuple[list[int], Tensor]] = found["draws"]
        folds: dict[int, Factors] = found["folds"]
        n_input = min(options.n_input, len(pool))
        M = options.n_curvature if self.options.sized else min(options.n_curvature, len(pool))
        sizes = even_parts(M, options.n_folds)

        def stream() -> Iterator[tuple[str, Batch]]:
            first = pool.read(range(n_input), at_once=options.n_folds)
            for batch in self.read("pool", first, n_input):
                yield "pool", batch  # in passes of one mini-batch, as each fold takes its share
            if given is None and n_input < len(pool):
                rest = range(n_input, len(pool))
                for batch in self.read("pool", pool.read(rest), len(rest)):
                    yield "pool", batch
            scores, order = passed.scored(pool, given)
            for k, m in enumerate(sizes):
                if k == len(draws):  # otherwise an earlier call has drawn
                    draw = draw_weighted(scores, m, order=order, generator=options.generator)
                    draws.append(distinct(draw))
                rows = draws[k][0]
                for batch in self.read("draws", pool.read(rows), len(rows)):
                    yield f"fold {k}", batch

        for role, (X, y) in self.left(stream()):
            if role == "pool":
                passed.add(X, y)
            else:
                k = len(draws) - 1
                start = folds[k].n if k in folds else 0
                w = draws[k][1][start : start + len(y)]
                new = engine.factors(X, y, w, inputs=False)
                folds[k] = folds[k] + new if k in folds else new
            found["pool"] = passed.found()
            self.keep(found)
        self.keep(found, now=True)
        parts = [replace(folds[k], weight=m) for k, m in enumerate(sizes)]
        return self.from_pool(passed, parts, whole=given is None)

    def curvature_stream(self) -> FitResult:
        """Score and draw in one pass; only what the reservoirs hold is kept."""
        if self.options.scores is not None:
            raise ValueError(
                "Expected no `scores` with a stream, whose data have no positions, got some. "
                "Remedy: pass a DataLoader over a map-style dataset, or leave `scores` out."
            )
        passed: PoolPass | None = None
        reservoirs: list[Reservoirs] = []
        kept: list[dict[int, Batch]] = []
        seen, key = 0, self.data.key_x
        for X, y in self.read("pool"):
            if passed is None:
                options = self.resolved(len(y), X)
                self.bar.total += options.n_pool
                passed = PoolPass(self.engine, options, key)
                for m in even_parts(options.n_curvature, options.n_folds):
                    reservoirs.append(Reservoirs(m, generator=options.generator, device=y.device))
                    kept.append({})
            scores = curvature_scores(passed.add(X, y), self.engine.likelihood)
            for fold, items in zip(reservoirs, kept, strict=True):
                slots, positions = fold.update(scores)
                for slot, i in zip(slots.tolist(), positions.tolist(), strict=True):
                    items[slot] = (take(X, slice(i, i + 1), key), y[i : i + 1])
            seen += len(y)
            if seen >= passed.options.n_pool:
                break
        assert passed is not None  # the reader refuses an empty loader
        folds = []
        for fold, items in zip(reservoirs, kept, strict=True):
            draw = fold.draw()
            alike: dict[object, list[int]] = {}  # mini-batches may be padded to different lengths
            for slot in range(len(items)):
                alike.setdefault(datum_shapes(items[slot][0]), []).append(slot)
            parts = []
            for rows in alike.values():
                X = concatenate([items[slot][0] for slot in rows], key)
                y = torch.cat([items[slot][1] for slot in rows])
                parts.append(self.engine.factors(X, y, draw.weights[rows], inputs=False))
            folds.append(reduce(add, parts))
        return self.from_pool(passed, folds, whole=True)

    def too_few(self, got: int, wanted: int) -> ValueError:
        """The error for a loader that ends before the folds are full."""
        return ValueError(
            f"Expected at least {wanted} data for {self.options.n_folds} folds (by default one "
            f"mini-batch each), got {got} from the loader. Remedy: pass a loader with more "
            "mini-batches, or smaller `n_passes`, `n_curvature`, `n_input` or `n_folds`."
        )
