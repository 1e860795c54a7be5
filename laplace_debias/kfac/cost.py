"""What a fit costs: passes through the network, and seconds by stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["FitCost"]


@dataclass
class FitCost:
    """What a fit cost.

    Attributes:
        forward: Forward passes, one per datum.
        backward: Backward passes, one per datum and vector.
        seconds: Wall-clock time by stage.
    """

    forward: int = 0
    backward: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to a stage.

        Example:
            >>> cost = FitCost()
            >>> with cost.stage("passes"):
            ...     pass
            >>> list(cost.seconds)
            ['passes']
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
