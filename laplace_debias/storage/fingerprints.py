"""What the numbers of a run depend on: model, data, loss and options, each as a short digest.

Finished work is only used again where all of it is the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.data.inputs import tensor_bytes
from laplace_debias.storage.data_digest import data_hash

__all__ = ["fingerprint", "loss_hash", "model_hash", "plain_options", "tensors_hash"]


def fingerprint(
    model: nn.Module | Mapping[str, nn.Module],
    data: Mapping[str, Iterable[Any]],
    *,
    loss: nn.Module | None = None,
    options: Mapping[str, Any] | None = None,
    data_id: str | None = None,
) -> dict[str, Any]:
    """Describe what decides the numbers of a run, for :class:`~laplace_debias.storage.CellStore`.

    Args:
        model: The network, or several by name: architecture, parameters, buffers, and which
            parameters are trainable.
        data: Loaders by name, or whatever :func:`~laplace_debias.storage.data_digest.data_hash`
            takes. All of them are read, each object once.
        loss: The loss, where the likelihood does not say it.
        options: Everything else; see :func:`plain_options`.
        data_id: Stands for the data, which are then not read.

    Returns:
        A JSON-compatible mapping with the keys ``model``, ``data``, ``loss`` and ``options``.

    Raises:
        ValueError: If data differ from reading to reading and there is no ``data_id``.

    Example:
        >>> net, data = nn.Linear(1, 1), {"train": (torch.zeros(1, 1), torch.zeros(1))}
        >>> before = fingerprint(net, data, loss=nn.MSELoss(), options={"k": 1})
        >>> net.bias.requires_grad_(False).requires_grad
        False
        >>> after = fingerprint(net, data, loss=nn.MSELoss(), options={"k": 1})
        >>> [key for key in before if before[key] != after[key]]
        ['model']
    """
    digests: dict[int, str] = {}  # a loader may serve several purposes
    if data_id is None:
        for name, one in data.items():
            if id(one) not in digests:
                digests[id(one)] = data_hash(one, name)
    return {
        "model": (
            {name: model_hash(one) for name, one in model.items()}
            if isinstance(model, Mapping)
            else model_hash(model)
        ),
        "data": (
            {"id": data_id}
            if data_id is not None
            else {name: digests[id(one)] for name, one in data.items()}
        ),
        "loss": None if loss is None else loss_hash(loss),
        "options": plain_options(options or {}),
    }


def model_hash(model: nn.Module) -> str:
    """Digest of a model's architecture, parameters and buffers, and of what is trainable.

    Args:
        model: The network; its ``repr`` stands for the architecture.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> before = model_hash(net)
        >>> net.bias.data += 1
        >>> before == model_hash(net)
        False
    """
    digest = hashlib.sha256(_without_addresses(repr(model)).encode())
    for name, p in model.named_parameters():
        digest.update(f"{name} {p.requires_grad}".encode())
        _update(digest, p)
    for name, buffer in model.named_buffers():
        digest.update(name.encode())
        _update(digest, buffer)
    return digest.hexdigest()[:16]


def loss_hash(loss: nn.Module) -> str:
    """Name of a loss, and digest of its settings (such as label smoothing) and tensors.

    Args:
        loss: A loss module. Its ``repr`` need not tell its settings; its plain attributes do.

    Example:
        >>> loss_hash(nn.CrossEntropyLoss()) == loss_hash(nn.CrossEntropyLoss(label_smoothing=0.1))
        False
    """
    digest = hashlib.sha256(_name(type(loss)).encode())
    for name, module in loss.named_modules():
        settings = {
            key: value
            for key, value in sorted(vars(module).items())
            if not key.startswith("_") and key != "training"
        }
        digest.update(f"{name} {_name(type(module))} {plain_options(settings)}".encode())
    for name, tensor in (*loss.named_parameters(), *loss.named_buffers()):
        digest.update(name.encode())
        _update(digest, tensor)
    return f"{type(loss).__name__} {digest.hexdigest()[:16]}"


def tensors_hash(tensors: Iterable[Tensor]) -> str:
    """Digest of some tensors, in their order: types, shapes and content.

    Example:
        >>> tensors_hash([torch.zeros(2)]) == tensors_hash([torch.zeros(2, 1)])
        False
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        _update(digest, tensor)
    return digest.hexdigest()[:16]


def plain_options(value: Any) -> Any:
    """Return options in the types of JSON, told apart by what they are, not where they lie.

    Args:
        value: An option, or a mapping or sequence of options. Numbers and text stay; tensors,
            generators and modules become digests, classes and functions their names.

    Example:
        >>> plain_options({"backend": nn.Linear, "scores": (1.0, None)})
        {'backend': 'torch.nn.modules.linear.Linear', 'scores': [1.0, None]}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return f"tensor {tensors_hash([value])}"
    if isinstance(value, torch.Generator):
        return f"generator {tensors_hash([value.get_state()])}"
    if isinstance(value, nn.Module):
        return f"{_name(type(value))} {model_hash(value)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain_options(one) for key, one in sorted(value.items(), key=str)}
    if isinstance(value, (list, tuple, range, set, frozenset)):
        members = [plain_options(one) for one in value]
        return sorted(members, key=str) if isinstance(value, (set, frozenset)) else members
    if hasattr(value, "__qualname__"):
        return _name(value)
    return _without_addresses(repr(value))


def _name(value: Any) -> str:
    """Full name of a class or function."""
    return f"{value.__module__}.{value.__qualname__}"


def _without_addresses(text: str) -> str:
    """A ``repr`` as it is in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _update(digest: Any, tensor: Tensor) -> None:
    """Add a tensor's type, shape and content to a digest."""
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor_bytes(tensor))
