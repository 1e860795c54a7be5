r"""The loss as a function of the network's outputs: its sum, its Hessian, and the trace of that.

Classification is the softmax cross-entropy, with the Hessian ``diag(p) - p p^T`` per datum (also
for soft labels); regression is half the squared error, with the Hessian ``I``. Bernoulli is the
binary cross-entropy of each output, one logit or many labels, :math:`\log(1 + e^f) - y f` for a
target y in [0, 1], whose second derivative is :math:`p (1 - p)` with :math:`p = \sigma(f)`,
whatever y: outputs do not mix. Roots of the Hessian are in :mod:`laplace_debias.network.vectors`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "Likelihood",
    "bernoulli_losses",
    "binary_labels",
    "checked_weights",
    "curvature_scores",
    "label_variances",
    "likelihood_name",
    "looks_normalised",
    "loss_sum",
    "mean_loss_hessian",
]

Likelihood = Literal["classification", "regression", "bernoulli"]
"""The likelihoods whose curvature this library knows."""


def looks_normalised(outputs: Tensor) -> bool:
    """Whether outputs are probabilities already, so that a softmax of them is one too many.

    Args:
        outputs: ``[n, C]``.

    Example:
        >>> looks_normalised(torch.tensor([[0.25, 0.75]])), looks_normalised(torch.eye(2) - 1)
        (True, False)
    """
    if outputs.ndim != 2 or outputs.shape[-1] < 2:
        return False
    off = (outputs.sum(-1) - 1).abs().max()
    return bool((outputs.min() >= 0) & (off < 10 * torch.finfo(outputs.dtype).eps ** 0.75))


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
    w = f.new_ones(len(f)) if weights is None else checked_weights(weights, len(f)).to(f)
    if likelihood == "regression":
        return w.mean() * torch.eye(f.shape[1], dtype=f.dtype, device=f.device)
    if likelihood == "bernoulli":
        return torch.diag((label_variances(f) * w.unsqueeze(1)).mean(0))
    p = f.softmax(-1)
    weighted = p * w.unsqueeze(1)
    return torch.diag(weighted.mean(0)) - weighted.T @ p / len(p)


def checked_weights(weights: Tensor, n: int) -> Tensor:
    """One finite, non-negative weight per datum.

    Args:
        weights: ``[n]``.
        n: Number of data.

    Returns:
        The weights.

    Raises:
        ValueError: If they are none.

    Example:
        >>> checked_weights(torch.ones(2), 2)
        tensor([1., 1.])
    """
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
