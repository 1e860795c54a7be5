"""What the processes of a fit settle before it: the same weights, the same last layer, one seed."""

from __future__ import annotations

import torch
from torch import nn

from laplace_debias.data.processes import processes, total
from laplace_debias.kfac.counts import FitCost
from laplace_debias.storage.fingerprints import model_hash

__all__ = ["agreed_name", "agreed_seed", "check_same_model", "cost_of_all"]


def check_same_model(model: nn.Module) -> None:
    """Raise unless every process has the same network, weights and buffers included.

    Args:
        model: That of this process.

    Raises:
        ValueError: If they differ.

    Example:
        >>> check_same_model(nn.Linear(1, 1))
    """
    group = processes()
    if group is None or group.size == 1:
        return
    hashes = group.gather(model_hash(model))
    if len(set(hashes)) > 1:
        raise ValueError(
            "Expected the same network with the same weights in every process, got these digests "
            f"by rank: {hashes}. Remedy: load one file of weights everywhere, or wrap the network "
            "into `DistributedDataParallel`, which spreads those of rank 0."
        )


def agreed_seed(generator: torch.Generator | None) -> int | None:
    """A seed for draws that are keyed by the datum, drawn by rank 0.

    Args:
        generator: Where it comes from; the global one by default. It is advanced in all processes.

    Returns:
        The same number in every process, or ``None`` without a process group.

    Example:
        >>> agreed_seed(None) is None
        True
    """
    group = processes()
    if group is None:
        return None
    device = None if generator is None else generator.device
    drawn = torch.randint(2**62, (), generator=generator, device=device)
    return int(group.gather(int(drawn))[0])


def agreed_name(name: str | None) -> str | None:
    """What processes with data have found out, also for those without.

    Args:
        name: What this one has found, or ``None``.

    Returns:
        The first that was found, by rank.

    Example:
        >>> agreed_name("fc")
        'fc'
    """
    group = processes()
    if group is None:
        return name
    return next((found for found in group.gather(name) if found is not None), None)


def cost_of_all(cost: FitCost) -> FitCost:
    """Passes of all processes; seconds are those of this one.

    Args:
        cost: What this process has spent.

    Example:
        >>> cost_of_all(FitCost(forward=3)).forward
        3
    """
    return FitCost(total(cost.forward), total(cost.backward), cost.seconds)
