r"""Directional curvatures of the GGN by forward mode alone.

The GGN is :math:`G = \tfrac{1}{N} \sum_n J_n^\top \Lambda_n J_n` with the model's Jacobian
:math:`J_n` and the loss Hessian :math:`\Lambda_n` in the outputs. For directions :math:`D`

.. math::
    D^\top G D = \tfrac{1}{N} \sum_n (J_n D)^\top \Lambda_n (J_n D),

so products with the Jacobian suffice: nothing is propagated backwards, which saves well over half
of the work of a GGN-vector product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.func import jacrev, jvp, vmap

from laplace_debias.data.chunks import Chunk
from laplace_debias.data.inputs import size_of
from laplace_debias.quadratics.operators import jacobian_products


def loss_hessian_products(loss: nn.Module, outputs: Tensor, y: Tensor, V: Tensor) -> Tensor:
    """Multiply the Hessian of the loss in the model's outputs onto many vectors.

    Args:
        loss: Loss module, called as ``loss(outputs, y)``.
        outputs: The model's outputs, shape ``[M, ...]``.
        y: Targets.
        V: Vectors in the space of the outputs, shape ``[M, ..., K]``.

    Returns:
        Products, shape ``[M, ..., K]``.

    Example:
        >>> f, y, V = torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2, 3)
        >>> loss_hessian_products(nn.MSELoss(reduction="sum"), f, y, V)[0, 0]
        tensor([2., 2., 2.])
    """
    loss_gradient = jacrev(lambda f: loss(f, y))
    product = vmap(lambda v: jvp(loss_gradient, (outputs,), (v,))[1], in_dims=-1, out_dims=-1)
    HV: Tensor = product(V)
    return HV


@torch.no_grad()
def ggn_gram(
    model: nn.Module,
    loss: nn.Module,
    params: Sequence[nn.Parameter],
    chunks: Iterable[Chunk],
    n_data: int,
    D: Tensor,
    max_columns: int,
) -> Tensor:
    """Compute ``D^T G D`` for the GGN ``G`` of a mean loss, without a backward pass.

    Args:
        model: The network.
        loss: Loss with ``reduction="mean"``.
        params: Parameters that span the space of the directions, of total size ``P``.
        chunks: Data as pairs ``(X, y)``.
        n_data: Number of data in all the chunks.
        D: Directions, shape ``[P, K]``.
        max_columns: How many directions go through the model at once.

    Returns:
        Symmetric matrix, shape ``[K, K]``.

    Example:
        >>> model, data = nn.Linear(2, 1, bias=False), [(torch.eye(2), torch.zeros(2, 1))]
        >>> ggn_gram(model, nn.MSELoss(), [model.weight], data, 2, torch.eye(2), 8)
        tensor([[1., 0.],
                [0., 1.]])
    """
    device = params[0].device
    gram = D.new_zeros(D.shape[1], D.shape[1])
    for X, y in chunks:
        m = size_of(X)
        X, y = X.to(device) if isinstance(X, Tensor) else X, y.to(device)
        outputs = model(X)
        JD = jacobian_products(model, params, X, y, D, max_columns)  # [m * C, K]
        JD = JD.reshape(*outputs.shape, -1)  # [m, ..., K]
        HJD = loss_hessian_products(loss, outputs, y, JD)
        gram += (m / n_data) * (JD.flatten(0, -2).T @ HJD.flatten(0, -2))
    return (gram + gram.T) / 2
