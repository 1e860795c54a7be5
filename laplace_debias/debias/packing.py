"""What the file of a fit is made of: factors as dictionaries, digests of data, generators."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Any

import torch

from laplace_debias.data.inputs import Batch, tensor_bytes, tensors_of
from laplace_debias.data.targets import apart
from laplace_debias.kfac.factors import Factors

__all__ = ["digest_of", "generators_of", "packed", "unpacked"]

_FACTORS = "factors"
"""Key of factors in a file; no content has this name."""


def generators_of(*owners: Any) -> list[torch.Generator]:
    """Random number generators of loaders and of their samplers, each once.

    Args:
        *owners: Loaders, generators, or anything else.

    Returns:
        The generators.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> g = torch.Generator()
        >>> generators_of(DataLoader([1, 2], shuffle=True, generator=g), None, g) == [g]
        True
    """
    parts = [
        part
        for owner in owners
        for part in (
            owner,
            *(getattr(owner, name, None) for name in ("sampler", "batch_sampler")),
        )
    ]
    found = [part if isinstance(part, torch.Generator) else getattr(part, "generator", None)
             for part in parts]  # fmt: skip
    kept = {id(each): each for each in found if isinstance(each, torch.Generator)}
    return list(kept.values())


def packed(value: Any) -> Any:
    """The same with dictionaries in the place of factors, as a file takes it.

    Args:
        value: Factors, tensors, numbers and text, in lists, tuples and dictionaries.

    Example:
        >>> factors = Factors.from_blocks(["bias"], [[torch.eye(2)]], n=5, n_outputs=2)
        >>> unpacked(packed([factors]))[0].n
        5
    """
    if isinstance(value, Factors):
        assert not any(map(any, value.row_counts))  # of reports, not of fits
        names = (each.name for each in fields(value) if each.name != "row_counts")
        return {_FACTORS: {name: getattr(value, name) for name in names}}
    if isinstance(value, dict):
        return {key: packed(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(packed, value))
    return value


def unpacked(value: Any) -> Any:
    """What was packed, see :func:`packed`."""
    if isinstance(value, dict):
        if _FACTORS in value:
            return Factors(**value[_FACTORS])
        return {key: unpacked(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(unpacked, value))
    return value


def digest_of(role: str, batch: Batch) -> str:
    """Digest of a mini-batch and its role.

    Args:
        role: What its data are for.
        batch: Inputs and targets, perhaps with weights.

    Example:
        >>> batch = (torch.ones(2, 1), torch.zeros(2))
        >>> digest_of("pool", batch) == digest_of("directions", batch)
        False
    """
    X, given = batch
    y, w = apart(given)
    digest = hashlib.sha256(role.encode())
    for part in (*tensors_of(X), y, *([] if w is None else [w])):
        digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
        digest.update(tensor_bytes(part))
    return digest.hexdigest()
