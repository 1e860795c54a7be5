r"""The exact block of a scale or shift: one factor, from the gradients of whole data.

A normalisation computes :math:`s_{nt} = \gamma \hat x_{nt} + \beta`. With a backward vector
:math:`v_{nk}` of datum n and :math:`g_{nkt}` its gradient at position t,

.. math:: B_\gamma = \sum_n \sum_k r_{nk} r_{nk}^\top, \quad r_{nk} = \sum_t g_{nkt} \hat x_{nt},
          \qquad B_\beta = \sum_n \sum_k r_{nk} r_{nk}^\top, \quad r_{nk} = \sum_t g_{nkt},

is the block of the generalised Gauss-Newton matrix itself: no factorisation is needed, because the
parameter has few entries. The calls of all layers that share it add up before the outer product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from laplace_debias.kfac.few_rows import RowSum, check_datum
from laplace_debias.network.ownership import OwnedParameter
from laplace_debias.network.responses import norm_gradients

__all__ = ["NormGram", "norm_rows"]


def norm_rows(
    parameter: OwnedParameter,
    gradients: Mapping[nn.Module, Sequence[Tensor | None]],
    x_hats: Mapping[nn.Module, Sequence[Tensor]],
    n: int,
) -> Tensor | None:
    """Gradients of a scale or shift by whole data, for one backward vector each.

    Args:
        parameter: The parameter, of one or several normalisations.
        gradients: One gradient for each call of each layer, ``None`` where there is none.
        x_hats: For a scale, what was scaled in each of these calls.
        n: Number of data.

    Returns:
        Rows ``[n, d]`` in at least single precision, ``None`` if there is no gradient.

    Raises:
        ValueError: If the first dimension of a call does not run over the data.

    Example:
        >>> layer = nn.LayerNorm(2)
        >>> shift = OwnedParameter("bias", "bias", (layer,))
        >>> norm_rows(shift, {layer: [torch.ones(1, 5, 2)]}, {}, n=1)
        tensor([[5., 5.]])
    """
    name, role, layers, _ = parameter
    total: Tensor | None = None
    for layer in layers:
        for i, g in enumerate(gradients[layer]):
            if g is None:
                continue
            check_datum(len(g), n, name)
            g = g.to(torch.promote_types(g.dtype, torch.float32))
            x_hat = x_hats[layer][i].to(g) if role == "weight" else None
            rows = norm_gradients(layer, role, g, x_hat)
            total = rows if total is None else total + rows
    return total


class NormGram:
    """Accumulates the block of one scale or shift over backward vectors.

    Args:
        parameter: The parameter, of one or several normalisations.
        like: A tensor whose device the sums live on, and whose type decides theirs.
        few: Whether to keep rows as such while they are few.

    Example:
        >>> layer = nn.LayerNorm(2)
        >>> gram = NormGram(OwnedParameter("bias", "bias", (layer,)), torch.empty(0))
        >>> _ = gram.add({layer: [torch.ones(3, 5, 2)]}, {}, n=3)
        >>> gram.result()
        tensor([[75., 75.], [75., 75.]])
    """

    def __init__(self, parameter: OwnedParameter, like: Tensor, few: bool = False) -> None:
        self.parameter = parameter
        d = parameter.tensor.numel()
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        self._sum = RowSum(d, like.new_empty(0, dtype=self.dtype), few)

    def add(
        self,
        gradients: Mapping[nn.Module, Sequence[Tensor | None]],
        x_hats: Mapping[nn.Module, Sequence[Tensor]],
        n: int,
    ) -> Tensor | None:
        """Add the gradients of one vector.

        Args:
            gradients: One gradient for each call of each layer, ``None`` where there is none.
            x_hats: For a scale, what was scaled in each of these calls.
            n: Number of data.

        Returns:
            The rows ``[n, d]`` that were added, if any.

        Raises:
            ValueError: If the first dimension of a call does not run over the data.
        """
        total = norm_rows(self.parameter, gradients, x_hats, n)
        if total is not None:
            self._sum.add(total)
        return total

    def result(self) -> Tensor:
        """The block ``[d, d]``, or its few rows."""
        return self._sum.result()
