r"""Fit to a tolerance: score a pool, draw pairs in rounds, stop when the fit is near enough.

1. Forward passes over a pool of data give the input factors A, the output layer's exact Hessian,
   the loss, and the score of every (datum, class) pair (:mod:`laplace_debias.debias.pairs`).
2. Pairs are drawn and propagated back, one pass each, in rounds that double their number; nothing
   is computed twice (:mod:`laplace_debias.debias.drawn`).
3. Eigenvalues are corrected for the inverse, at the prior precision of the fit
   (:mod:`laplace_debias.debias.inverse`): the basis and eigenvalues then stay as they are, also
   when the prior precision changes.
4. Halves of the draws tell how far the posterior is from the full batch's
   (:mod:`laplace_debias.debias.certificate`). A round that takes all pairs left is the full batch.
"""

from __future__ import annotations

import time
import warnings

import torch
from torch import Tensor
from tqdm.auto import tqdm

from laplace_debias.data.pool import Pool
from laplace_debias.data.roles import TrainingData
from laplace_debias.debias.certificate import (
    EigenFactors,
    FitReport,
    estimated_distance,
    input_noise,
    log_deviations,
    probe_gradients,
)
from laplace_debias.debias.drawn import N_GROUPS, DrawnFactor, DrawnRows, corrected_block
from laplace_debias.debias.options import AutoOptions
from laplace_debias.debias.pairs import (
    PairDraw,
    draw_pairs,
    pair_order,
    pair_scores,
    pair_vectors,
)
from laplace_debias.debias.pool_moments import PoolMoments
from laplace_debias.debias.spectrum import FitResult, eigh_float64
from laplace_debias.kfac.engine import Engine
from laplace_debias.kfac.gradient_rows import gradient_rows
from laplace_debias.network.loss import mean_loss_hessian, sampled_hessian_root

__all__ = ["fit_auto"]

FIRST_ROUND = 64
SPLITS = (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2)))
STALE_SHARE = 0.1
"""Least score of a datum by scores from training, as a share of their mean: all can be drawn."""


def fit_auto(
    engine: Engine,
    data: TrainingData,
    options: AutoOptions,
    ridges: Tensor,
    *,
    correct: bool = True,
    progress_bar: bool = False,
) -> FitResult:
    """Fit to a tolerance, or with a given number of backward passes.

    Args:
        engine: Makes factors and counts its passes.
        data: The loader and N.
        options: Tolerance and budgets.
        ridges: Prior precision over the Hessian factor of each block, ``[n_blocks]``.
        correct: Whether to correct eigenvalues for the inverse.
        progress_bar: Whether to show one, advanced by backward passes.

    Returns:
        The fit with its report.

    Raises:
        ValueError: If scores do not fit the data, or there are more data than N.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> engine = Engine(net, "classification")
        >>> batches = [(torch.randn(8, 3), torch.arange(8) % 2) for _ in range(4)]
        >>> data = TrainingData(batches, None, 32, torch.device("cpu"))
        >>> options = AutoOptions(tolerance=None, n_passes=16)
        >>> fit = fit_auto(engine, data, options, torch.ones(4))
        >>> fit.n_data, engine.cost.forward, engine.cost.backward
        (32, 48, 16)
    """
    with tqdm(disable=not progress_bar, unit="pass", desc="[K-FAC: pairs]") as bar:
        return _Run(engine, data, options, ridges.double(), correct, bar).fit()


