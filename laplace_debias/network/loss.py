"""The loss as a function of the network's outputs: its sum, its Hessian, and roots of the Hessian.

Classification is the softmax cross-entropy, with the Hessian `diag(p) - p p^T` per datum.
Regression is half the squared error, with the Hessian `I`.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from laplace_debias.kfac.grams import accumulation_dtype

Likelihood = Literal["classification", "regression"]


def likelihood_of(value: str) -> Likelihood:
    """Turn laplace-torch's enum, or a string, into the likelihood's name.

    Args:
        value: laplace-torch's ``Likelihood``, or its value.

    Returns:
        ``"classification"`` or ``"regression"``.

    Raises:
        ValueError: For any other.

    Example:
        >>> from laplace.utils.enums import Likelihood as Upstream
        >>> likelihood_of(Upstream.REGRESSION)
        'regression'
    """
    name = getattr(value, "value", value)
    if name not in ("classification", "regression"):
        raise ValueError(
            f"Expected the likelihood 'classification' or 'regression', got {name!r}. Remedy: "
            "pass one of them; other likelihoods are laplace-torch's alone."
        )
    return cast(Likelihood, name)


def softmax_hessian_root(logits: Tensor) -> Tensor:
    r"""Root of the softmax Hessian with C - 1 columns, `S S^T = diag(p) - p p^T`.

    With `s = sqrt(p)` the Hessian is `diag(s) (I - s s^T) diag(s)`. The Householder reflection
    that maps the last unit vector to `-s` has in its other C - 1 columns an orthonormal basis of
    the complement of `s`::

        S[i, j] = s_i (delta_ij - s_i s_j / (1 + s_C))   for i < C,      S[C, j] = -s_C s_j

    Args:
        logits: Network outputs `[n, C]`.

    Returns:
        Roots `[n, C, C - 1]`.

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
    outputs: Tensor, likelihood: str, generator: torch.Generator | None = None
) -> Tensor:
    r"""Random vectors whose second moment is the loss Hessian, all of length `sqrt(trace)`.

    Softmax: `diag(p) - p p^T = sum_y p_y (e_y - p) (e_y - p)^T`. A label y drawn with probability
    proportional to `p_y |e_y - p|^2`, not `p_y`, makes all terms equally long, so that rare labels
    add no variance::

        v = (e_y - p) / |e_y - p| * sqrt(1 - sum_c p_c^2)           E[v v^T] = diag(p) - p p^T

    Half squared error: independent random signs.

    Args:
        outputs: Network outputs `[n, C]`.
        likelihood: `"classification"` or `"regression"`.
        generator: Source of randomness; the global one by default.

    Returns:
        Vectors `[n, C, 1]`.

    Example:
        >>> v = sampled_hessian_root(torch.tensor([[0.2, 0.3, 0.5]]).log(), "classification")
        >>> float(v.square().sum())  # 1 - 0.04 - 0.09 - 0.25
        0.62...
    """
    f = outputs.to(accumulation_dtype(outputs.dtype))
    if likelihood == "regression":
        signs = torch.randint(2, f.shape, generator=generator, device=f.device)
        return (2 * signs - 1).to(f)[:, :, None]
    p = f.double().softmax(-1)
    squares = p.square().sum(-1, keepdim=True)
    terms = p * (1 - 2 * p + squares).clamp(min=0)  # p_y |e_y - p|^2, with the sum 1 - squares
    # A datum without curvature may draw any label: its vector is zero.
    y = torch.multinomial(terms + torch.finfo(p.dtype).tiny, 1, generator=generator)
    v = torch.zeros_like(p).scatter_(1, y, 1.0) - p
    length = terms.sum(-1, keepdim=True).sqrt()
    return (F.normalize(v, dim=-1) * length).to(f)[:, :, None]


def mean_loss_hessian(outputs: Tensor, likelihood: str) -> Tensor:
    """Mean over data of the loss Hessian: B of a layer whose output is the network's output.

    In double precision: adding one number to all logits changes no loss, so the Hessian has a zero
    eigenvalue, but `diag(p)` and `p p^T` nearly cancel where the network is sure. Single precision
    would leave a curvature there that outweighs a small prior precision.

    Args:
        outputs: Network outputs `[n, C]`.
        likelihood: `"classification"` or `"regression"`.

    Returns:
        `mean_n diag(p_n) - p_n p_n^T`, or the identity; `[C, C]`, in float64.

    Example:
        >>> mean_loss_hessian(torch.zeros(5, 2), "classification")
        tensor([[ 0.2500, -0.2500], [-0.2500,  0.2500]], dtype=torch.float64)
    """
    f = outputs.double()
    if likelihood == "regression":
        return torch.eye(f.shape[1], dtype=f.dtype, device=f.device)
    p = f.softmax(-1)
    return torch.diag(p.mean(0)) - p.T @ p / len(p)


def loss_root(
    f: Tensor,
    y: Tensor | None,
    likelihood: str,
    fisher: str,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Vectors whose propagation back through the network gives the rows of B.

    Args:
        f: Network outputs `[n, C]`.
        y: Targets, needed for `fisher="ef"` only.
        likelihood: `"classification"` or `"regression"`.
        fisher: `"ggn"`: a root of the loss Hessian. `"mc"`: a random vector with that second
            moment. `"ef"`: the gradient of the loss, at laplace-torch's scale.
        generator: Source of randomness for `fisher="mc"`.

    Returns:
        Vectors `[n, C, columns]`, in at least single precision.

    Raises:
        ValueError: If `fisher="ef"` comes without targets.

    Example:
        >>> loss_root(torch.zeros(4, 3), None, "classification", "ggn").shape
        torch.Size([4, 3, 2])
    """
    f = f.to(accumulation_dtype(f.dtype))
    if fisher == "mc":
        return sampled_hessian_root(f, likelihood, generator)
    if fisher == "ggn":
        if likelihood == "classification":
            return softmax_hessian_root(f)
        return torch.eye(f.shape[1], dtype=f.dtype, device=f.device).expand(len(f), -1, -1)
    if y is None:
        raise ValueError("Expected targets for fisher='ef', got None; pass `y`.")
    if likelihood == "classification":
        return (f.softmax(-1) - F.one_hot(y, f.shape[1]))[:, :, None]
    return (2**0.5 * (f - y))[:, :, None]  # laplace-torch: half of (2 r) (2 r)^T


def loss_sum(f: Tensor, y: Tensor, likelihood: str, weights: Tensor | None = None) -> Tensor:
    """Weighted sum over data of the cross-entropy or half the squared error.

    Args:
        f: Network outputs `[n, C]`.
        y: Targets, `[n]` class indices or `[n, C]` values.
        likelihood: `"classification"` or `"regression"`.
        weights: Weight `[n]` of each datum; by default 1.

    Returns:
        A scalar, in at least single precision.

    Example:
        >>> loss_sum(torch.tensor([[2.0]]), torch.tensor([[5.0]]), "regression")
        tensor(4.5000)
    """
    f = f.to(accumulation_dtype(f.dtype))
    if likelihood == "classification":
        losses = F.cross_entropy(f, y, reduction="none")
    else:
        losses = 0.5 * (f - y).square().sum(1)
    return losses.sum() if weights is None else losses @ weights.to(losses)
