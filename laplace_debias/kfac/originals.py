r"""The exact block of a parameter behind a parametrised weight: one factor, from whole data.

A layer computes with :math:`W = g(V)`. With a backward vector :math:`v_{nk}` of datum n, and
:math:`a_{nt}`, :math:`g_{nkt}` the layer's input and gradient at position t,

.. math:: B_V = \sum_n \sum_k r_{nk} r_{nk}^\top, \qquad
          r_{nk} = G^\top \mathrm{vec} \sum_t g_{nkt} a_{nt}^\top, \qquad
          G = \frac{\partial W}{\partial V},

is the block of the generalised Gauss-Newton matrix itself, ``[p, p]`` for V of p entries; for a
bias without the inputs. See :mod:`laplace_debias.network.parametrized` for why it has no two
factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from laplace_debias.kfac.few_rows import add_gram_, check_datum, mirror_
from laplace_debias.network.layers import has_rows_last, is_norm
from laplace_debias.network.ownership import OwnedParameter
from laplace_debias.network.parametrized import effective, pulled_back
from laplace_debias.network.responses import layer_response, norm_gradients

__all__ = ["OriginalGram", "bias_gradients", "weight_gradients"]


def weight_gradients(geometry: nn.Module, a: Tensor, g: Tensor, weight: Tensor) -> Tensor:
    r"""Gradients of each datum in a layer's weight, :math:`\sum_t g_{nt} a_{nt}^\top`.

    Args:
        geometry: A linear layer, a convolution (kernel, stride, padding) or a normalisation.
        a: Its input, ``[n, ...]``.
        g: Gradient of its output, ``[n, ...]``.
        weight: A tensor in the shape of its weight.

    Returns:
        ``[n, *weight.shape]``.

    Example:
        >>> a, g = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])
        >>> weight_gradients(nn.Linear(2, 1), a, g, torch.empty(1, 2))
        tensor([[[3., 6.]]])
    """
    zero = torch.zeros_like(weight)

    def of_datum(a_n: Tensor, g_n: Tensor) -> Tensor:
        # the response is linear in the weight: its transpose is the gradient, at any weight
        def response(dW: Tensor) -> Tensor:
            return layer_response(geometry, a_n.unsqueeze(0), dW)

        found: Tensor = torch.func.vjp(response, zero)[1](g_n.unsqueeze(0))[0]
        return found

    rows: Tensor = torch.func.vmap(of_datum)(a, g)
    return rows


def bias_gradients(layer: nn.Module, g: Tensor) -> Tensor:
    r"""Gradients of each datum in a layer's bias, :math:`\sum_t g_{nt}`.

    Args:
        layer: A linear layer, a convolution or a normalisation.
        g: Gradient of its output, ``[n, ...]``.

    Returns:
        ``[n, d_out]``.

    Example:
        >>> bias_gradients(nn.Conv1d(1, 2, 1), torch.ones(1, 2, 5))
        tensor([[5., 5.]])
    """
    if is_norm(layer):
        return norm_gradients(layer, "bias", g, None)
    if has_rows_last(layer):
        return g.reshape(len(g), -1, g.shape[-1]).sum(1)
    return g.flatten(2).sum(-1)


class OriginalGram:
    """Accumulates the block of one original over backward vectors.

    Args:
        parameter: The original, of one layer in evaluation mode.
        like: A tensor whose device the sums live on, and whose type decides theirs.

    Example:
        >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 1))
        >>> g = layer.parametrizations.weight.original0
        >>> gram = OriginalGram(OwnedParameter("g", "weight", (layer,), g), torch.empty(0))
        >>> _ = gram.add({layer: [torch.ones(3, 1)]}, {layer: [(layer, torch.ones(3, 2))]}, n=3)
        >>> gram.result().shape
        torch.Size([1, 1])
    """

    def __init__(self, parameter: OwnedParameter, like: Tensor) -> None:
        self.parameter = parameter
        self.effective = effective(parameter.layers[0], parameter.role)
        p = parameter.tensor.numel()
        self._sum = like.new_zeros(p, p, dtype=torch.promote_types(like.dtype, torch.float32))

    def add(
        self,
        gradients: Mapping[nn.Module, Sequence[Tensor | None]],
        inputs: Mapping[nn.Module, Sequence[tuple[nn.Module, Tensor]]],
        n: int,
    ) -> Tensor | None:
        """Add the gradients of one vector.

        Args:
            gradients: One gradient for each call of each layer, ``None`` where there is none.
            inputs: For a weight, the geometry and the input of each of these calls.
            n: Number of data.

        Returns:
            The rows ``[n, p]`` that were added, if any.

        Raises:
            ValueError: If the first dimension of a call does not run over the data.
        """
        layer, total = self.parameter.layers[0], None
        for i, g in enumerate(gradients[layer]):
            if g is None:
                continue
            check_datum(len(g), n, self.parameter.name)
            if self.parameter.role == "weight":
                geometry, a = inputs[layer][i]
                rows = weight_gradients(geometry, a, g, self.effective.detach())
            else:
                rows = bias_gradients(layer, g)
            total = rows if total is None else total + rows
        if total is None:
            return None
        found = pulled_back(self.effective, self.parameter.tensor, total).to(self._sum.dtype)
        add_gram_(self._sum, found)
        return found

    def result(self) -> Tensor:
        """The block ``[p, p]``."""
        return mirror_(self._sum)
