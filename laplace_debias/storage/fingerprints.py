"""Digests of models and data, by which a folder of finished cells is recognised."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from laplace.baselaplace import KronLaplace
from torch import Tensor, nn

__all__ = ["data_hash", "model_hash", "posterior_hash"]


def model_hash(model: nn.Module) -> str:
    """Digest of a model's parameters and buffers, and of which parameters are trainable.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> before = model_hash(net)
        >>> net.bias.data += 1
        >>> before == model_hash(net)
        False
    """
    digest = hashlib.sha256()
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {name in trainable}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()[:16]


def posterior_hash(la: KronLaplace) -> str:
    """Digest of the curvature of a fitted Kron approximation.

    Args:
        la: Fitted; its ``H`` is a ``KronDecomposed``.
    """
    digest = hashlib.sha256()
    for block in la.H.eigenvalues:
        for eigenvalues in block:
            digest.update(_bytes(eigenvalues))
    return digest.hexdigest()[:16]


def data_hash(loader: Iterable[Any]) -> str:
    """Number of data and digest of the first, where the loader has a map-style dataset.

    Example:
        >>> data_hash([(torch.zeros(2, 1), torch.zeros(2))])  # nothing to tell without reading it
        'list'
    """
    dataset = getattr(loader, "dataset", None)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return type(loader).__name__
    digest = hashlib.sha256()
    first = dataset[0] if len(dataset) else ()
    for part in first.values() if isinstance(first, Mapping) else first:
        digest.update(_bytes(part) if isinstance(part, Tensor) else str(part).encode())
    return f"{len(dataset)} data, {digest.hexdigest()[:16]}"


def _bytes(tensor: Tensor) -> bytes:
    """A tensor's content, of any dtype."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
