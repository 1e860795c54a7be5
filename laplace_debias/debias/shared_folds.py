"""Cross-fitting on the data of several processes: each passes its own, sums are everybody's.

The k-th mini-batches of all processes, in the order of ranks, are the k-th of one pool
(:class:`~laplace_debias.data.pool.Pool`). Which data serve what is decided by their numbers in it:
as in one process that reads the whole pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from tqdm import tqdm

from laplace_debias.data.inputs import Batch, Inputs, take
from laplace_debias.data.loaders import bar, in_order
from laplace_debias.data.pool import Pool, given_scores
from laplace_debias.data.processes import Processes, counted, from_main, processes, together
from laplace_debias.data.roles import TrainingData
from laplace_debias.data.targets import check_unweighted
from laplace_debias.debias.few_rows import few_rows_from, most_few_rows
from laplace_debias.debias.fold_blocks import crossfit_kron
from laplace_debias.debias.options import CrossfitOptions, ResolvedOptions
from laplace_debias.debias.pass_budget import paid_for, passes_per_datum
from laplace_debias.debias.pool_news import Rows, rows_of_all
from laplace_debias.debias.sampling import (
    WeightedDraw,
    curvature_order,
    distinct,
    draw_weighted,
    even_parts,
)
from laplace_debias.debias.spectrum import FitResult
from laplace_debias.kfac.factors import Factors
from laplace_debias.kfac.interface import EngineInterface
from laplace_debias.kfac.sums import factors_of_all
from laplace_debias.network.loss import curvature_scores

__all__ = ["fit_shared_folds"]


def fit_shared_folds(
    engine: EngineInterface,
    data: TrainingData,
    options: CrossfitOptions,
    *,
    progress_bar: bool | None = None,
) -> FitResult:
    """Cross-fit folds whose data lie with several processes.

    With ``sampling="uniform"`` the folds are consecutive data of the pool, by default one
    mini-batch each. With ``"curvature"`` every process scores its own data; scores are gathered,
    rank 0 draws, and each process makes the backward passes of the draws that it has. Data are
    kept or read again by those who have them, streams as well.

    Args:
        engine: Makes factors and counts its passes.
        data: This process's loader, and N.
        options: Folds, sampling and numbers of data of all processes together.
        progress_bar: Whether to show one, in rank 0.

    Returns:
        The fit, the same in every process.

    Raises:
        ValueError: If there are too few data for the folds or more than N, or scores that do not
            fit.
    """
    group = processes()
    assert group is not None and engine.draw_seed is not None
    options = replace(options, generator=torch.Generator().manual_seed(engine.draw_seed))
    with bar(shown=progress_bar, unit="batch") as shown:
        run = _SharedRun(engine, data, options, group, shown)
        return run.uniform() if options.sampling == "uniform" else run.curvature()


class _SharedRun:
    """One fit: what both ways to choose data share."""

    def __init__(
        self,
        engine: EngineInterface,
        data: TrainingData,
        options: CrossfitOptions,
        group: Processes,
        shown: tqdm,
    ) -> None:
        self.engine, self.data, self.options, self.group = engine, data, options, group
        self.shown, K = shown, options.n_folds
        self.pool = Pool(data, options.generator, keeps=options.sampling != "uniform")
        self.folds: list[Factors | None] = [None] * K  # with output factors
        self.inputs: list[Factors | None] = [None] * K
        self.rows: list[list[tuple[Tensor, Rows]]] = [[] for _ in range(K + 1)]  # and of no fold
        self.loss: Tensor | float = 0.0
        self.n_vectors = 0  # of a datum; known when a budget of passes has to be

    def resolved(self, X: Inputs | None = None) -> ResolvedOptions:
        """Options with all their numbers; without inputs, all processes have to ask together."""
        if self.options.n_passes is None:
            return self.options.resolved(self.pool.first_size)
        if X is None:
            self.n_vectors = max(self.group.gather(self.n_vectors))
        elif not self.n_vectors:
            self.n_vectors = passes_per_datum(self.engine, take(X, slice(0, 1), self.data.key_x))
        return paid_for(self.options, self.n_vectors).resolved(self.pool.first_size)

    def add(self, folds: list[Factors | None], k: int, new: Factors) -> None:
        """Add own factors to a fold."""
        old = folds[k]
        folds[k] = new if old is None else old + new

    def add_inputs(self, k: int, numbers: Tensor, new: Factors) -> Factors:
        """Add own input factors to a fold, and their rows by their numbers in the pool."""
        self.rows[k].append((numbers, new.rows))
        bare = replace(new, outputs=None, rows=())
        if k < len(self.inputs):
            self.add(self.inputs, k, bare)
        return bare

    def uniform(self) -> FitResult:
        """Consecutive data of the pool, cut into folds; further ones for the input factors."""
        pool, K = self.pool, self.options.n_folds

        def use(start: int, batch: Batch) -> None:
            self._use_uniform(start, batch, self.resolved(batch[0]))

        pool.grow_together(1, use, "its passes for the folds")
        counted(pool.size)
        options = self.resolved()
        extra = max(0, options.n_input - options.n_curvature)
        wanted = options.n_curvature + extra
        pool.grow_together(wanted, use, "its passes for the folds")
        n_seen = min(pool.size, wanted)
        if n_seen < wanted:
            raise self.too_few(n_seen, wanted)
        self.data.check_seen({"folds": n_seen}, disjoint=True)
        folds = self.of_all(self.folds)
        return self.crossfitted(
            folds,
            self.of_all(self.inputs) if extra else None,
            rows=self.rows_of_all(self.rows[:K]) if extra else None,
            loss=self.summed_loss() / n_seen,
        )

    def _use_uniform(self, start: int, batch: Batch, options: ResolvedOptions) -> None:
        """Pass the own data of a mini-batch in the folds that they belong to."""
        X, y = batch
        K, M, key = options.n_folds, options.n_curvature, self.data.key_x
        extra = max(0, options.n_input - M)
        sizes, least = even_parts(M, K) + even_parts(extra, K), few_rows_from(options.n_input)
        for number, first in enumerate(accumulate([0, *sizes[:-1]])):
            low, high = max(first - start, 0), min(first + sizes[number] - start, len(y))
            if low >= high:
                continue
            part = take(X, slice(low, high), key), y[low:high]
            if number < K:
                new = self.engine.factors(*part, inputs=not extra)
                self.add(self.folds, number, new)
                self.loss = self.loss + new.summed_loss
            if extra:
                new = self.engine.factors(*part, outputs=False, rows_from=least)
                self.add_inputs(number % K, torch.arange(start + low, start + high), new)
                self.loss = self.loss + new.summed_loss if number >= K else self.loss
        self.shown.update()

    def curvature(self) -> FitResult:
        """Score a pool, draw from all of it, and make the backward passes of the own draws."""
        pool, given = self.pool, self.options.scores
        outputs: list[tuple[Tensor, Tensor]] = []

        def use(start: int, batch: Batch) -> None:
            options = self.resolved(batch[0])
            most = options.n_pool if given is None else options.n_input
            outputs.extend(self._use_scored(start, batch, options, most))
            self.shown.update()

        work = "its passes for the pool"
        pool.grow_together(1, use, work)
        counted(pool.size)
        options = self.resolved()
        pool.grow_together(options.n_pool if given is None else options.n_input, use, work)
        f = self._in_order(outputs).to(self.data.device)
        if given is None:
            scores = curvature_scores(f, self.engine.likelihood)
            classes = self.engine.likelihood == "classification"
            order = curvature_order(f) if classes else torch.arange(len(f), device=f.device)
        else:
            scores = given_scores(pool, torch.as_tensor(given))
            order = scores.argsort()
        K = options.n_folds
        if len(f) < K:
            raise self.too_few(len(f), K)
        self.data.check_seen({"pool": len(f)}, disjoint=True)
        M = options.n_curvature if self.options.sized else min(options.n_curvature, len(scores))
        folds = []
        for m in even_parts(M, K):
            generator = self.options.generator
            draw = from_main(draw_weighted(scores.cpu(), m, order=order.cpu(), generator=generator))
            folds.append(replace(self._fold(draw), weight=m))
        exact = given is None and self.engine.fisher != "empirical"
        return self.crossfitted(
            folds,
            self.of_all(self.inputs),
            hessian=self.engine.mean_hessian(f) if exact else None,
            rows=self.rows_of_all(self.rows, truncated=True),
            loss=self.summed_loss() / len(f),
        )

    def _use_scored(
        self, start: int, batch: Batch, options: ResolvedOptions, most: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Forward passes of the own data of a mini-batch; their numbers and outputs."""
        X, y = batch
        check_unweighted(y, "sampling='curvature'", "sampling='uniform', or debias=True")
        K, n_input, n = options.n_folds, options.n_input, min(len(y), max(0, most - start))
        stop = max(0, min(n, n_input - start))
        turn = [(i, (start + i) % K) for i in range(K)]  # the first datum first: it is checked
        parts = [(k, slice(i, stop, K), n_input) for i, k in turn]
        parts.append((K, slice(stop, n), max(start + stop + 1, n_input)))
        for k, rows, few in parts:
            numbers = torch.arange(start, start + len(y))[rows]
            if not len(numbers):
                continue
            part = take(X, rows, self.data.key_x), y[rows]
            least = few_rows_from(few)
            new = self.engine.factors(*part, inputs=k < K, outputs=False, rows_from=least)
            self.loss = self.loss + new.summed_loss
            self.add_inputs(k, numbers, new)
            yield numbers, new.kept_outputs

    def _fold(self, draw: WeightedDraw) -> Factors:
        """Output factors of a draw, from all processes that have its data."""
        rows, weights = distinct(draw)
        own: list[Factors | None] = [None]
        with together("its backward passes"):
            for at, (X, y) in self.pool.fetch(torch.tensor(rows)):
                w = weights[at].to(self.data.device)
                self.add(own, 0, self.engine.factors(X, y, w, inputs=False))
        return self.of_all(own)[0]

    def _in_order(self, own: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Rows of all processes, in the order of their numbers."""
        shares = self.group.gather([(numbers, rows.detach().cpu()) for numbers, rows in own])
        found = [pair for share in shares for pair in share]
        return in_order(*map(list, zip(*found, strict=True)))

    def of_all(self, folds: list[Factors | None]) -> list[Factors]:
        """Factors of the folds, of all processes."""
        summed = [factors_of_all(fold, self.data.device) for fold in folds]
        found = [fold for fold in summed if fold is not None]
        if len(found) < len(folds):
            raise self.too_few(self.pool.size, len(folds))
        return found

    def rows_of_all(
        self, folds: list[list[tuple[Tensor, Rows]]], *, truncated: bool = False
    ) -> list[Tensor | None]:
        """For each parameter the kept rows of all processes, fold by fold, or ``None``."""
        n, device = len(self.engine.names), self.data.device
        found = rows_of_all(folds, n, self.options.n_folds)
        most = [None if x is None or not truncated else most_few_rows(x.shape[1]) for x in found]
        return [None if x is None else x[:m].to(device) for x, m in zip(found, most, strict=True)]

    def summed_loss(self) -> Tensor:
        """Loss of all processes."""
        own = torch.as_tensor(self.loss, device=self.data.device)
        return self.group.sum_(own.to(torch.float64, copy=True))

    def crossfitted(
        self,
        folds: list[Factors],
        inputs: list[Factors] | None,
        *,
        loss: Tensor,
        hessian: Tensor | None = None,
        rows: Sequence[Tensor | None] | None = None,
    ) -> FitResult:
        """Cross-fit; the work is shared out."""
        with self.engine.cost.stage("decompositions"):
            return crossfit_kron(
                folds,
                inputs,
                n_data=self.data.n_data,
                output_hessian=hessian,
                rows=rows,
                loss=loss.to(folds[0].summed_loss.dtype),
            )

    def too_few(self, got: int, wanted: int) -> ValueError:
        """The error for loaders that end before the folds are full."""
        return ValueError(
            f"Expected at least {wanted} data for {self.options.n_folds} folds (by default one "
            f"mini-batch each), got {got} from the loaders of all processes. Remedy: pass loaders "
            "with more mini-batches, or smaller `n_passes`, `n_curvature`, `n_input` or `n_folds`."
        )
