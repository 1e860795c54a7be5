"""The linearised predictive of a last layer in closed form: no backward pass at all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laplace_debias.kfac.thin import coordinates, is_thin
from laplace_debias.predictive import contractions as maths
from laplace_debias.predictive.eigenblocks import EigenBlock

__all__ = ["last_layer_moments"]


def last_layer_moments(
    blocks: Sequence[EigenBlock], f: Tensor, phi: Tensor, mode: str, *, apart: bool = False
) -> Tensor:
    r"""Output (co)variances of a last layer, for all prior precisions of its blocks.

    The Jacobian of output c is the input features in row c. So :math:`\tilde g_{ci} = Q_{B,ci}` for
    every datum, and with the features :math:`\phi` and
    :math:`s_i = \sum_j w_{ij} (Q_A^\top \phi)_j^2`, the weight block adds
    :math:`\sum_i Q_{B,ci} s_i Q_{B,di}` and the bias block
    :math:`(Q \, \mathrm{diag}(w) \, Q^\top)_{cd}`.

    Args:
        blocks: The posterior's blocks.
        f: The network's outputs ``[n, C]``.
        phi: Features ``[n, d]``.
        mode: A key of ``CONTRACTIONS``.
        apart: Whether to leave the blocks apart, ``[n_blocks, ...]``, instead of their sum.

    Returns:
        ``[n, C, k]``, ``[n, C, C, k]`` or ``[n * C, n * C, k]``.

    Raises:
        ValueError: If outputs or features are not one row per datum.

    Example:
        >>> one = torch.ones(1, 1)
        >>> block = EigenBlock("w", torch.empty(1, 1), (one, one), one, torch.tensor([1.0]))
        >>> last_layer_moments([block], one, 2 * one, "variance")  # phi^2 / (lam + delta)
        tensor([[[2.]]])
    """
    if phi.ndim == 1 and len(f) == 1:
        phi = phi.unsqueeze(0)
    if f.ndim != 2 or phi.ndim != 2:
        raise ValueError(
            f"Expected outputs [n, C] and features [n, d], got {tuple(f.shape)} and "
            f"{tuple(phi.shape)}. Remedy: set `feature_reduction`, or return one row per datum, "
            "also for a single one: name the dimension of a `.squeeze()`."
        )
    parts = [_last_layer_block(block, phi, mode) for block in blocks]
    return torch.stack(parts) if apart else sum(parts[1:], parts[0])


def _last_layer_block(block: EigenBlock, phi: Tensor, mode: str) -> Tensor:
    """Contract one block; see :func:`last_layer_moments`."""
    Q_B, n = block.Q[0], len(phi)
    Q_B = coordinates(torch.eye(len(Q_B)).to(Q_B), Q_B) if is_thin(Q_B) else Q_B  # [C, C + r]
    rows = Q_B.expand(n, *Q_B.shape)  # the same rotated gradients for every datum
    if mode == "joint":
        if len(block.Q) == 1:
            J = rows if block.param.ndim == 1 else coordinates(phi, block.Q[0]).unsqueeze(1)
        else:
            a = coordinates(phi, block.Q[1])
            J = (rows.unsqueeze(-1) * a[:, None, None, :]).flatten(2)
        return maths.contract([J.clone()], block.inverses, mode)[..., : len(block.delta)]
    if len(block.Q) == 1 and block.param.ndim > 1:  # one output, one feature
        J = coordinates(phi, block.Q[0]).unsqueeze(1)
        return maths.contract([J], block.inverses, mode)[..., : len(block.delta)]
    phi2 = None if len(block.Q) == 1 else coordinates(phi, block.Q[1]).square()
    parts = []
    for delta in block.delta:
        w = (block.lam + delta).reciprocal()
        s = w.unsqueeze(0) if phi2 is None else phi2 @ w.T  # [n, C], or [1, C] for a bias
        if mode == "variance":
            parts.append(s @ Q_B.square().T)
        else:
            parts.append((Q_B * s.unsqueeze(1)) @ Q_B.T)
    part = torch.stack(parts, dim=-1)
    return part.expand(n, *part.shape[1:])
