"""Keys of data: numbers that depend on a datum and a seed, not on who reads it or when."""

from __future__ import annotations

import hashlib

import torch

from laplace_debias.data.inputs import Inputs, tensors_of

__all__ = ["datum_keys"]


def datum_keys(X: Inputs, n: int, seed: int) -> list[int]:
    """One number per datum, for a random number generator of its own.

    Equal data have equal keys. Draws that are keyed by the datum do not depend on the mini-batch
    or the process in which it is met.

    Args:
        X: Inputs of n data, a tensor ``[n, ...]``, or a mapping or tuple of such.
        n: Number of data.
        seed: Other seeds give other keys.

    Returns:
        n whole numbers from 0 to ``2**63 - 1``.

    Example:
        >>> X = torch.tensor([[1.0], [2.0], [1.0]])
        >>> keys = datum_keys(X, 3, seed=0)
        >>> keys[0] == keys[2], keys[0] == keys[1], keys == datum_keys(X, 3, seed=1)
        (True, False, False)
    """
    rows = [
        part.detach().reshape(n, -1).contiguous().view(torch.uint8).cpu().numpy()
        for part in tensors_of(X)
        if part.ndim > 0 and len(part) == n
    ]
    salt = seed.to_bytes(8, "little", signed=True)
    keys = []
    for i in range(n):
        digest = hashlib.blake2b(digest_size=8, key=salt)
        for part in rows:
            digest.update(part[i])
        keys.append(int.from_bytes(digest.digest(), "little") >> 1)
    return keys
