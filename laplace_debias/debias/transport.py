r"""Input factors of few data, carried to the covariance of the pixels of many.

The input factor A of a convolution costs more than the forward pass: for patches of k pixels some
k^2 times the covariance ``G = A[m, m]`` of single pixels (:mod:`laplace_debias.kfac.pixels`). But
much of what differs between two sets of images, their brightness, contrast, and how often a feature
is there at all, is a difference of pixels. So few data give the A of their patches, :math:`A_n`
with the pixels' :math:`G_n = A_n[m, m]`, and many data give G. With the linear map of least change
between these covariances (optimal transport between normal distributions; Olkin and Pukelsheim
1982),

.. math:: S = G_n^{-1/2} \bigl(G_n^{1/2} G\, G_n^{1/2}\bigr)^{1/2} G_n^{-1/2}, \qquad S\, G_n S = G,

every pixel of a patch is mapped alike,

.. math:: \hat A = (S \otimes I_k)\, A_n\, (S \otimes I_k).

Its middle block is G itself, and with the same data S is the identity. Channels that are silent in
the few data have no map: what G has outside of the span of :math:`G_n` is added to the blocks of
all k pixels, as if neighbours were uncorrelated there, so that no channel's curvature is lost (what
they have in common with the others is).
"""

from __future__ import annotations

import torch
from torch import Tensor

from laplace_debias.debias.eigen import eigh_float64

__all__ = ["carried", "pixel_block", "transport"]


def pixel_block(A: Tensor, c: int) -> Tensor:
    """Block of the pixel in the middle of the kernel.

    Args:
        A: Input factor ``[c * k, c * k]`` of a convolution.
        c: Number of its channels.

    Returns:
        A copy, ``[c, c]``.

    Example:
        >>> pixel_block(torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])), 2)
        tensor([[2., 0.],
                [0., 5.]])
    """
    k = len(A) // c
    return A.view(c, k, c, k)[:, k // 2, :, k // 2].clone()


def transport(
    own: Tensor, target: Tensor, rounding: float, name: str = "pixels"
) -> tuple[Tensor, Tensor]:
    """The map S between two covariances, and what the target has outside of the other's span.

    Args:
        own: Covariance ``[c, c]`` to start from.
        target: Covariance ``[c, c]`` to arrive at.
        rounding: Eigenvalues of ``own`` below this share of the largest count as zero.
        name: What the covariance is called in errors.

    Returns:
        S, the identity outside of the span, and the rest ``[c, c]``, both in float64.

    Example:
        >>> own, target = (torch.diag(torch.tensor(v)) for v in ([4.0, 0.0], [9.0, 5.0]))
        >>> S, rest = transport(own, target, 1e-6)
        >>> S.diag(), rest.diag()
        (tensor([1.5000, 1.0000], dtype=torch.float64), tensor([0., 5.], dtype=torch.float64))
    """
    lam, Q = eigh_float64(own, name)
    target = target.double()
    there = lam > rounding * lam[-1].clamp(min=0)
    span, root = Q[:, there], lam[there].sqrt()
    inner, V = eigh_float64(root[:, None] * (span.T @ target @ span) * root, name)
    middle = (V * inner.clamp(min=0).sqrt()) @ V.T / (root[:, None] * root)
    outside = torch.eye(len(own)).to(Q) - span @ span.T
    return span @ middle @ span.T + outside, outside @ target @ outside


def carried(A: Tensor, target: Tensor, name: str = "pixels") -> Tensor:
    """The input factor of few data, carried to the covariance of the pixels of many.

    Args:
        A: Input factor ``[c * k, c * k]`` of a convolution, from the patches of few data.
        target: Covariance ``[c, c]`` of the pixels in the middle of the patches of many.
        name: What A is called in errors.

    Returns:
        A matrix like A.

    Example:
        >>> A = torch.tensor([[4.0, 2.0, 2.0], [2.0, 4.0, 2.0], [2.0, 2.0, 4.0]])
        >>> torch.allclose(carried(A, torch.tensor([[2.0]])), A / 2)
        True
    """
    c = len(target)
    k = len(A) // c
    S, rest = transport(pixel_block(A, c), target, c * torch.finfo(A.dtype).eps, name)
    S, rest = S.to(A), rest.to(A)
    half = (S @ A.reshape(c, -1)).view(len(A), len(A))  # [c * k, c * k], a half is carried
    moved = (S @ half.T.reshape(c, -1)).view(c, k, c, k)  # and, transposed, the other
    moved.diagonal(dim1=1, dim2=3).add_(rest[..., None])
    return moved.view(len(A), len(A))
