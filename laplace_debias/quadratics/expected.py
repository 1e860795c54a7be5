"""What a mini-batch's own rows foretell of its bias, layer by layer, in the words of the studies.

The studies of this room measure bias with a second mini-batch and all data, along directions of the
whole network. :mod:`laplace_debias.debias.expected_bias` foretells it from one mini-batch, for each
Kronecker factor; this module is the way there from a model, a loss and data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from laplace_debias.data.chunks import Chunk, partition
from laplace_debias.debias.expected_bias import ExpectedBias, expected_bias_of
from laplace_debias.kfac.engine import Engine

__all__ = ["expected_by_size", "likelihood_of"]

_LIKELIHOODS = {
    nn.CrossEntropyLoss: "classification",
    nn.MSELoss: "regression",
    nn.BCEWithLogitsLoss: "bernoulli",
}


def likelihood_of(loss: nn.Module) -> str:
    """The likelihood whose K-FAC belongs to a loss.

    Args:
        loss: ``CrossEntropyLoss``, ``MSELoss`` or ``BCEWithLogitsLoss``, without weights and label
            smoothing. Its scale does not matter: bias is a ratio.

    Raises:
        ValueError: For other losses.

    Example:
        >>> likelihood_of(nn.MSELoss())
        'regression'
    """
    name = _LIKELIHOODS.get(type(loss))
    weights = [getattr(loss, key, None) for key in ("weight", "pos_weight")]
    plain = all(w is None for w in weights) and not getattr(loss, "label_smoothing", 0.0)
    if name is None or not plain:
        raise ValueError(
            "Expected CrossEntropyLoss, MSELoss or BCEWithLogitsLoss without weights and label "
            f"smoothing, got {loss!r}. Remedy: `per_layer=False`, or "
            "`Laplace(...).expected_bias(batch)` with the options of your loss."
        )
    return name


def expected_by_size(
    model: nn.Module, loss: nn.Module, data: Chunk, batch_sizes: Sequence[int], seed: int = 0
) -> tuple[ExpectedBias, ...]:
    """The over-estimation to expect from one mini-batch of each size, before any second one.

    Args:
        model: The network. It is left as it was.
        loss: See :func:`likelihood_of`.
        data: All data ``(X, y)``, of which each mini-batch is a random part.
        batch_sizes: Their sizes, at least two data each.
        seed: Decides the mini-batches.

    Returns:
        One entry per batch size.

    Raises:
        ValueError: For other losses, for a mini-batch of one datum, and for layers that K-FAC
            cannot represent.

    Example:
        >>> X = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
        >>> small, large = expected_by_size(nn.Linear(2, 1), nn.MSELoss(), (X, X[:, :1]), (8, 64))
        >>> small.factors[1].overestimation > large.factors[1].overestimation > 1
        True
    """
    engine = Engine(model, likelihood_of(loss))
    found = []
    for size in batch_sizes:
        generator = torch.Generator().manual_seed(seed + 7919 * size)
        (batch,) = partition(data, size, generator=generator, n_batches=1)
        found.append(expected_bias_of(engine, [batch]))
    return tuple(found)
