r"""Independent yes-or-no outputs: the Bernoulli likelihood of one logit, or of many labels.

The loss of a logit f and a target y in [0, 1] is the binary cross-entropy
:math:`\log(1 + e^f) - y f`, whose second derivative is :math:`p (1 - p)` with
:math:`p = \sigma(f)`, whatever y. Outputs do not mix: the Hessian of a datum is diagonal.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["bernoulli_losses", "bernoulli_vectors", "binary_labels", "label_variances"]


def label_variances(logits: Tensor) -> Tensor:
    """Variances ``p (1 - p)`` of the labels, without cancellation where the network is sure.

    Args:
        logits: Network outputs ``[..., C]``.

    Returns:
        In the shape of the logits.

    Example:
        >>> label_variances(torch.zeros(2))
        tensor([0.2500, 0.2500])
    """
    return torch.sigmoid(logits) * torch.sigmoid(-logits)


def bernoulli_vectors(
    logits: Tensor, generator: torch.Generator | None = None, sampler: str = "trace"
) -> Tensor:
    r"""Random vectors whose second moment is the loss Hessian, :math:`\mathrm{diag}(p (1 - p))`.

    ``"trace"`` gives each output a random sign and the length of its own curvature, ``"label"``
    draws labels and takes :math:`y - p`, which a sure network seldom draws to any purpose.

    Args:
        logits: Network outputs ``[n, C]``.
        generator: Source of randomness; the global one by default.
        sampler: ``"trace"`` or ``"label"``.

    Returns:
        Vectors ``[n, C]``.

    Example:
        >>> bernoulli_vectors(torch.zeros(1, 2)).abs()
        tensor([[0.5000, 0.5000]])
    """
    if sampler == "label":
        p = torch.sigmoid(logits)
        return torch.bernoulli(p, generator=generator) - p
    signs = torch.randint(2, logits.shape, generator=generator, device=logits.device)
    return (2 * signs - 1).to(logits) * label_variances(logits).sqrt()


def bernoulli_losses(logits: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy of each datum, summed over its outputs.

    Args:
        logits: Network outputs ``[n, ..., C]``.
        y: Targets in [0, 1], in the same shape.

    Returns:
        ``[n]``.

    Example:
        >>> bernoulli_losses(torch.zeros(1, 2), torch.ones(1, 2))
        tensor([1.3863])
    """
    losses = F.binary_cross_entropy_with_logits(logits, y.to(logits), reduction="none")
    return losses.flatten(1).sum(1)


def binary_labels(y: Tensor) -> Tensor:
    """Targets as labels of two classes, as metrics of classes want them.

    Args:
        y: Targets in [0, 1].

    Returns:
        Class indices in the same shape if all are 0 or 1; else probabilities of no and yes, with a
        last dimension of two.

    Example:
        >>> binary_labels(torch.tensor([[0.0, 1.0]])), binary_labels(torch.tensor([0.25]))
        (tensor([[0, 1]]), tensor([[0.7500, 0.2500]]))
    """
    if bool(((y == 0) | (y == 1)).all()):
        return y.long()
    return torch.stack([1 - y, y], dim=-1)
