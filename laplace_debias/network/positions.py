r"""One categorical per token or pixel: outputs with positions, and backward vectors for them.

A network that labels every position returns ``[n, T, C]`` (tokens) or ``[n, C, *positions]`` with
two or more dimensions of positions (pixels), as ``transformers`` and convolutional networks do. In
here classes are always last, ``[n, *positions, C]``. The loss of a datum is the sum over the
positions that count, so the Hessian of its outputs is block diagonal,

.. math:: \nabla^2 \ell_n = \mathrm{diag}_p\left(w_{np} (\mathrm{diag}(\pi_{np})
          - \pi_{np} \pi_{np}^\top)\right),

with class probabilities :math:`\pi_{np}` and weights :math:`w_{np}`, zero where a position does not
count. Exact vectors are the columns of a root of each block: :math:`C - 1` for every position. One
random vector serves all positions of a datum if those of different positions are uncorrelated,
:math:`E[v_{np} v_{nq}^\top] = 0`. The sampler by the trace does not have mean zero, so each
position gets a random sign; without, what positions have in common would be counted :math:`T^2`
times instead of T times.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from laplace_debias.network.loss import Fisher, Sampler, backward_vectors

__all__ = [
    "as_outputs",
    "check_positions",
    "classes_last",
    "flat_outputs",
    "n_exact_vectors",
    "position_vectors",
    "weights_of_positions",
]


def classes_last(f: Tensor) -> Tensor:
    """Outputs with the classes in their last dimension.

    Args:
        f: Outputs of a network: ``[n, C]``, ``[n, T, C]`` or ``[n, C, *positions]``.

    Returns:
        A view ``[n, *positions, C]``.

    Example:
        >>> classes_last(torch.zeros(2, 3, 8, 8)).shape, classes_last(torch.zeros(2, 5, 3)).shape
        (torch.Size([2, 8, 8, 3]), torch.Size([2, 5, 3]))
    """
    return f.movedim(1, -1) if f.ndim > 3 else f


def as_outputs(values: Tensor, leading: int = 0) -> Tensor:
    """Undo :func:`classes_last`.

    Args:
        values: ``[n, *positions, C]``, with further dimensions before.
        leading: How many.

    Returns:
        A view in the shape of the network's outputs.

    Example:
        >>> as_outputs(torch.zeros(2, 8, 8, 3)).shape
        torch.Size([2, 3, 8, 8])
    """
    return values.movedim(-1, leading + 1) if values.ndim - leading > 3 else values


def flat_outputs(f: Tensor) -> Tensor:
    """All outputs of each datum in one row, the classes of a position next to each other.

    Args:
        f: Outputs of a network.

    Returns:
        ``[n, positions * C]``; outputs ``[n, C]`` as they are.

    Example:
        >>> flat_outputs(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 192])
    """
    return f if f.ndim <= 2 else classes_last(f).flatten(1)


def check_positions(f: Tensor, likelihood: str, fisher: str = "mc") -> None:
    """Raise if outputs have positions where there cannot be any.

    Args:
        f: Outputs, with classes last or not.
        likelihood: Of the outputs.
        fisher: Which backward vectors are asked for.

    Raises:
        ValueError: For another likelihood than a classification, or the empirical Fisher.

    Example:
        >>> check_positions(torch.zeros(2, 5, 3), "classification")
    """
    if f.ndim <= 2:
        return
    if likelihood != "classification":
        raise ValueError(
            f"Expected outputs of shape [n, C] with likelihood={likelihood!r}, got "
            f"{list(f.shape)}: positions (tokens, pixels) have classes only. Remedy: return one "
            "row of outputs per datum, `output=lambda f: f.flatten(1)`, with targets to match, "
            "also for a single datum: name the dimension of a `.squeeze()`."
        )
    if fisher == "empirical":
        raise ValueError(
            "Expected fisher='exact' or 'mc' for one categorical per position, got 'empirical'. "
            "Remedy: leave `fisher` out, and `backend`."
        )


def n_exact_vectors(f: Tensor, weights: Tensor | None = None) -> int:
    """How many exact backward vectors the classes of all positions of a datum have.

    Args:
        f: Outputs ``[n, *positions, C]``.
        weights: Weights ``[n, *positions]``; positions that count for no datum have no vectors.

    Example:
        >>> n_exact_vectors(torch.zeros(2, 5, 3))
        10
        >>> n_exact_vectors(torch.zeros(1, 2, 3), torch.tensor([[1.0, 0.0]]))
        2
    """
    n = prod(f.shape[1:-1]) if weights is None else int(weights.bool().any(0).sum())
    return n * (f.shape[-1] - 1)


def weights_of_positions(f: Tensor, weights: Tensor | None) -> Tensor | None:
    """Weights of data or positions as one number for each position.

    Args:
        f: Outputs ``[n, *positions, C]``.
        weights: ``[n]``, ``[n, *positions]`` or ``None``.

    Returns:
        ``[n, *positions]``, or ``None``.

    Raises:
        ValueError: If there is neither one for each datum nor for each position.

    Example:
        >>> weights_of_positions(torch.zeros(1, 2, 3), torch.tensor([4.0]))
        tensor([[4., 4.]])
    """
    if weights is None or weights.shape == f.shape[:-1]:
        return weights
    if weights.shape != f.shape[:1]:
        raise ValueError(
            f"Expected weights of shape [{len(f)}], got {list(weights.shape)}. Remedy: pass one "
            "per datum, or one per position."
        )
    return weights.reshape(-1, *[1] * (f.ndim - 2)).expand(f.shape[:-1])


def position_vectors(
    f: Tensor,
    fisher: Fisher = "mc",
    generator: torch.Generator | None = None,
    weights: Tensor | None = None,
    sampler: Sampler = "trace",
) -> Iterator[Tensor]:
    r"""Backward vectors of one categorical per position, one after the other.

    Args:
        f: Logits ``[n, *positions, C]``, detached.
        fisher: ``"exact"``: for each position the C - 1 columns of its root, zero elsewhere;
            positions that count for no datum are left out. ``"mc"``: one random vector.
        generator: Source of randomness for ``"mc"``.
        weights: Non-negative weights ``[n, *positions]``.
        sampler: See :func:`laplace_debias.network.loss.sampled_hessian_root`.

    Yields:
        Vectors ``[n, *positions, C]`` in the type of ``f``.

    Example:
        >>> len(list(position_vectors(torch.zeros(2, 5, 3), "exact")))
        10
        >>> (v,) = position_vectors(torch.zeros(2, 5, 3), "mc")
        >>> v.square().sum(-1)[0]  # the trace of each position's Hessian
        tensor([0.6667, 0.6667, 0.6667, 0.6667, 0.6667])
    """
    C = f.shape[-1]
    flat_weights = None if weights is None else weights.reshape(-1)
    if fisher == "mc":
        rows = f.reshape(-1, C)
        (v,) = backward_vectors(
            rows, None, "classification", "mc", generator, flat_weights, sampler
        )
        signs = torch.randint(2, (len(v), 1), generator=generator, device=v.device)
        yield (v * (2 * signs - 1).to(v)).reshape(f.shape)
        return
    rows = f.reshape(len(f), -1, C)  # [n, T, C]
    each = None if weights is None else weights.reshape(len(f), -1)
    for t in range(rows.shape[1]):
        if each is not None and not bool(each[:, t].any()):
            continue
        own = None if each is None else each[:, t]
        for v in backward_vectors(rows[:, t], None, "classification", "exact", weights=own):
            whole = torch.zeros_like(rows)
            whole[:, t] = v
            yield whole.reshape(f.shape)
