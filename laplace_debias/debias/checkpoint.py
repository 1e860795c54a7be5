"""What a fit has done so far, in a file: the same call goes on from there after an interruption.

What was accumulated (factors, a basis, folds, draws), the number of mini-batches that are in it
with a digest of their data, and the states of all random number generators are written as one file,
whole or not at all. Going on, the loader is started from the same state and the mini-batches that
are done are read, compared with the digest, and passed over: then everything is as it was.

Several processes have a file each. Between two exchanges they go on independently of each other,
wherever each of them stands. At an exchange all turn to the next phase: each writes beside its
file, and only when all have done so the files are replaced. So if one file has turned, all others
have, or can: a kill in between leaves no process in a phase that another one cannot reach.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laplace_debias.data.inputs import Batch
from laplace_debias.data.processes import processes, together
from laplace_debias.debias.packing import digest_of, packed, unpacked
from laplace_debias.kfac.counts import FitCost
from laplace_debias.storage.atomic import write_atomically

__all__ = ["Checkpoint"]


class Checkpoint:
    """The file of one fit, and where the fit stands.

    Args:
        path: The file of this process; it need not exist.
        about: What decides the numbers besides the data; a file with something else is refused.
        generators: All that are drawn from, besides the global one.
        seconds: How often to write; 0 after every mini-batch.

    Attributes:
        content: What an earlier call has left, by name; empty if there was none.
        resumed: Number of mini-batches whose passes an earlier call has made.
        done: Number of mini-batches whose passes are made, as far as they were read again.

    Raises:
        ValueError: If the file belongs to another fit, or is no such file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = Checkpoint(folder + "/fit.pt", {"model": "a"}, [], seconds=0.0)
        ...     batch = (torch.ones(2, 1), torch.zeros(2))
        ...     for _ in first.following(iter([("directions", batch)])):
        ...         first.processed(FitCost(forward=2))
        ...     Checkpoint(folder + "/fit.pt", {"model": "a"}, []).resumed
        1
    """

    def __init__(
        self,
        path: str | Path,
        about: Mapping[str, Any],
        generators: list[torch.Generator],
        seconds: float = 60.0,
    ) -> None:
        self.path, self.about, self.seconds = Path(path), dict(about), seconds
        self._generators = generators
        self.content: dict[str, Any] = {}
        self.resumed = 0
        self.done, self._digest, self._ahead = 0, "", list[str]()
        self._saved: dict[str, Any] | None = None
        self._start = self._position = self._states()
        self._written = time.monotonic()
        self._phase, self._next = 0, self.path.with_name(self.path.name + ".next")
        self._settle()
        with together("reading its checkpoint"):
            if self.path.exists():
                self._load()

    def _settle(self) -> None:
        """Let all processes begin in the same phase: the last that any of them has turned to."""
        group = processes()
        if group is None:
            return
        own = self._phase_of(self.path), self._phase_of(self._next)
        found = group.gather(own)
        last = max(now for now, _ in found)
        if last > 0 and all(last in phases for phases in found):
            if own[0] != last:
                self._next.replace(self.path)
        elif last > 0 and own[0] >= 0:  # some have ended, and removed theirs: all begin anew
            self.path.unlink()
        if own[1] >= 0:
            self._next.unlink(missing_ok=True)

    def _phase_of(self, path: Path) -> int:
        """Phase of a file of this fit, -1 if there is none."""
        try:
            saved = torch.load(path, weights_only=True, mmap=True)
            return int(saved["phase"]) if saved["about"] == self.about else -1
        except Exception:  # no file, or none that can be read: that is said when it is loaded
            return -1

    def _load(self) -> None:
        """Take over what an earlier call has left."""
        try:
            saved = torch.load(self.path, weights_only=True)
            about = saved["about"]
        except Exception as error:
            raise ValueError(
                f"Expected the checkpoint of a fit, got {self.path}, which cannot be read as one "
                f"({type(error).__name__}). Remedy: delete the file, or choose another path."
            ) from error
        other = sorted(
            key for key in {*about, *self.about} if about.get(key) != self.about.get(key)
        )
        if other:
            raise ValueError(
                f"Expected a checkpoint of this very fit in {self.path}, got one that differs in "
                f"{', '.join(other)}. Remedy: delete the file to begin anew, or take another path."
            )
        self.content = unpacked(saved["content"])
        self._start, self._position = saved["start"], saved["position"]
        self._saved, self.resumed, self._phase = saved, saved["done"], saved["phase"]

    def begin(self, cost: FitCost) -> None:
        """Set generators as they were at the start of the first call; add what calls have spent.

        Args:
            cost: Where to add it.
        """
        if self._saved is not None:
            self._restore(self._start)
            forward, backward, seconds = self._saved["cost"]
            cost.forward += forward
            cost.backward += backward
            for stage, spent in seconds.items():
                cost.seconds[stage] = cost.seconds.get(stage, 0.0) + spent

    def following(self, batches: Iterator[tuple[str, Batch]]) -> Iterator[tuple[str, Batch]]:
        """Mini-batches whose passes are still to be made; the others are read and compared.

        Args:
            batches: All of them, with their roles; not begun yet. What they draw before they are
                read is to be what it was in the first call, see :meth:`begin`.

        Yields:
            The rest.

        Raises:
            ValueError: If the data are not those of the earlier call.
        """
        self.read_again(batches)
        yield from self.noted(batches)

    def read_again(self, batches: Iterator[tuple[str, Batch]]) -> None:
        """Read what an earlier call has passed, and compare; see :meth:`following`."""
        if self._saved is None:
            return
        for _ in range(self._saved["done"]):
            item = next(batches, None)
            if item is None:
                break
            self._ahead.append(digest_of(*item))
            self._commit()
        if (self.done, self._digest) != (self._saved["done"], self._saved["digest"]):
            raise ValueError(
                f"Expected the data of the interrupted fit in {self.path}, got others within "
                f"its first {self._saved['done']} mini-batches. Remedy: pass the same data in "
                "the same order (a seeded sampler, no random augmentation), or delete the file."
            )
        self._restore(self._saved["position"])

    def noted(self, batches: Iterator[tuple[str, Batch]]) -> Iterator[tuple[str, Batch]]:
        """The same mini-batches, whose digests are noted on the way."""
        for item in batches:
            self._ahead.append(digest_of(*item))
            yield item

    def _commit(self) -> None:
        """Count the first mini-batch that was read, but not yet counted."""
        self._digest = hashlib.sha256(f"{self._digest} {self._ahead.pop(0)}".encode()).hexdigest()
        self.done += 1

    def processed(self, cost: FitCost, **content: Any) -> None:
        """Note that the passes of a mini-batch are made; write, if it is time.

        Args:
            cost: What the fit has spent so far.
            **content: What was accumulated so far: factors, tensors, numbers and text, in lists,
                tuples and dictionaries.
        """
        self._commit()
        self.moved(cost, **content)

    def moved(self, cost: FitCost, **content: Any) -> None:
        """The same for work without a mini-batch of its own: where generators stand now is kept."""
        self._position = self._states()  # before the next mini-batch is read, which draws as well
        if time.monotonic() - self._written >= self.seconds:
            self.write(cost, **content)

    def write(self, cost: FitCost, **content: Any) -> None:
        """Write the file, whole or not at all; arguments as those of :meth:`processed`."""
        self._write(self.path, cost, content)

    def turn(self, cost: FitCost, **content: Any) -> None:
        """The same after an exchange: all processes are in the next phase then, or none.

        Args:
            cost: See :meth:`processed`.
            **content: See :meth:`processed`.
        """
        self._phase += 1
        if processes() is None:
            self.write(cost, **content)
            return
        with together("writing its checkpoint"):
            self._write(self._next, cost, content)
        self._next.replace(self.path)

    def _write(self, path: Path, cost: FitCost, content: dict[str, Any]) -> None:
        """Write a file."""
        state = {
            "about": self.about,
            "phase": self._phase,
            "done": self.done,
            "digest": self._digest,
            "start": self._start,
            "position": self._position,
            "content": packed(content),
            "cost": (cost.forward, cost.backward, dict(cost.seconds)),
        }

        def save(file: Path) -> None:
            with file.open("wb") as stream:  # torch refuses some names of files
                torch.save(state, stream)

        write_atomically(path, save)
        self._written = time.monotonic()

    def finish(self) -> None:
        """Remove the file of a fit that is complete, and what was left half written by a kill."""
        with together("its fit"):
            pass  # nobody needs the others any more
        halves = [
            half
            for path in (self.path, self._next)
            for half in path.parent.glob(f".{path.stem}-{32 * '?'}{path.suffix}")
        ]
        for path in (self.path, *halves):
            path.unlink(missing_ok=True)

    def _states(self) -> list[Tensor]:
        """States of the global generator and of all others."""
        return [torch.get_rng_state(), *(g.get_state() for g in self._generators)]

    def _restore(self, states: list[Tensor]) -> None:
        """Set them."""
        torch.set_rng_state(states[0])
        for generator, state in zip(self._generators, states[1:], strict=True):
            generator.set_state(state)
