"""Choice between several sets of eigenvalues for one factor by the likelihood of held-out rows."""

# %% Imports
from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


# %% Formula
def heldout_loss(values: Tensor, heldout: Tensor, ridges: Tensor) -> float:
    r"""Gaussian loss of held-out rows under eigenvalues in a given basis.

    Rows with the second moment C, under a covariance :math:`S = Q\, \mathrm{diag}(s)\, Q^\top`,
    both with a ridge d, have minus twice the log-likelihood per row, up to a constant,

    .. math:: \log \det (S + d) + \mathrm{tr}\, (C + d) (S + d)^{-1}
              = \sum_k \log (s_k + d) + \frac{c_k + d}{s_k + d}

    with :math:`c = \mathrm{diag}\, Q^\top C Q`, which is least for :math:`s = c`: the ridge on both
    sides keeps it a proper score. In a block ``kron(B, A) + delta`` a factor meets one ridge per
    direction of the other, and the loss is the mean over these.

    Args:
        values: Eigenvalues s, ``[d]``.
        heldout: Curvatures c of the held-out rows along the same basis, ``[d]``.
        ridges: Ridges ``[k]``, positive.

    Returns:
        The loss; less is better.
    """
    s = values.double().clamp(min=0) + ridges.double()[:, None]  # [k, d]
    c = heldout.double().clamp(min=0) + ridges.double()[:, None]
    return float((s.log() + c / s).sum(1).mean())


def likeliest(
    parts: Mapping[str, tuple[Tensor, ...]], heldout: tuple[Tensor, ...], ridges: Tensor
) -> str:
    """Name of the eigenvalues with the least loss, summed over several held-out parts.

    Args:
        parts: Eigenvalues by name, one set for each held-out part.
        heldout: Curvatures of each held-out part along the basis.
        ridges: See :func:`heldout_loss`.

    Returns:
        The name; the first of equal ones.
    """
    losses = {
        name: sum(heldout_loss(s, c, ridges) for s, c in zip(sets, heldout, strict=True))
        for name, sets in parts.items()
    }
    return min(losses, key=losses.__getitem__)


def ridges_of(other: Tensor | None, delta: float) -> Tensor:
    """Ridges that a factor meets in ``kron(B, A) + delta``: one per direction of the other."""
    if other is None:
        return torch.tensor([delta], dtype=torch.float64)
    other = other.double()
    return delta / other.clamp(min=max(1e-14 * float(other.max()), 1e-300))
