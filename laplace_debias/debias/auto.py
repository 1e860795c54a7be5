r"""Fit to a tolerance: score a pool, draw pairs in rounds, stop when the fit is near enough.

1. Forward passes over a pool of data give the input factors A, the output layer's exact Hessian,
   the loss, and the score of every (datum, class) pair (:mod:`laplace_debias.debias.pairs`).
2. Pairs are drawn and propagated back, one pass each, in rounds that double their number; nothing
   is computed twice (:mod:`laplace_debias.debias.rounds`, :mod:`laplace_debias.debias.drawn`).
3. Eigenvalues are corrected for the inverse, at the prior precision of the fit
   (:mod:`laplace_debias.debias.inverse`): basis and eigenvalues then stay as they are, also when
   the prior precision changes.
4. Halves of the draws tell how far the posterior is from the full batch's
   (:mod:`laplace_debias.debias.certificate`). A round that takes all pairs left is the full batch,
   if the input factors have seen all data (:mod:`laplace_debias.debias.pool_inputs`).
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace

import torch
from torch import Tensor

from laplace_debias.data.loaders import bar, is_main
from laplace_debias.data.processes import from_main, processes, total
from laplace_debias.data.roles import TrainingData
from laplace_debias.debias.certificate import (
    LEFT_OUT,
    TILTED,
    errors_and_bias,
    estimated_distance,
    evenly_split,
    log_deviations,
    probe_gradients,
)
from laplace_debias.debias.checkpoint import Checkpoint
from laplace_debias.debias.corrected import Spectrum, corrected_block
from laplace_debias.debias.drawn_rows import ALIKE
from laplace_debias.debias.eigen import EigenFactors, eigh_float64
from laplace_debias.debias.kept_rounds import KeptRounds
from laplace_debias.debias.options import AutoOptions
from laplace_debias.debias.pairs import check_blocks
from laplace_debias.debias.pool_noise import pool_noises
from laplace_debias.debias.room import room_for
from laplace_debias.debias.rounds import Rounds
from laplace_debias.debias.shared_eigen import eigh_shared
from laplace_debias.debias.spectrum import FitResult
from laplace_debias.kfac.counts import FitReport
from laplace_debias.kfac.interface import EngineInterface
from laplace_debias.network.ownership import RowsKey, rows_key

__all__ = ["fit_auto"]

FIRST_ROUND = 64


def fit_auto(
    engine: EngineInterface,
    data: TrainingData,
    options: AutoOptions,
    ridges: Tensor,
    *,
    correct: bool = True,
    progress_bar: bool | None = None,
    checkpoint: Checkpoint | None = None,
) -> FitResult:
    """Fit to a tolerance, or with a given number of backward passes.

    Args:
        engine: Makes factors and counts its passes.
        data: The loader and N.
        options: Tolerance and budgets.
        ridges: Prior precision over the Hessian factor of each block, ``[n_blocks]``.
        correct: Whether to correct eigenvalues for the inverse.
        progress_bar: Whether to show one, advanced by passes, forward and backward.
        checkpoint: Where to keep what was done so far, and to go on from; for one process.

    Returns:
        The fit with its report.

    Raises:
        ValueError: If scores do not fit the data, or there are more data than N.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> from laplace_debias.kfac.engine import Engine
        >>> engine = Engine(net, "classification")
        >>> batches = [(torch.randn(8, 3), torch.arange(8) % 2) for _ in range(4)]
        >>> data = TrainingData(batches, None, 32, torch.device("cpu"))
        >>> options = AutoOptions(tolerance=None, n_passes=16)
        >>> fit = fit_auto(engine, data, options, torch.ones(4))
        >>> fit.n_data, engine.cost.forward <= 32 + 16, engine.cost.backward
        (32, True, 16)
    """
    check_blocks(engine.owned)
    if engine.draw_seed is not None:  # processes draw alike
        generator = torch.Generator().manual_seed(engine.draw_seed)
        options = replace(options, generator=generator)
    if checkpoint is not None:
        checkpoint.begin(engine.cost)  # the pool's order is drawn
    with bar(shown=progress_bar, total=0, unit="pass") as shown:
        rounds = Rounds(engine, data, options, shown, room_for)
        kept = None if checkpoint is None else KeptRounds(rounds, checkpoint)
        return _Fit(rounds, ridges.double(), correct, kept).fit()


class _Fit:
    """One fit: how many rounds, and what comes of them."""

    def __init__(
        self, rounds: Rounds, ridges: Tensor, correct: bool, kept: KeptRounds | None = None
    ) -> None:
        self.rounds, self.ridges, self.correct, self.kept = rounds, ridges, correct, kept
        self.engine, self.options = rounds.engine, rounds.options
        self.began = time.perf_counter() if kept is None else kept.began
        self.probes: list[Tensor] | None = None
        self._rotated: tuple[object, list[Tensor]] | None = None

    @property
    def spent(self) -> int:
        """Backward passes so far."""
        return self.rounds.n_drawn

    @property
    def exact(self) -> bool:
        """Whether this is the full batch."""
        rounds = self.rounds
        done = rounds.exhausted or not rounds.factors
        return rounds.whole and done and rounds.moments.complete

    def fit(self) -> FitResult:
        """Rounds until the tolerance, a budget or the end of the data is reached."""
        m = self._passes(FIRST_ROUND)
        if self.options.tolerance is None and self.options.n_passes is not None:
            m = self.options.n_passes
        if self.kept is not None and self.kept.own:
            m, self.probes = self.kept.own["m"], self.kept.own["probes"]
        while True:
            begin, blocks, self._rotated = time.perf_counter(), None, None  # room for the passes
            if self.kept is not None:
                self.kept.begin_round(m=m, probes=self.probes)
            self.rounds.grow(self.spent + m)
            if self.rounds.factors:
                left = self.rounds.n_left() if self.rounds.stale is None else 0
                if self.options.tolerance is not None and m < left <= 2 * m and self.rounds.whole:
                    m = self._passes(left)  # the full batch is near
                self.rounds.draw(m)
                while self.rounds.stale is not None and self.options.tolerance is None:
                    rest = self._passes(m) if self.options.n_passes != self.spent else 0
                    if not rest:
                        break
                    self.rounds.draw(rest)  # a round takes each datum once at most
            blocks = self.blocks()
            distance, error = from_main(self.certificate(blocks))
            reason = from_main(self._reason(distance, time.perf_counter() - begin))
            if reason:
                return self._result(blocks, distance, error, reason)
            m = self._passes(self.spent)

    def _passes(self, wanted: int) -> int:
        """As many passes as wanted, or as the budget has left."""
        limit = self.options.n_passes
        return wanted if limit is None else min(wanted, limit - self.spent)

    def _reason(self, distance: float, seconds: float) -> str:
        """Why the fit ends here, or nothing; warn if that is before the tolerance."""
        options, rounds = self.options, self.rounds
        if not rounds.factors:
            return "the output layer needs no backward pass"
        if self.exact:
            return "every pair was propagated, as in a full-batch fit"
        used_up = ""
        if rounds.exhausted and rounds.whole:
            used_up = "every pair was propagated, but input factors are those of a part of the data"
        elif rounds.exhausted:
            n, N = rounds.pool.size, rounds.data.n_data
            limited = "the pool is limited (`n_pool`, `memory_budget`) to"
            ended = "the loader ended after" if rounds.pool.ended else limited
            used_up = f"{ended} {n} of {N} data, and all of their pairs are used"
        if options.tolerance is None:
            return used_up or f"the budget of {options.n_passes:,} backward passes is spent"
        if distance <= options.tolerance:
            return f"the estimate is below the tolerance of {100 * options.tolerance:g} %"
        short, elapsed = "", time.perf_counter() - self.began
        if options.n_passes is not None and self.spent >= options.n_passes:
            short = f"n_passes={options.n_passes} is spent"
        elif options.max_seconds is not None and elapsed + 2 * seconds > options.max_seconds:
            short = f"another round would end after max_seconds={options.max_seconds:g}"
        else:
            short = used_up
        if short and is_main():
            warnings.warn(
                f"The fit stops at an estimated distance of {distance:.3f} to the full-batch "
                f"posterior, above its tolerance of {options.tolerance:g}: {short}.",
                stacklevel=5,
            )
        return short

    def blocks(self, counts: tuple[float, ...] = ALIKE) -> list[EigenFactors]:
        """The posterior's curvature, each group of draws counted so often."""
        rounds, moments = self.rounds, self.rounds.moments
        N, n = rounds.data.n_data, rounds.pool.size
        with self.engine.cost.stage("decompositions"):
            pairs = eigh_shared(
                [factor.estimate(rounds.scale, counts) for factor in rounds.factors],
                ["B"] * len(rounds.factors),
            )
            of_key = {f.key: (f, pair) for f, pair in zip(rounds.factors, pairs, strict=True)}
            A, output, found = moments.inputs.decomposed(), None, []
            spectrum: tuple[RowsKey, Spectrum] | None = None  # of one layer at a time
            for i, p in enumerate(self.engine.owned):
                key = rows_key(p)
                if key in of_key:
                    if spectrum is None or spectrum[0] != key:
                        factor, pair = of_key[key]
                        spectrum = None
                        spectrum = key, factor.spectrum(rounds.drawn, rounds.scale, counts, pair)
                    drawn_A = not rounds.whole and moments.one_row[i]
                    block = corrected_block(
                        spectrum[1],
                        A[i],
                        float(self.ridges[i]),
                        correct=self.correct,
                        input_rows=(n, N) if drawn_A else None,
                    )
                else:
                    if output is None:
                        hessian = self.engine.mean_hessian(moments.outputs, moments.weights)
                        lam, Q = eigh_float64(N * hessian, "the output's Hessian")
                        output = (Q, lam.clamp(min=0))
                    block = EigenFactors(*output, *(A[i] or ()))
                found.append(block)
            return found

    def certificate(self, blocks: list[EigenFactors]) -> tuple[float, float]:
        """Estimated distance to the full batch and its standard error."""
        rounds, moments = self.rounds, self.rounds.moments
        if self.exact:
            return 0.0, 0.0
        with self.engine.cost.stage("certificate"):
            J, ridges = self._rotated_probes(), self.ridges.to(moments.outputs.device)
            theta = log_deviations(blocks, J, ridges)
            pairs = ((f, c) for f in rounds.factors for c in LEFT_OUT)
            loses = any(f.loses_span(rounds.drawn, c) for f, c in pairs)
        sets = [TILTED, LEFT_OUT] if from_main(loses) else [TILTED]  # in all processes alike
        others = [  # one at a time
            torch.stack([log_deviations(self.blocks(c), J, ridges) for c in counts])
            for counts in (sets if rounds.factors else [])
        ]
        with self.engine.cost.stage("certificate"):
            errors, bias = theta.new_zeros(0, len(theta)), torch.zeros_like(theta)
            if others:
                errors, bias = errors_and_bias(theta, *others, corrected=self.correct)
                errors = evenly_split(errors)
                rarity = 1.0 if rounds.stale is not None else rounds.drawn.rarity(rounds.scale)
                errors = errors * (rarity / len(errors)) ** 0.5
            noises = pool_noises(moments, rounds.data.n_data, blocks, J, ridges)
            errors = torch.cat([errors, *(noise[None] for noise in noises)])
            return estimated_distance(errors, bias)

    def _rotated_probes(self) -> list[Tensor]:
        """Gradients at the probes, along the directions of A: all halves share these."""
        moments, key = self.rounds.moments, self.rounds.data.key_x
        if self.probes is None:
            most = self.rounds.room.n_probes
            self.probes = probe_gradients(self.engine, *moments.probes(key, most), key)
        A = moments.inputs.decomposed()
        if self._rotated is None or self._rotated[0] is not A:
            pairs = zip(self.probes, A, strict=True)
            self._rotated = (A, [J if a is None else J @ a[0].to(J) for J, a in pairs])
        return self._rotated[1]

    def _result(
        self, blocks: list[EigenFactors], distance: float, error: float, reason: str
    ) -> FitResult:
        """The fit, with its report."""
        rounds, moments, cost = self.rounds, self.rounds.moments, self.engine.cost
        N, n, dtype = rounds.data.n_data, rounds.pool.size, moments.dtype
        Q = [[b.Q_B] if b.Q_A is None else [b.Q_B, b.Q_A] for b in blocks]
        lam = [[b.lam_B] if b.lam_A is None else [b.lam_B, b.lam_A] for b in blocks]
        n_probes = 0 if self.probes is None else len(self.probes[0])
        counts = (self.spent, total(cost.forward), n_probes, N, n, dict(cost.seconds))
        group = processes()
        if group is not None:  # the same bits, whatever the machines
            lam = [[group.broadcast_(v.contiguous(), 0) for v in block] for block in lam]
        return FitResult(
            [[Q_f.to(dtype) for Q_f in block] for block in Q],
            lam,
            lam,
            [],
            moments.loss * (N / n),
            N,
            moments.outputs.shape[1],
            FitReport("auto", *counts, distance, error, reason),
        )
