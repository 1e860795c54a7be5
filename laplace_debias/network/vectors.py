r"""Backward vectors: every flavour of curvature is a choice of them.

A network that labels every position (token, pixel) has one categorical for each. The loss of a
datum is the sum over the positions that count, so the Hessian of its outputs is block diagonal,

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
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from laplace_debias.network.loss import checked_weights, label_variances

__all__ = [
    "FISHERS",
    "Fisher",
    "SAMPLERS",
    "Sampler",
    "backward_vectors",
    "bernoulli_vectors",
    "n_exact_vectors",
    "position_vectors",
    "sampled_hessian_root",
    "softmax_hessian_root",
]


Fisher = Literal["exact", "mc", "empirical"]
"""Which backward vectors make the output factors, see :func:`backward_vectors`."""

FISHERS: tuple[Fisher, ...] = ("exact", "mc", "empirical")

Sampler = Literal["trace", "label"]
"""How a random backward vector is drawn, see :func:`sampled_hessian_root`."""

SAMPLERS: tuple[Sampler, ...] = ("trace", "label")


def softmax_hessian_root(logits: Tensor) -> Tensor:
    r"""Root of the softmax Hessian with C - 1 columns, ``S S^T = diag(p) - p p^T``.

    With ``s = sqrt(p)`` the Hessian is ``diag(s) (I - s s^T) diag(s)``. The Householder reflection
    that maps the last unit vector to ``-s`` has in its other C - 1 columns an orthonormal basis of
    the complement of ``s``::

        S[i, j] = s_i (delta_ij - s_i s_j / (1 + s_C))   for i < C,      S[C, j] = -s_C s_j

    Args:
        logits: Network outputs ``[n, C]``.

    Returns:
        Roots ``[n, C, C - 1]``.

    Example:
        >>> p = torch.tensor([[0.2, 0.3, 0.5]])
        >>> S = softmax_hessian_root(p.log())
        >>> torch.allclose(S @ S.mT, torch.diag_embed(p) - p[:, :, None] * p[:, None])
        True
    """
    s = (0.5 * logits.log_softmax(-1)).exp()  # [n, C]
    head, last = s[:, :-1], s[:, -1:]
    top = torch.diag_embed(head) - (head.square() / (1 + last))[:, :, None] * head[:, None, :]
    return torch.cat([top, -(last * head)[:, None, :]], dim=1)


def sampled_hessian_root(
    outputs: Tensor,
    likelihood: str,
    generator: torch.Generator | None = None,
    sampler: Sampler = "trace",
) -> Tensor:
    r"""Random vectors whose second moment is the loss Hessian.

    Softmax: ``diag(p) - p p^T = sum_y p_y (e_y - p) (e_y - p)^T``. The textbook (and BackPACK's
    ``KFAC``) draws a label y by ``p_y`` and takes ``v = e_y - p``: a confident network nearly
    always draws its own prediction, a vector of nearly no length, and seldom one that carries
    curvature. A label drawn with probability proportional to ``p_y |e_y - p|^2`` makes all vectors
    equally long, so that rare labels add no variance::

        label    v = e_y - p                                              y ~ p_y
        trace    v = (e_y - p) / |e_y - p| * sqrt(1 - sum_c p_c^2)        y ~ p_y |e_y - p|^2

    Both have ``E[v v^T] = diag(p) - p p^T``. Half squared error: independent random signs
    (``"trace"``), or standard normal numbers, the gradient at a drawn target (``"label"``).

    Args:
        outputs: Network outputs ``[n, C]``.
        likelihood: ``"classification"`` or ``"regression"``.
        generator: Source of randomness; the global one by default.
        sampler: ``"trace"`` or ``"label"``.

    Returns:
        Vectors ``[n, C, 1]``.

    Example:
        >>> v = sampled_hessian_root(torch.tensor([[0.2, 0.3, 0.5]]).log(), "classification")
        >>> float(v.square().sum())  # 1 - 0.04 - 0.09 - 0.25
        0.62...
    """
    f = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if sampler not in SAMPLERS:
        raise ValueError(
            f"Expected `sampler` in {SAMPLERS}, got {sampler!r}. Remedy: pass one of them."
        )
    if likelihood == "bernoulli":
        return bernoulli_vectors(f, generator, sampler)[:, :, None]
    if likelihood == "regression":
        if sampler == "label":
            return torch.randn(f.shape, generator=generator, dtype=f.dtype, device=f.device)[
                ..., None
            ]
        signs = torch.randint(2, f.shape, generator=generator, device=f.device)
        return (2 * signs - 1).to(f)[:, :, None]
    p = f.double().softmax(-1)
    if sampler == "label":
        y = torch.multinomial(p, 1, generator=generator)
        return (torch.zeros_like(p).scatter_(1, y, 1.0) - p).to(f)[:, :, None]
    squares = p.square().sum(-1, keepdim=True)
    terms = p * (1 - 2 * p + squares).clamp(min=0)  # p_y |e_y - p|^2, with the sum 1 - squares
    # A datum without curvature may draw any label: its vector is zero.
    y = torch.multinomial(terms + torch.finfo(p.dtype).tiny, 1, generator=generator)
    v = torch.zeros_like(p).scatter_(1, y, 1.0) - p
    length = terms.sum(-1, keepdim=True).sqrt()
    return (F.normalize(v, dim=-1) * length).to(f)[:, :, None]


def backward_vectors(
    f: Tensor,
    y: Tensor | None,
    likelihood: str,
    fisher: Fisher = "exact",
    generator: torch.Generator | None = None,
    weights: Tensor | None = None,
    sampler: Sampler = "trace",
) -> Tensor:
    r"""Vectors V whose propagation back through the network gives the rows of every output factor.

    With :math:`v_{nk}` the k-th vector of datum n, an output factor is the sum over n and k of
    :math:`g g^\top`, :math:`g = (\partial f_n / \partial s_n)^\top v_{nk}`. Every flavour of
    curvature is a choice of V.

    Args:
        f: Network outputs ``[n, C]``, detached.
        y: Targets, needed for ``fisher="empirical"`` only.
        likelihood: ``"classification"`` or ``"regression"``.
        fisher: ``"exact"``: the columns of a root of the loss Hessian, C - 1 for the softmax and C
            for regression. ``"mc"``: one random vector with that second moment.
            ``"empirical"``: the gradient of the loss, at laplace-torch's scale.
        generator: Source of randomness for ``fisher="mc"``.
        weights: Non-negative weight ``[n]`` of each datum, whose root multiplies its vectors.
        sampler: How ``fisher="mc"`` draws, see :func:`sampled_hessian_root`.

    Returns:
        V, ``[k, n, C]``, in the type of ``f``.

    Raises:
        ValueError: If ``fisher`` is unknown, needs targets that are missing, or weights do not fit.

    Example:
        >>> backward_vectors(torch.zeros(4, 3), None, "classification").shape
        torch.Size([2, 4, 3])
    """
    if fisher not in FISHERS:
        raise ValueError(
            f"Expected `fisher` in {FISHERS}, got {fisher!r}. Remedy: pass one of them."
        )
    wide = f.to(torch.promote_types(f.dtype, torch.float32))
    if fisher == "mc":
        root = sampled_hessian_root(wide, likelihood, generator, sampler)
    elif fisher == "exact":
        if likelihood == "classification":
            root = softmax_hessian_root(wide)
        elif likelihood == "bernoulli":
            root = torch.diag_embed(label_variances(wide).sqrt())
        else:
            root = torch.eye(f.shape[1], dtype=wide.dtype, device=f.device).expand(len(f), -1, -1)
    elif y is None:
        raise ValueError("Expected targets for the empirical Fisher, got None. Remedy: pass `y`.")
    elif likelihood == "classification":
        target = y.to(wide) if y.is_floating_point() else F.one_hot(y.long(), f.shape[1])
        root = (wide.softmax(-1) - target)[:, :, None]
    elif likelihood == "bernoulli":
        root = (torch.sigmoid(wide) - y.to(wide))[:, :, None]
    else:
        root = (2**0.5 * (wide - y))[:, :, None]  # laplace-torch: half of (2 r) (2 r)^T
    if weights is not None:
        root = root * checked_weights(weights, len(f)).to(root).sqrt()[:, None, None]
    return root.permute(2, 0, 1).to(f.dtype)


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
        sampler: See :func:`laplace_debias.network.vectors.sampled_hessian_root`.

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
