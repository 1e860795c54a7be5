"""Count the bytes of tensors that are alive, and their peak, whatever the allocator does."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations inside the block have made.

    Workspaces of libraries (LAPACK, convolutions) are not seen.

    Args:
        known: Tensors that were there before and do not count.

    Attributes:
        now: Bytes that are alive.
        peak: Most bytes that were alive at a time.
        largest: Bytes of the largest tensor.

    Example:
        >>> with LiveBytes() as live:
        ...     x = torch.zeros(10) + torch.zeros(10)
        >>> live.now, live.peak
        (40, 120)
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.now = self.peak = self.largest = 0
        self._known = {t.untyped_storage().data_ptr() for t in known}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count what it made."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is gone."""
        key = storage._cdata
        if key in self._sizes or storage.data_ptr() in self._known:
            return
        self._sizes[key] = storage.nbytes()
        self.largest = max(self.largest, storage.nbytes())
        weakref.finalize(storage, self._gone, key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        """Count a storage no more."""
        self.now -= self._sizes.pop(key, 0)
