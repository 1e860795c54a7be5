"""The loss as a function of the network's outputs: its sum, its Hessian, and roots of the Hessian.

Classification is the softmax cross-entropy, with the Hessian ``diag(p) - p p^T`` per datum (also
for soft labels); regression is half the squared error, with the Hessian ``I``; Bernoulli is the
binary cross-entropy of each output (:mod:`laplace_debias.network.bernoulli`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from laplace_debias.network.bernoulli import bernoulli_losses, bernoulli_vectors, label_variances

__all__ = [
    "FISHERS",
    "Fisher",
    "Likelihood",
    "SAMPLERS",
    "Sampler",
    "backward_vectors",
    "curvature_scores",
    "likelihood_name",
    "loss_sum",
    "mean_loss_hessian",
    "sampled_hessian_root",
    "softmax_hessian_root",
]

Likelihood = Literal["classification", "regression", "bernoulli"]
"""The likelihoods whose curvature this library knows."""
Fisher = Literal["exact", "mc", "empirical"]
"""Which backward vectors make the output factors, see :func:`backward_vectors`."""
FISHERS: tuple[Fisher, ...] = ("exact", "mc", "empirical")
Sampler = Literal["trace", "label"]
"""How a random backward vector is drawn, see :func:`sampled_hessian_root`."""
SAMPLERS: tuple[Sampler, ...] = ("trace", "label")


def likelihood_name(likelihood: Any) -> Likelihood:
    """The likelihood of the training data, from a string or laplace-torch's enum.

    Args:
        likelihood: ``"classification"``, ``"regression"``, ``"bernoulli"``,
            ``"reward_modeling"``, or its enum.

    Returns:
        The name. A reward model learns which of two inputs is preferred: a classification.

    Raises:
        ValueError: For any other likelihood.

    Example:
        >>> likelihood_name("regression")
        'regression'
        >>> likelihood_name("reward_modeling")
        'classification'
    """
    names: dict[Any, Likelihood] = {
        "classification": "classification",
        "regression": "regression",
        "bernoulli": "bernoulli",
        "reward_modeling": "classification",
    }
    name = getattr(likelihood, "value", likelihood)
    if name not in names:
        raise ValueError(
            "Expected likelihood 'classification', 'regression', 'bernoulli' or 'reward_modeling', "
            f"got {likelihood!r}. Remedy: use `debias=False` for other likelihoods."
        )
    return names[name]


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


def mean_loss_hessian(outputs: Tensor, likelihood: str, weights: Tensor | None = None) -> Tensor:
    """Mean over data of the loss Hessian: B of a layer whose output is the network's output.

    In double precision: adding one number to all logits changes no loss, so the Hessian has a zero
    eigenvalue, but ``diag(p)`` and ``p p^T`` nearly cancel where the network is sure. Single
    precision would leave a curvature there that outweighs a small prior precision.

    Args:
        outputs: Network outputs ``[n, C]``.
        likelihood: ``"classification"`` or ``"regression"``.
        weights: Weight ``[n]`` of each datum; by default 1.

    Returns:
        ``mean_n w_n (diag(p_n) - p_n p_n^T)``, or for regression the mean weight times the
        identity; ``[C, C]``, in float64.

    Example:
        >>> mean_loss_hessian(torch.zeros(5, 2), "classification")
        tensor([[ 0.2500, -0.2500], [-0.2500,  0.2500]], dtype=torch.float64)
    """
    f = outputs.double()
    w = f.new_ones(len(f)) if weights is None else _checked_weights(weights, len(f)).to(f)
    if likelihood == "regression":
        return w.mean() * torch.eye(f.shape[1], dtype=f.dtype, device=f.device)
    if likelihood == "bernoulli":
        return torch.diag((label_variances(f) * w.unsqueeze(1)).mean(0))
    p = f.softmax(-1)
    weighted = p * w.unsqueeze(1)
    return torch.diag(weighted.mean(0)) - weighted.T @ p / len(p)


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
        root = root * _checked_weights(weights, len(f)).to(root).sqrt()[:, None, None]
    return root.permute(2, 0, 1).to(f.dtype)


def _checked_weights(weights: Tensor, n: int) -> Tensor:
    """One finite, non-negative weight per datum."""
    if weights.shape != (n,):
        raise ValueError(
            f"Expected weights of shape [{n}], got {list(weights.shape)}. Remedy: pass one per "
            "datum."
        )
    if not bool(torch.isfinite(weights).all() & (weights >= 0).all()):
        raise ValueError(
            "Expected finite, non-negative weights, got a negative or non-finite one. Remedy: "
            "check the scores they were made from."
        )
    return weights


def loss_sum(f: Tensor, y: Tensor, likelihood: str, weights: Tensor | None = None) -> Tensor:
    """Weighted sum over data of the cross-entropy or half the squared error.

    Args:
        f: Network outputs ``[n, C]``.
        y: Targets, ``[n]`` class indices, ``[n, C]`` class probabilities or ``[n, C]`` values.
        likelihood: ``"classification"`` or ``"regression"``.
        weights: Weight ``[n]`` of each datum; by default 1.

    Returns:
        A scalar, in at least single precision.

    Example:
        >>> loss_sum(torch.tensor([[2.0]]), torch.tensor([[5.0]]), "regression")
        tensor(4.5000)
    """
    f = f.to(torch.promote_types(f.dtype, torch.float32))
    if likelihood == "classification":
        target = y.to(f) if y.is_floating_point() else y.long()
        losses = F.cross_entropy(f, target, reduction="none")
    elif likelihood == "bernoulli":
        losses = bernoulli_losses(f, y)
    else:
        losses = 0.5 * (f - y).square().sum(1)
    return losses.sum() if weights is None else losses @ weights.to(losses)


def curvature_scores(outputs: Tensor, likelihood: str = "classification") -> Tensor:
    """Trace of each datum's output Hessian.

    Args:
        outputs: Network outputs ``[n, C]``.
        likelihood: ``"classification"`` gives ``1 - sum_c p_c^2``; ``"regression"``, where the
            Hessian is constant, gives the same score to all data, so that they are drawn uniformly.

    Returns:
        Scores ``[n]`` in float64.

    Raises:
        ValueError: For an unknown likelihood.

    Example:
        >>> curvature_scores(torch.tensor([[0.0, 0.0], [9.0, -9.0]])).round(decimals=4)
        tensor([0.5000, 0.0000], dtype=torch.float64)
    """
    if likelihood == "regression":
        return torch.ones(len(outputs), dtype=torch.float64, device=outputs.device)
    if likelihood == "bernoulli":
        return label_variances(outputs.double()).sum(-1)
    if likelihood != "classification":
        raise ValueError(
            "Expected likelihood 'classification', 'regression' or 'bernoulli', got "
            f"{likelihood!r}. Remedy: pass one of them, or scores of your own for others."
        )
    log_p = outputs.double().log_softmax(-1)
    return -(log_p.exp() * log_p.expm1()).sum(-1)  # sum_c p_c (1 - p_c) without cancellation
