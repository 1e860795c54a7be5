"""What the data of a pool leave to chance, beside the draws: input factors and output Hessian."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from laplace_debias.debias.certificate import log_deviations, rotated
from laplace_debias.debias.eigen import EigenFactors, eigh_float64
from laplace_debias.debias.pool_moments import PoolMoments

__all__ = ["input_noise", "output_noise", "pool_noises"]

MOST_SUMS = 16
"""Most rows per probe and layer for the noise of input factors."""


def pool_noises(
    moments: PoolMoments,
    n_data: int,
    blocks: Sequence[EigenFactors],
    gradients: Sequence[Tensor],
    ridges: Tensor,
) -> Iterator[Tensor]:
    """Independent errors of the log deviations, none where the pool is all there is.

    Args:
        moments: Of the pool.
        n_data: Number N of data that it stands for.
        blocks: See :func:`laplace_debias.debias.certificate.log_deviations`.
        gradients: See there.
        ridges: See there.

    Yields:
        Errors ``[n]``.

    Example:
        >>> from laplace_debias.kfac.engine import Engine
        >>> moments = PoolMoments(Engine(torch.nn.Linear(2, 3), "classification"))
        >>> moments.add(torch.randn(5, 2), torch.arange(5) % 3)
        >>> list(pool_noises(moments, 5, [], [], torch.ones(0)))
        []
    """
    for differences in moments.inputs.noises(moments.size, n_data):
        if any(delta is not None for delta in differences):
            yield input_noise(blocks, differences, gradients, ridges)
    rare = 1 - moments.size / n_data
    if rare > 1e-9 and moments.size > 1:
        halves = [n_data * H for H in moments.hessian_halves()]
        yield output_noise(blocks, moments.at_output, halves, rare, gradients, ridges)


def input_noise(
    blocks: Sequence[EigenFactors],
    differences: Sequence[Tensor | None],
    gradients: Sequence[Tensor],
    ridges: Tensor,
) -> Tensor:
    r"""First-order change of the log deviations by changes of the input factors.

    .. math:: \partial \log \sigma = - \frac{1}{2 \sigma^2}
              \sum_l \operatorname{tr} X_l^\top B_l X_l\, \Delta A_l, \qquad X_l = P_l^{-1} J_l

    With many outputs of a layer the trace is estimated: the rows of :math:`B_l^{1/2} X_l` are
    summed with :data:`MOST_SUMS` sets of random signs, from a seed of their own (Hutchinson 1989).

    Args:
        blocks: See :func:`log_deviations`.
        differences: Change of each block's A, ``None`` for none.
        gradients: See :func:`log_deviations`.
        ridges: See :func:`log_deviations`.

    Returns:
        Changes ``[n]``.
    """
    change = torch.zeros(len(gradients[0]), dtype=torch.float64, device=gradients[0].device)
    generator = torch.Generator().manual_seed(0)
    for block, delta, J, ridge in zip(blocks, differences, gradients, ridges, strict=True):
        if delta is None or block.Q_A is None:
            continue
        Q = block.Q_A.to(J)
        X = rotated(block, J).double() / (block.table.double() + ridge)
        X = (X * block.lam_B.double().sqrt()[:, None]).to(J)
        if X.shape[1] > MOST_SUMS:
            signs = torch.randint(2, (len(X), MOST_SUMS, X.shape[1]), generator=generator)
            X = (2 * signs - 1).to(X) / MOST_SUMS**0.5 @ X
        X = X @ Q.T
        change += (X @ delta.to(J) * X).sum((1, 2)).double()
    return -0.5 * change / (2 * log_deviations(blocks, gradients, ridges)).exp()


def output_noise(
    blocks: Sequence[EigenFactors],
    at_output: Sequence[bool],
    halves: Sequence[Tensor],
    rare: float,
    gradients: Sequence[Tensor],
    ridges: Tensor,
) -> Tensor:
    r"""Change of the log deviations by the error of the output layer's Hessian.

    The Hessian of n data out of N, :math:`H = (H_1 + H_2) / 2` of two halves, varies as
    :math:`D = (1 - n / N)^{1/2} (H_1 - H_2) / 2`: the change is half of what lies between those of
    :math:`H + D` and of :math:`H - D`.

    Args:
        blocks: See :func:`laplace_debias.debias.certificate.log_deviations`.
        at_output: Whether a block's output factor is this Hessian.
        halves: The Hessians of both halves, ``[C, C]``, each for all N.
        rare: ``1 - n / N``.
        gradients: See :func:`laplace_debias.debias.certificate.log_deviations`.
        ridges: See there.

    Returns:
        Changes ``[n]``.

    Example:
        >>> block = EigenFactors(torch.eye(1), torch.tensor([3.0]))
        >>> halves = [torch.tensor([[2.0]]), torch.tensor([[4.0]])]
        >>> output_noise([block], [True], halves, 1.0, [torch.ones(1, 1, 1)], torch.ones(1))
        tensor([0.1277], dtype=torch.float64)
    """
    H, D = (halves[0] + halves[1]) / 2, (halves[0] - halves[1]) / 2 * rare**0.5
    sides = []
    for side in (H + D, H - D):  # mixtures of the halves: curvatures as well
        lam, Q = eigh_float64(side, "the output's Hessian")
        pairs = zip(blocks, at_output, strict=True)
        sides.append([b._replace(Q_B=Q, lam_B=lam.clamp(min=0)) if at else b for b, at in pairs])
    one, two = (log_deviations(side, gradients, ridges) for side in sides)
    return (one - two) / 2
