"""Blocks of the posterior: an output factor in its eigenbasis, corrected for the inverse."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from laplace_debias.debias.eigen import EigenFactors
from laplace_debias.debias.inverse import inverse_inflation, resolvent_inflation
from laplace_debias.debias.leverages import BlockGrams
from laplace_debias.debias.span import NullSpace

__all__ = ["Spectrum", "corrected_block"]


class Spectrum(NamedTuple):
    """An output factor in its eigenbasis, and what the correction for the inverse needs.

    Attributes:
        Q: Eigenvectors in columns.
        lam: Eigenvalues ``[d]``.
        rows: Weighted rows ``[m, r, d]`` of draws in that basis, or their blocks.
        probabilities: Their inclusion probabilities, ``[m]``.
        linked: Which of them follow their predecessor in the draw, ``[m - 1]``.
        counts: How often each of them counts, ``[m]``.
        alone: Share of each draw's rows that are outside the span of all others, ``[m]``.
        null: What is foretold of the directions outside the draws' span.
    """

    Q: Tensor
    lam: Tensor
    rows: Tensor | BlockGrams
    probabilities: Tensor
    linked: Tensor
    counts: Tensor
    alone: Tensor
    null: NullSpace

    def inflation(self, ridges: Tensor) -> Tensor:
        """The factor c of :func:`laplace_debias.debias.inverse.inverse_inflation`, ``[k]``.

        Rows that are alone in a direction say nothing about it: they make the floor.
        """
        return inverse_inflation(
            self.rows,
            self.probabilities,
            self.lam,
            ridges,
            linked=self.linked,
            counts=self.counts,
            alone=self.alone,
        )


def corrected_block(
    output: Spectrum,
    inputs: tuple[Tensor, Tensor] | None,
    ridge: float,
    *,
    correct: bool = True,
    input_rows: tuple[float, float] | None = None,
) -> EigenFactors:
    r"""A block with eigenvalues made for the inverse, see :mod:`laplace_debias.debias.inverse`.

    A bias: :math:`c\, (\lambda_B + \tau)`. A weight: :math:`(\lambda_{B,j} + \tau)\, c_i
    \lambda_{A,i}`, c of the ridges :math:`\delta / (h \lambda_{A,i})`. Rows that are alone in a
    direction make the floor :math:`\tau`, the others c: with fewer rows than dimensions there is
    no c, and with all directions known no floor. The floor is made for the smallest of the ridges,
    and matters little where they are larger.

    Args:
        output: See :meth:`DrawnFactor.spectrum`.
        inputs: Eigenvectors and eigenvalues of A, ``None`` for a bias.
        ridge: Prior precision over the Hessian factor.
        correct: Whether to correct at all.
        input_rows: Numbers n and N of the rows behind A, if it is drawn as well, one row a datum.

    Returns:
        The block.
    """
    Q, lam = output.Q, output.lam
    if not correct:
        return EigenFactors(Q, lam, *(inputs or ()))
    if inputs is None:
        raised = lam + output.null.floor(ridge, lam)
        return EigenFactors(Q, output.inflation(lam.new_tensor([ridge])) * raised)
    Q_A, lam_A = inputs
    least = max(float(lam_A.max()), 1e-300) * 1e-14
    lam_B = lam + output.null.floor(ridge / max(float(lam_A.max()), least), lam)
    lam_A = output.inflation(ridge / lam_A.clamp(min=least)) * lam_A
    if input_rows is not None:
        least = max(float(lam_B.max()), 1e-300) * 1e-14
        lam_B = lam_B * resolvent_inflation(lam_A, ridge / lam_B.clamp(min=least), *input_rows)
    return EigenFactors(Q, lam_B, Q_A, lam_A)
