"""laplace-torch's decomposed curvature with thin bases; full ones only where it reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from laplace.utils import KronDecomposed
from torch import Tensor

from laplace_debias.kfac.thin import (
    all_completed,
    coordinates,
    frame_values,
    from_coordinates,
)

__all__ = ["ThinKronDecomposed"]


class ThinKronDecomposed(KronDecomposed):
    """``KronDecomposed`` whose bases may be thin, see :mod:`laplace_debias.kfac.thin`.

    Products, and so samples, work with thin bases. ``eigenvectors``, which the rest of
    laplace-torch's methods reads, completes them at every read and keeps nothing.

    Attributes:
        bases: Orthonormal columns ``[d, r]`` of every factor.

    Example:
        >>> H = ThinKronDecomposed([[torch.eye(3)[:, 2:]]], [[torch.tensor([1.0, 1.0, 4.0])]])
        >>> H.bmm(torch.ones(3), exponent=-0.5), H.eigenvectors[0][0].shape
        (tensor([1.0000, 1.0000, 0.5000]), torch.Size([3, 3]))
    """

    bases: Any

    @property
    def eigenvectors(self) -> Any:
        """Full bases, made at every read."""
        return all_completed(self.bases)

    @eigenvectors.setter
    def eigenvectors(self, bases: Any) -> None:
        self.bases = bases

    def __add__(self, deltas: Tensor) -> ThinKronDecomposed:
        """Add one number to every eigenvalue of a block, as laplace-torch does."""
        self._check_deltas(deltas)
        return ThinKronDecomposed(self.bases, self.eigenvalues, self.deltas + deltas)

    def __mul__(self, scalar: Tensor | float) -> ThinKronDecomposed:
        """Multiply the curvature, as laplace-torch does."""
        full = KronDecomposed(self.bases, self.eigenvalues, self.deltas)
        return ThinKronDecomposed(self.bases, (full * scalar).eigenvalues, self.deltas)

    def _bmm(self, W: Tensor, exponent: float = -1) -> Tensor:
        """``self ** exponent @ W`` for ``W [batch, classes, P]``."""
        sizes = [_numel(block) for block in self.eigenvalues]
        parts = []
        for lam, Q, delta, w in zip(
            self.eigenvalues, self.bases, self.deltas, W.split(sizes, dim=-1), strict=True
        ):
            w = w.unflatten(-1, [len(values) for values in lam])
            values = [frame_values(*pair) for pair in zip(lam, Q, strict=True)]
            if len(Q) == 1:
                z = coordinates(w, Q[0]) * (values[0] + delta).pow(exponent)
                parts.append(from_coordinates(z, Q[0]))
                continue
            z = coordinates(coordinates(w, Q[1]).mT, Q[0]).mT
            if self.damping:
                scale = torch.outer(*(v + delta.sqrt() for v in values))
            else:
                scale = torch.outer(*values) + delta
            z = from_coordinates(z * scale.pow(exponent), Q[1])
            parts.append(from_coordinates(z.mT, Q[0]).mT.flatten(-2))
        return torch.cat(parts, dim=-1)

    __radd__ = __add__
    __rmul__ = __mul__


def _numel(lam: Sequence[Tensor]) -> int:
    """Number of rows of a block."""
    return int(torch.Size([len(values) for values in lam]).numel())
