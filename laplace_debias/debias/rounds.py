"""Rounds of draws from a growing pool: what is drawn, how much it counts, in which group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from laplace_debias.data.inputs import Batch, Inputs, take
from laplace_debias.data.pool import Pool, given_scores
from laplace_debias.data.processes import counted, from_main, processes, together
from laplace_debias.data.roles import TrainingData
from laplace_debias.debias.drawn import DrawnFactor
from laplace_debias.debias.drawn_rows import N_GROUPS, DrawnRows, Room
from laplace_debias.debias.options import AutoOptions
from laplace_debias.debias.pairs import (
    PairDraw,
    draw_pairs,
    pair_order,
    pair_vectors,
    pairs_of_data,
)
from laplace_debias.debias.pool_inputs import least_patches
from laplace_debias.debias.pool_moments import PoolMoments
from laplace_debias.kfac.gradient_rows import gradient_rows, tells_data_apart
from laplace_debias.kfac.interface import EngineInterface, datum_keys
from laplace_debias.network.ownership import rows_key
from laplace_debias.network.vectors import sampled_hessian_root

__all__ = ["Rounds"]

STALE_SHARE = 0.1
"""Least score of a datum by scores from training, as a share of their mean: all can be drawn."""
STALE_POOL = 2048
"""Number of data in forward passes where scores from training save the scoring pass."""


class Rounds:
    """The pool, the draws from it so far, and the output factors that they make.

    Args:
        engine: Makes the passes, and counts them.
        data: The loader and N.
        options: Budgets, scores from training, and the source of the draws.
        bar: Shows passes, forward and backward; each round adds its own to the total.
        room: Says what may be kept, before anything is read; by default all.

    Attributes:
        pool: The data read so far.
        moments: What forward passes told of them.
        room: What may be kept.
        drawn: Weights and groups of all draws.
        factors: Output factors of all layers but the network's output.
        n_drawn: Number of pairs that were propagated back.
        reading: Lets the pool of a single process grow, as :meth:`Pool.grow` does.

    Raises:
        ValueError: If scores do not fit the data, or there are more data than N.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> batch = (torch.randn(8, 3), torch.arange(8) % 2)
        >>> data = TrainingData(batch, None, 8, torch.device("cpu"))
        >>> from laplace_debias.kfac.engine import Engine
        >>> rounds = Rounds(Engine(net, "classification"), data, AutoOptions())
        >>> rounds.grow(8)
        >>> rounds.draw(8)
        >>> len(rounds.drawn.weights), rounds.whole, rounds.exhausted
        (8, True, False)
        >>> rounds.draw(8)  # the other half of all pairs
        >>> rounds.exhausted
        True
    """

    def __init__(
        self,
        engine: EngineInterface,
        data: TrainingData,
        options: AutoOptions,
        bar: tqdm | None = None,
        room: Callable[[EngineInterface, Pool], Room] | None = None,
    ) -> None:
        self.engine, self.data, self.options, self.bar = engine, data, options, bar
        self.pool = Pool(data, options.generator)
        self.reading: Callable[[int], Iterator[Batch]] = self.pool.grow
        self.moments = PoolMoments(engine, least_patches(options.tolerance, options.n_passes))
        self.room = Room() if room is None else room(engine, self.pool)
        self.drawn = DrawnRows()
        self.factors: list[DrawnFactor] = []
        self.stale = self._stale_scores()
        self._taken: Tensor | None = None  # which pairs were drawn, [n, C]
        self._precision, self._drawn_from, self.n_drawn = 0.0, 0, 0
        self._alone: bool | None = None  # whether each datum has to pass back alone

    @property
    def whole(self) -> bool:
        """Whether the pool is the training set."""
        return self.pool.ended and self.pool.size >= self.data.n_data

    @property
    def exhausted(self) -> bool:
        """Whether there are no more data, and all their pairs were propagated."""
        ended = self.pool.ended or self.pool.size >= self.limit
        if self.stale is not None or not ended or self._taken is None:
            return False
        return len(self._taken) == self.pool.size and not bool((self._left() > 0).any())

    @property
    def limit(self) -> float:
        """Most data of the pool, by the options and by the budget of memory."""
        return min(self.options.n_pool or math.inf, self.room.n_pool)

    @property
    def scale(self) -> float:
        """Number N of data over the number that draws are made from."""
        return self.data.n_data / (self.pool.size if self.stale is None else len(self.stale))

    def grow(self, n_passes: int) -> None:
        """Read on until the pool fits so many backward passes.

        Args:
            n_passes: Backward passes of all rounds, with the one that follows.
        """
        size = self.options.pool_size(n_passes)
        if self.stale is not None and self.options.n_pool is None:
            size = STALE_POOL
        size = int(min(size, self.room.n_pool))
        if processes() is None:
            self._expect("scores", min(size, self.data.n_data) - self.pool.size)
            for X, y in self.reading(size):
                self.moments.add(X, y)
                if self.bar is not None:
                    self.bar.update(len(y))
        else:
            self._grow_together(size)
        self.data.check_seen({"pool": self.pool.size}, disjoint=True)
        self.pool.ended = self.pool.ended or self.pool.size >= self.data.n_data
        if not self.factors:
            self.make_factors()

    def make_factors(self) -> None:
        """Begin the output factors of all layers but the network's output."""
        pairs = zip(self.engine.owned, self.moments.at_output, strict=True)
        inner = {rows_key(p): None for p, last in pairs if not last}  # an ordered set
        device = next(self.engine.root.parameters()).device
        self.factors = [DrawnFactor(key, self.room.numbers, device=device) for key in inner]

    def _grow_together(self, size: int) -> None:
        """The same in step with other processes."""
        known, pool, moments = self.pool.n_read, self.pool, self.moments
        while pool.size < size and not pool.ended:
            before = pool.size
            pool.grow_together(
                before + 1, lambda _, batch: moments.add(*batch), "its passes for the pool"
            )
            moments.counted(pool.size - before)
            if not moments.inputs.begun or pool.size >= size or pool.ended:
                moments.exchange(pool.own()[known : pool.n_read], self.data.key_x)
                known = pool.n_read
        counted(pool.size)

    def draw(self, m: int) -> None:
        """A round: draw m pairs that were not drawn before, and propagate them back.

        Args:
            m: Number of pairs; fewer if fewer are left.
        """
        draw, left_to_chance = self._draw(m)
        self.n_drawn += len(draw)
        if not len(draw):
            return
        # A datum drawn by old scores has a random class: it is never certain.
        free = (draw.probabilities < 1) | (self.stale is not None)
        # A random first group: each is then as likely as the others to have a given pair.
        turns = free.long().cumsum(0) + torch.randint(
            N_GROUPS, (), generator=self.options.generator
        )
        groups = torch.where(free, turns % N_GROUPS, -1)
        if not self.whole and self.stale is None:
            # The pool is a draw itself, and nothing in it certain: groups of data show its noise.
            groups = draw.data % N_GROUPS
        growth = 1.0
        if self.stale is None:
            growth = self.pool.size / max(self._drawn_from, 1)
            self._drawn_from = self.pool.size
        share = 1.0
        if left_to_chance > 0:
            precision = int(free.sum()) / left_to_chance**2
            share = precision / (precision + self._precision)
            self._precision += precision
        first = len(self.drawn.weights)
        distinct = self.stale is None
        self.drawn.add(draw.probabilities, groups, share, growth, distinct=distinct)
        group = processes()
        self._expect("pairs", len(draw) if group is None else -(-len(draw) // group.size))
        with together("its backward passes"):
            for at, X, y in self._pieces(draw):
                more = {"y": y, "classes": draw.classes[at], "numbers": first + at}
                key, vectors = self.data.key_x, partial(self._vectors, **more)
                if self._alone is None and len(y) > 1:
                    self._alone = not tells_data_apart(self.engine, X, key)
                alone = bool(self._alone) or self.moments.uneven
                found = gradient_rows(self.engine, X, vectors, key, alone=alone)
                for each, rows in zip(at, found, strict=True):
                    weights = 1 / draw.probabilities[each]
                    for factor in self.factors:
                        factor.add(rows[factor.key], weights, groups[each], each, first, len(draw))
                if self.bar is not None:
                    self.bar.update(at.numel())
        for factor in self.factors:
            factor.exchange()
            factor.close(share, growth, distinct=distinct)

    def _expect(self, phase: str, n_passes: int) -> None:
        """Tell the progress bar how many passes come next."""
        if self.bar is not None and n_passes > 0:
            self.bar.total = (self.bar.total or 0) + n_passes
            self.bar.set_description(f"[K-FAC: {phase}]", refresh=False)

    def _pieces(self, draw: PairDraw) -> Iterator[tuple[Tensor, Inputs, Tensor]]:
        """The same in pieces of what one pass may take."""
        for at, (X, y) in self._fetched(draw):
            most = self.room.n_backward or len(y)
            for start in range(0, len(y), most):
                rows = slice(start, min(start + most, len(y)))
                yield at[:, rows], take(X, rows, self.data.key_x), y[rows]

    def _fetched(self, draw: PairDraw) -> Iterator[tuple[Tensor, Batch]]:
        """Data with the numbers ``[k, n]`` of their k draws each, which share a forward pass."""
        alike = pairs_of_data(draw.data)
        firsts = torch.cat([part[:, 0] for part in alike])
        starts = torch.tensor([0, *(len(part) for part in alike)]).cumsum(0)
        for part, (X, y) in self.pool.fetch(draw.data[firsts]):  # ascending
            cuts = torch.searchsorted(part, starts).tolist()
            for draws, first, i, j in zip(alike, starts, cuts[:-1], cuts[1:], strict=False):
                if i < j:
                    rows = slice(i, j)
                    yield draws[part[rows] - first].T, (take(X, rows, self.data.key_x), y[rows])

    def _vectors(self, f: Tensor, y: Tensor, classes: Tensor, numbers: Tensor) -> Tensor:
        """Backward vectors ``[k, n, C]``; with scores from training, classes are drawn now."""
        engine, seed = self.engine, self.engine.draw_seed
        if self.stale is None:
            V = torch.stack([pair_vectors(f, c.to(f.device), engine.likelihood) for c in classes])
        elif seed is None:
            V = sampled_hessian_root(f, engine.likelihood, self.options.generator)[None, :, :, 0]
        else:  # the same for a draw, whichever process makes it
            keys = datum_keys(numbers[0], numbers.shape[1], seed)
            own = [torch.Generator(f.device).manual_seed(key) for key in keys]
            parts = zip(f.split(1), own, strict=True)
            V = torch.cat([sampled_hessian_root(x, engine.likelihood, g) for x, g in parts])
            V = V[None, :, :, 0]
        V, weights = engine.objective.whitened(V), engine.datum_weights(y, f.shape[1])
        return V if weights is None else V * weights.to(V).sqrt()[:, None]

    def _left(self) -> Tensor:
        """Scores of the pairs that were not drawn yet, 0 for others."""
        scores = self.moments.scores.cpu()
        if self._taken is not None:
            scores[: len(self._taken)][self._taken] = 0.0
        return scores

    def _draw(self, m: int) -> tuple[PairDraw, float]:
        """A draw, and the trace per datum of what it leaves to chance."""
        generator = self.options.generator
        if self.stale is not None:
            draw = draw_pairs(self.stale[:, None], m, self.stale.argsort(), generator)
            return from_main(draw), 1.0
        scores = self._left()
        taken = torch.zeros(scores.shape, dtype=torch.bool)
        if self._taken is not None:
            taken[: len(self._taken)] = self._taken
        self._taken = taken
        if not bool((scores > 0).any()):
            empty = torch.zeros(0, dtype=torch.long)
            return PairDraw(empty, empty, torch.zeros(0, dtype=torch.float64)), 0.0
        moments = self.moments
        order = pair_order(moments.outputs, moments.features, self.engine.likelihood).cpu()
        draw = from_main(draw_pairs(scores, m, order, generator))
        taken[draw.data, draw.classes] = True
        certain = draw.probabilities >= 1
        if bool(certain.all()):
            return draw, 0.0
        sure = scores[draw.data[certain], draw.classes[certain]].sum()
        return draw, float(scores.sum() - sure) / self.pool.size

    def n_left(self) -> int:
        """Number of pairs of the pool that carry curvature and were not drawn yet."""
        return int((self._left() > 0).sum())

    def _stale_scores(self) -> Tensor | None:
        """Scores from training, none below a share of the mean."""
        if self.options.scores is None:
            return None
        scores = given_scores(self.pool, torch.as_tensor(self.options.scores))
        return scores.clamp(min=max(STALE_SHARE * float(scores.mean()), 1e-30))
