"""Networks inside wrappers for several processes: understood, or refused by name."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["unwrapped"]


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside a ``DistributedDataParallel``; any other as it is.

    Args:
        model: A network whose parameters every process has in full.

    Returns:
        The network whose parameters have their plain names.

    Raises:
        ValueError: If parameters are spread over processes (FSDP, DTensor): no process could
            compute the factors of a layer.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> unwrapped(net) is net
        True
    """
    if isinstance(model, DistributedDataParallel):
        inner: nn.Module = model.module
        return unwrapped(inner)
    # by name: the classes live in modules that are slow to import
    kinds = [type(m) for m in model.modules()] + [type(p) for p in model.parameters()]
    spread = {"FullyShardedDataParallel", "FSDPModule", "DTensor"}
    found = sorted({base.__name__ for kind in kinds for base in kind.__mro__} & spread)
    if found:
        raise ValueError(
            "Expected a network whose parameters every process has in full, got one whose "
            f"parameters are spread over processes ({', '.join(found)}). Remedy: fit it before "
            "sharding, or load its full state dict into the plain network (it needs no gradients "
            "or optimiser state here)."
        )
    return model
