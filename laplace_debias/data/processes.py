"""The processes that work on one job: ``torch.distributed``'s default group, if there is one.

Every process does its share, then all of them exchange. An error in one share is everybody's: all
processes raise, those that did nothing wrong with the message of the one that did. A process that
is gone is named by the others, who notice when they next exchange anything with it: at once where
the connection breaks (gloo), at the latest after the group's time-out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Processes", "counted", "from_main", "processes", "shared_out", "together", "total"]

_FINE, _RAISED = 0, 1
T = TypeVar("T")


@dataclass
class Processes:
    """One process's view of the group.

    Attributes:
        rank: Its number.
        size: How many there are.
        carried: Bytes of tensors that it has summed or passed on so far.
    """

    rank: int
    size: int
    carried: int = 0

    @property
    def others(self) -> list[int]:
        """Ranks of all other processes."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in the order of ranks.

        Args:
            value: Anything that can be pickled; small.
        """
        values: list[Any] = [None] * self.size
        with self._naming():
            dist.all_gather_object(values, value)
        return values

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over processes, in place; all get the same bits.

        Args:
            tensor: Of the same shape and type in every process.

        Returns:
            The same tensor.
        """
        wire = self._on_wire(tensor)
        with self._naming():
            dist.reduce(wire, 0)
            dist.broadcast(wire, 0)
        self.carried += 2 * wire.nbytes
        return tensor.copy_(wire) if wire is not tensor else tensor

    def broadcast_(self, tensor: Tensor, source: int) -> Tensor:
        """Overwrite a tensor with that of one process.

        Args:
            tensor: Of the same shape and type in every process.
            source: Rank of the process that has it.

        Returns:
            The same tensor.
        """
        wire = self._on_wire(tensor)
        with self._naming():
            dist.broadcast(wire, source)
        self.carried += wire.nbytes
        return tensor.copy_(wire) if wire is not tensor else tensor

    def agree(self, error: Exception | None, work: str) -> None:
        """Go on if no process has failed.

        Args:
            error: What this one has raised, or ``None``.
            work: What it was about, for the message of the others.

        Raises:
            Exception: This process's own error.
            RuntimeError: If another process has failed, or is gone.
        """
        if not any(self._statuses(_FINE if error is None else _RAISED, work, error)):
            return
        text = None if error is None else f"{type(error).__name__}: {error}"
        messages = {rank: text for rank, text in enumerate(self.gather(text)) if text is not None}
        if error is not None:
            raise error
        first, message = min(messages.items())
        raise RuntimeError(
            f"Expected every process to finish {work}, got an error in rank {first}: {message} "
            "Remedy: as that message says; this process stopped because of it."
        )

    def _statuses(self, status: int, work: str, cause: BaseException | None) -> list[int]:
        """The numbers of all processes, from each in person: so that a missing one has a name."""
        device = self._device()
        mine = torch.tensor([status], device=device)
        theirs = torch.zeros(self.size, dtype=mine.dtype, device=device)
        theirs[self.rank] = status
        if dist.get_backend() != "gloo":
            with self._naming():
                dist.all_gather_into_tensor(theirs, mine)
            return [int(value) for value in theirs]
        works: dict[int, list[Any]] = {}
        gone: list[int] = []
        for peer in self.others:
            try:
                send = dist.isend(mine, peer)
                works[peer] = [dist.irecv(theirs[peer : peer + 1], peer), send]
            except RuntimeError:
                gone.append(peer)
        for peer, pair in works.items():
            try:
                for one in pair:
                    one.wait()
            except RuntimeError as error:
                gone.append(peer)
                cause = cause or error
        if gone:
            _raise_gone(sorted(gone), work, cause)
        return [int(value) for value in theirs]

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Find out who is gone, if an exchange fails."""
        try:
            yield
        except RuntimeError as error:
            if dist.get_backend() == "gloo":
                self._statuses(_FINE, "an exchange", error)
            raise

    @staticmethod
    def _device() -> torch.device:
        """Where tensors have to be to be exchanged."""
        if dist.get_backend() == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _on_wire(self, tensor: Tensor) -> Tensor:
        """The tensor itself if it can be exchanged as it is, else a copy that can."""
        device = self._device()
        if tensor.device.type == device.type and tensor.is_contiguous():
            return tensor
        return tensor.to(device).contiguous()


def _raise_gone(ranks: list[int], work: str, cause: BaseException | None) -> NoReturn:
    """Name the processes that do not answer."""
    names = ", ".join(f"rank {rank}" for rank in ranks)
    raise RuntimeError(
        f"Expected all processes to finish {work}, got no answer from {names}: killed, or stuck "
        "for longer than the group's time-out. Remedy: look at the log of that process (out of "
        "memory?), and start all of them again."
    ) from cause


_CURRENT: dict[int, Processes] = {}  # by the group, which may be destroyed and made again


def processes() -> Processes | None:
    """The processes that share the job, or ``None`` if this one is alone.

    Returns:
        The view of ``torch.distributed``'s default group, once it is initialised.

    Example:
        >>> processes() is None
        True
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    key = id(dist.group.WORLD)
    if key not in _CURRENT:
        _CURRENT.clear()
        _CURRENT[key] = Processes(dist.get_rank(), dist.get_world_size())
    return _CURRENT[key]


@contextmanager
def together(work: str) -> Iterator[None]:
    """Do a share of some work; if that of any process raises, all raise.

    Nothing may be exchanged inside the block.

    Args:
        work: What it is, for messages.

    Yields:
        Nothing.

    Raises:
        RuntimeError: If another process has failed or is gone.

    Example:
        >>> with together("a sum"):
        ...     1 + 1
        2
    """
    group = processes()
    if group is None:
        yield
        return
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    group.agree(error, work)


def total(count: int) -> int:
    """Sum of a number over processes.

    Args:
        count: That of this process.

    Example:
        >>> total(3)
        3
    """
    group = processes()
    return count if group is None else sum(group.gather(count))


def from_main(value: T) -> T:
    """What rank 0 has decided or drawn, in every process.

    Args:
        value: Anything that can be pickled; that of rank 0 counts.

    Example:
        >>> from_main(3)
        3
    """
    group = processes()
    if group is None:
        return value
    found: T = group.gather(value if group.rank == 0 else None)[0]
    return found


def counted(n_data: int) -> int:
    """Number of data of all processes, of which there must be some.

    Args:
        n_data: Number of data of this one.

    Raises:
        ValueError: If no process has any.

    Example:
        >>> counted(3)
        3
    """
    found = total(n_data)
    if found == 0:
        raise ValueError(
            "Expected at least one datum in some process, got none in any. Remedy: check the "
            "loaders' datasets."
        )
    return found


def shared_out(costs: Sequence[float], group: Processes | None) -> list[int]:
    """Deal out jobs: the dearest first, each to the process with the least to do so far.

    Args:
        costs: Of each job.
        group: The processes, ``None`` if there is only this one.

    Returns:
        The rank that does each job, the same in every process.

    Example:
        >>> shared_out([1.0, 8.0, 4.0, 3.0], Processes(0, 2))
        [1, 0, 1, 1]
    """
    load, ranks = [0.0] * (1 if group is None else group.size), [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        ranks[job] = load.index(min(load))
        load[ranks[job]] += costs[job]
    return ranks
