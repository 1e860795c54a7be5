"""What a fit in rounds has done so far, in a file: between rounds, and while a pool is read.

Kept are the sums and outputs of the pool, the draws of all rounds that have ended with their
factors and rows, and the probes. A round that was interrupted is made again from its start, with
the same random numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from laplace_debias.data.inputs import Batch, Inputs
from laplace_debias.debias.checkpoint import Checkpoint
from laplace_debias.debias.drawn_rows import DrawnRows
from laplace_debias.debias.leverages import BlockGrams

__all__ = ["KeptRounds"]

_MOMENTS = ("_outputs", "_features", "_weights", "_sums", "loss", "size", "_last_at", "uneven")
_INPUTS = ("parts", "pixels", "per_datum")
_ROUNDS = ("_taken", "_precision", "_drawn_from", "n_drawn")
_DRAWN = ("drawn", "known", "groups")


class KeptRounds:
    """Keeps rounds in a checkpoint, and sets them as an earlier call has left them.

    Args:
        rounds: :class:`laplace_debias.debias.rounds.Rounds` that have not begun;
            their pool was made after :meth:`Checkpoint.begin`.
        checkpoint: The file.

    Attributes:
        own: What else an earlier call has kept, see :meth:`begin_round`; empty if there was none.
        began: When the first call began, in the time of ``time.perf_counter``, pauses left out.

    Raises:
        ValueError: If the data are not those of the earlier call.
    """

    def __init__(self, rounds: Any, checkpoint: Checkpoint) -> None:
        self.rounds, self.checkpoint = rounds, checkpoint
        self.own: dict[str, Any] = {}
        self.began = time.perf_counter()
        self._sizes: list[int] = []  # that the pool was to grow to, one after the other
        self._growing: Iterator[Batch] | None = None
        rounds.reading = self._read
        if checkpoint.content:
            self._restore(checkpoint.content)

    def begin_round(self, **own: Any) -> None:
        """Note that a round begins; write, if it is time.

        Args:
            **own: What the round depends on besides the rounds before it.
        """
        self.own = own
        if self.rounds.moments.size:
            self.checkpoint.moved(self.rounds.engine.cost, **self._content())

    def _read(self, size: int) -> Iterator[Batch]:
        """Let the pool grow; each mini-batch has been passed when the next one is asked for."""
        if self._growing is None:
            self._sizes.append(size)
            self._growing = self.rounds.pool.grow(size)
        for _, batch in self.checkpoint.noted(("pool", batch) for batch in self._growing):
            yield batch
            self.checkpoint.processed(self.rounds.engine.cost, **self._content())
        self._growing = None

    def _again(self, sizes: list[int], first: list[Inputs]) -> Iterator[tuple[str, Batch]]:
        """The mini-batches of earlier calls; the inputs of the first are put into a list."""
        for size in sizes:
            self._sizes.append(size)
            self._growing = self.rounds.pool.grow(size)
            for batch in self._growing:
                first.extend([] if first else [batch[0]])
                yield "pool", batch

    def _content(self) -> dict[str, Any]:
        """All of it, as tensors, numbers and factors."""
        rounds = self.rounds
        return {
            "sizes": self._sizes,
            "growing": self._growing is not None,
            "ended": rounds.pool.ended,
            "seconds": time.perf_counter() - self.began,
            "own": self.own,
            "moments": {name: getattr(rounds.moments, name) for name in _MOMENTS},
            "inputs": {name: getattr(rounds.moments.inputs, name) for name in _INPUTS},
            "rounds": {name: getattr(rounds, name) for name in _ROUNDS},
            "drawn": {name: getattr(rounds.drawn, name) for name in _DRAWN},
            "outputs": [
                (factor.sums, factor.known, [_plain(*pair) for pair in factor.rows])
                for factor in rounds.factors
            ],
        }

    def _restore(self, kept: dict[str, Any]) -> None:
        """Read the pool again without passes, and take over the rest."""
        rounds, first = self.rounds, list[Inputs]()
        again = self._again(kept["sizes"], first)
        self.checkpoint.read_again(again)
        if not kept["growing"]:
            assert next(again, None) is None  # the pool notes that it is at its size
            self._growing, rounds.pool.ended = None, kept["ended"]
        self.own, self.began = kept["own"], time.perf_counter() - kept["seconds"]
        owners = (rounds.moments, "moments"), (rounds.moments.inputs, "inputs"), (rounds, "rounds")
        for owner, names in owners:
            for name, value in kept[names].items():
                setattr(owner, name, value)
        rounds.moments.begin_with(first[0])
        rounds.drawn = DrawnRows(**kept["drawn"])
        if kept["outputs"]:
            rounds.make_factors()
            for factor, (sums, known, rows) in zip(rounds.factors, kept["outputs"], strict=True):
                factor.sums, factor.known = sums, known
                factor.rows = [(BlockGrams(x) if is_gram else x, at) for x, is_gram, at in rows]


def _plain(rows: Any, at: Any) -> tuple[Any, bool, Any]:
    """Rows or blocks of draws, which of the two they are, and the draws' numbers."""
    is_gram = isinstance(rows, BlockGrams)
    return rows.G if is_gram else rows, is_gram, at
