"""Count the bytes of tensors that are alive, and their peak, whatever the allocator does."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations inside the block have made.

    Args:
        known: Tensors that were there before and do not count.
    """

    def __init__(self, known=()):
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known = {t.untyped_storage().data_ptr() for t in known}
        self._sizes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation, and count what it made."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage):
        key = storage._cdata
        if key in self._sizes or storage.data_ptr() in self._known:
            return
        self._sizes[key] = storage.nbytes()
        self.largest = max(self.largest, storage.nbytes())
        weakref.finalize(storage, self._gone, key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _gone(self, key):
        self.now -= self._sizes.pop(key, 0)