class _Run:
    """One fit."""

    def __init__(
        self,
        engine: Engine,
        data: TrainingData,
        options: AutoOptions,
        ridges: Tensor,
        correct: bool,
        bar: tqdm,
    ) -> None:
        self.engine, self.data, self.options, self.bar = engine, data, options, bar
        self.ridges, self.correct = ridges, correct
        self.began, self.start = time.perf_counter(), engine.cost.backward
        self.pool = Pool(data, options.generator)
        self.moments = PoolMoments(engine)
        self.drawn = DrawnRows()
        self.taken: Tensor | None = None  # pairs drawn so far, [n, C]
        self.precision, self.drawn_size = 0.0, 0
        self.exact = False
        self.probes: list[Tensor] | None = None
        self.stale = self._stale_scores()

    @property
    def spent(self) -> int:
        """Backward passes so far."""
        return self.engine.cost.backward - self.start

    @property
    def whole(self) -> bool:
        """Whether the pool is the training set."""
        return self.pool.ended and self.pool.size >= self.data.n_data

    def fit(self) -> FitResult:
        """Rounds until the tolerance, a budget or the end of the data is reached."""
        options, limit = self.options, self.options.n_passes
        m = FIRST_ROUND if limit is None else min(limit, FIRST_ROUND)
        if options.tolerance is None and limit is not None:
            m = limit
        self.grow(m)
        self.factors = self._open_factors()
        reason, slow = "", 0.0
        while True:
            begin = time.perf_counter()
            if self.factors:
                self.round(m)
            blocks = self.blocks()
            distance, error = self.certificate(blocks)
            slow = time.perf_counter() - begin
            reason = self._reason(distance, slow)
            if reason:
                break
            m = self.spent  # doubling
            if limit is not None:
                m = min(m, limit - self.spent)
            self.grow(self.spent + m)
        return self._result(blocks, distance, error, reason)

    def _reason(self, distance: float, seconds: float) -> str:
        """Why the fit ends here, or nothing."""
        options = self.options
        if not self.factors:
            return "the output layer needs no backward pass"
        if self.exact:
            return "every pair was propagated, as in a full-batch fit"
        if options.tolerance is None:
            return f"the budget of {options.n_passes:,} backward passes is spent"
        if distance <= options.tolerance:
            return f"the estimate is below the tolerance of {100 * options.tolerance:g} %"
        short = ""
        if options.n_passes is not None and self.spent >= options.n_passes:
            short = f"n_passes={options.n_passes} is spent"
        elif (
            options.max_seconds is not None
            and time.perf_counter() - self.began + 2 * seconds > options.max_seconds
        ):
            short = f"another round would end after max_seconds={options.max_seconds:g}"
        elif self._exhausted():
            short = f"the loader ended after {self.pool.size} of {self.data.n_data} data"
        if short:
            warnings.warn(
                f"The fit stops at an estimated distance of {distance:.3f} to the full-batch "
                f"posterior, above its tolerance of {options.tolerance:g}: {short}.",
                stacklevel=5,
            )
        return short

    def _exhausted(self) -> bool:
        """Whether the data have ended, and all their pairs were propagated."""
        if self.stale is not None or not self.pool.ended or self.taken is None:
            return False
        return bool((self.taken | (self.moments.scores <= 0)).all())

    # -- data

    def _stale_scores(self) -> Tensor | None:
        """Scores from training, none below a share of the mean."""
        given = self.options.scores
        if given is None:
            return None
        positions = None if self.pool.map is None else self.pool.map.positions
        if positions is None:
            raise ValueError(
                "Expected no `scores` with a stream, whose data have no positions, got some. "
                "Remedy: pass a DataLoader over a map-style dataset, or leave `scores` out."
            )
        given, n = torch.as_tensor(given), len(self.data.loader.dataset)
        if len(given) != n:
            raise ValueError(
                f"Expected one score for each of the {n} data of the dataset, got {len(given)}. "
                "Remedy: keep the scores in the order of the dataset."
            )
        scores = given[torch.tensor(positions)]
        return scores.clamp(min=max(STALE_SHARE * float(scores.mean()), 1e-30))

    def grow(self, n_passes: int) -> None:
        """Read on until the pool fits so many backward passes."""
        size = self.options.pool_size(n_passes)
        if self.stale is not None and self.options.n_pool is None:
            size = 2048  # nothing has to be scored
        for X, y in self.pool.grow(size):
            self.moments.add(X, y)
        self.data.check_seen({"pool": self.pool.size}, disjoint=True)
        if self.pool.size >= self.data.n_data:
            self.pool.ended = True

    def _open_factors(self) -> list[DrawnFactor]:
        """One for each set of layers that is not the network's output."""
        at_output = self.moments.inputs.at_output
        inner = {
            p.layers: None for p, last in zip(self.engine.owned, at_output, strict=True) if not last
        }
        return [DrawnFactor(layers) for layers in inner]

    # -- draws

    def round(self, m: int) -> None:
        """Draw m pairs that were not drawn before, and propagate them back."""
        draw, mass = self._draw(m)
        if not len(draw):
            self.exact = self.whole and self._exhausted()
            return
        groups = self._groups(draw)
        growth = 1.0 if self.stale is not None else self.pool.size / max(self.drawn_size, 1)
        n_free = int((groups >= 0).sum())
        precision = float("inf") if mass <= 0 else n_free / mass**2
        share = 1.0 if precision == float("inf") else precision / (precision + self.precision)
        self.precision += precision
        self.drawn_size = self.pool.size
        first = len(self.drawn.weights)
        self.drawn.add(draw.probabilities, groups, share, growth)
        for at, (X, _) in self.pool.fetch(draw.data):
            part = PairDraw(draw.data[at], draw.classes[at], draw.probabilities[at])
            rows = gradient_rows(self.engine, X, lambda f, part=part: self._vectors(f, part))
            for factor in self.factors:
                factor.add(
                    rows[factor.layers],
                    (1 / part.probabilities).to(X.device if isinstance(X, Tensor) else "cpu"),
                    groups[at],
                    first + at,
                    len(at) / len(draw),
                )
            self.bar.update(len(at))
        for factor in self.factors:
            factor.close(share, growth, distinct=self.stale is None)
        self.exact = self.whole and self._exhausted()

    def _vectors(self, f: Tensor, part: PairDraw) -> Tensor:
        """Backward vectors of the pairs; with scores from training, classes are drawn now."""
        likelihood = self.engine.likelihood
        if self.stale is None:
            return pair_vectors(f, part.classes.to(f.device), likelihood)
        return sampled_hessian_root(f, likelihood, self.options.generator)[:, :, 0]

    def _draw(self, m: int) -> tuple[PairDraw, float]:
        """A draw, and what of the trace per datum it leaves to chance."""
        generator = self.options.generator
        if self.stale is not None:
            scores = self.stale[:, None]
            draw = draw_pairs(scores, m, self.stale.argsort(), generator)
            free = 1.0
        else:
            scores = self.moments.scores.clone()
            if self.taken is not None:
                old = self.taken
                self.taken = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
                self.taken[: len(old)] = old
            else:
                self.taken = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
            scores[self.taken] = 0.0
            left = int((scores > 0).sum())
            if not left:
                empty = torch.zeros(0, dtype=torch.long)
                return PairDraw(empty, empty, torch.zeros(0, dtype=torch.float64)), 0.0
            limit = self.options.n_passes
            if self.options.tolerance is not None and self.whole and left <= 2 * m:
                m = left if limit is None else min(left, limit - self.spent)
            order = pair_order(self.moments.outputs, self.moments.features, self.engine.likelihood)
            draw = draw_pairs(scores, m, order, generator)
            self.taken[draw.data, draw.classes] = True
            certain = draw.probabilities >= 1
            free = float(scores.sum() - scores[draw.data, draw.classes][certain].sum())
            free = 0.0 if bool(certain.all()) else free / self.pool.size
        return draw, free

    def _groups(self, draw: PairDraw) -> Tensor:
        """Deal draws into groups: by turns; by data, where the pool is a draw itself."""
        free = draw.probabilities < 1
        turns = free.long().cumsum(0) - 1
        groups = (turns if self.whole or self.stale is not None else draw.data) % N_GROUPS
        return torch.where(free, groups, -1)

    # -- the posterior

    def blocks(self, groups: tuple[int, ...] = tuple(range(N_GROUPS))) -> list[EigenFactors]:
        """The posterior's curvature from some of the groups."""
        with self.engine.cost.stage("decompositions"):
            N, n = self.data.n_data, self.pool.size
            scale = N / n if self.stale is None else N / len(self.stale)
            spectra = {
                factor.layers: factor.spectrum(self.drawn, groups, scale) for factor in self.factors
            }
            A = self.moments.decomposed()
            output = None
            found = []
            for i, p in enumerate(self.engine.owned):
                if p.layers in spectra:
                    rows = None if self.whole or not self.moments.one_row[i] else (n, N)
                    found.append(
                        corrected_block(
                            spectra[p.layers],
                            A[i],
                            float(self.ridges[i]),
                            correct=self.correct,
                            input_rows=rows,
                        )
                    )
                    continue
                if output is None:
                    hessian = mean_loss_hessian(self.moments.outputs, self.engine.likelihood)
                    lam, Q = eigh_float64(N * hessian, "the output's Hessian")
                    output = (Q, lam.clamp(min=0))
                found.append(EigenFactors(*output, *(A[i] or ())))
            return found

    def certificate(self, blocks: list[EigenFactors]) -> tuple[float, float]:
        """Estimated distance to the full batch and its standard error."""
        if self.exact or (self.whole and not self.factors):
            return 0.0, 0.0
        with self.engine.cost.stage("certificate"):
            if self.probes is None:
                X, directions = self.moments.probes(self.data.key_x)
                self.probes = probe_gradients(self.engine, X, directions, self.data.key_x)
            J, ridges = self.probes, self.ridges.to(self.probes[0].device)
            theta = log_deviations(blocks, J, ridges)
            errors, bias = [], torch.zeros_like(theta)
            if self.factors:
                for one, two in SPLITS:
                    halves = [log_deviations(self.blocks(half), J, ridges) for half in (one, two)]
                    errors.append((halves[0] - halves[1]) / 2)
                    bias += (halves[0] + halves[1]) / 2 - theta
                bias /= len(SPLITS)
            error = torch.stack(errors) if errors else theta.new_zeros(1, len(theta))
            if not self.whole:
                share = max(0.0, 1 - self.pool.size / self.data.n_data) ** 0.5
                halves_A = self.moments.halves()
                deltas = [None if d is None else share * d for d in halves_A]
                noise = input_noise(blocks, deltas, J, ridges)
                error = torch.cat([error, noise[None] * len(error) ** 0.5])
                error = error * (len(error) / (len(error) - 1)) ** 0.5
            return estimated_distance(error, bias)

    def _result(
        self, blocks: list[EigenFactors], distance: float, error: float, reason: str
    ) -> FitResult:
        """The fit, with its report."""
        N, cost = self.data.n_data, self.engine.cost
        dtype = self.moments.dtype
        A = self.moments.decomposed()
        lam = [
            [block.lam_B] if pair is None else [block.lam_B, pair[1]]
            for block, pair in zip(blocks, A, strict=True)
        ]
        Q = [[b.Q_B] if b.Q_A is None else [b.Q_B, b.Q_A] for b in blocks]
        tilde = [[b.lam_B] if b.lam_A is None else [b.lam_B, b.lam_A] for b in blocks]
        report = FitReport(
            "auto",
            self.spent,
            cost.forward,
            0 if self.probes is None else len(self.probes[0]),
            N,
            self.pool.size,
            dict(cost.seconds),
            distance,
            error,
            reason,
        )
        return FitResult(
            [[Q_f.to(dtype) for Q_f in block] for block in Q],
            lam,
            tilde,
            [],
            self.moments.loss * (N / self.pool.size),
            N,
            self.moments.outputs.shape[1],
            report,
        )
