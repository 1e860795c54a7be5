"""curvlinops' linear operators, once: a new release of theirs is this file's work alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import torch
from curvlinops import (
    FisherType,
    GGNLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
)
from torch import Tensor, nn

from laplace_debias.data.chunks import Chunk
from laplace_debias.data.inputs import Inputs, size_of
from laplace_debias.network.preserve import parameters_kept

__all__ = [
    "CURVATURES",
    "Curvature",
    "CurvatureOperator",
    "curvature_operator",
    "jacobian_products",
]

Curvature = Literal["ggn", "hessian", "kfac"]
"""The GGN, the Hessian, or K-FAC-expand of the type-2 Fisher."""
CURVATURES: tuple[Curvature, ...] = ("ggn", "hessian", "kfac")


class CurvatureOperator(Protocol):
    """The curvature of a mean loss in ``P`` parameters, without a regulariser."""

    def __matmul__(self, V: Tensor, /) -> Tensor:
        """Multiply onto one vector ``[P]`` or many ``[P, K]``."""
        ...

    def gradient_and_loss(self) -> tuple[list[Tensor], Tensor]:
        """The mean loss and its gradient, parameter by parameter."""
        ...


def curvature_operator(
    curvature: Curvature,
    model: nn.Module,
    loss: nn.Module,
    params: Sequence[nn.Parameter],
    chunks: Iterable[Chunk],
    n_data: int,
) -> CurvatureOperator:
    r"""The curvature of a mean loss as a linear operator, no matrix formed.

    With the model's Jacobian :math:`J_n` and the loss Hessian :math:`\Lambda_n` in the outputs, the
    GGN is :math:`\tfrac1N \sum_n J_n^\top \Lambda_n J_n`; the Hessian has the model's own curvature
    on top; K-FAC approximates the GGN of each layer by a Kronecker product.

    Args:
        curvature: One of ``CURVATURES``.
        model: The network.
        loss: Loss module with ``reduction="mean"``.
        params: The parameters, of total size ``P``.
        chunks: Data as pairs ``(X, y)``, re-iterable.
        n_data: Number of data in all the chunks.

    Returns:
        The operator, ``(P, P)``.

    Raises:
        ValueError: For an unknown curvature.

    Example:
        >>> model, data = nn.Linear(2, 1, bias=False), [(torch.eye(2), torch.zeros(2, 1))]
        >>> H = curvature_operator("ggn", model, nn.MSELoss(), [model.weight], data, 2)
        >>> (H @ torch.eye(2)).detach()
        tensor([[1., 0.],
                [0., 1.]])
    """
    if curvature not in CURVATURES:
        raise ValueError(
            f"Expected curvature in {CURVATURES}, got {curvature!r}. Remedy: pass one of them."
        )
    cls, extra = {
        "ggn": (GGNLinearOperator, {}),
        "hessian": (HessianLinearOperator, {}),
        "kfac": (KFACLinearOperator, {"fisher_type": FisherType.TYPE2}),
    }[curvature]
    operator: CurvatureOperator = cls(
        model,
        loss,
        list(params),
        chunks,
        check_deterministic=False,
        num_data=n_data,
        batch_size_fn=size_of,
        **extra,
    )
    return operator


def jacobian_products(
    model: nn.Module,
    params: Sequence[nn.Parameter],
    X: Inputs,
    y: Tensor,
    D: Tensor,
    max_columns: int,
) -> Tensor:
    r"""Multiply the model's Jacobian onto directions, :math:`J D`, by forward mode.

    Args:
        model: The network.
        params: The parameters, of total size ``P``.
        X: Inputs of m data.
        y: Their targets, which curvlinops reads and does not use.
        D: Directions, shape ``[P, K]``.
        max_columns: How many directions go through the model at once.

    Returns:
        Products, shape ``[m * C, K]`` for C outputs per datum.

    Example:
        >>> model, X = nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> jacobian_products(model, [model.weight], X, torch.zeros(2, 1), torch.eye(2), 8).detach()
        tensor([[1., 2.],
                [3., 4.]])
    """
    J = JacobianLinearOperator(
        model,
        list(params),
        [(X, y)],
        check_deterministic=False,
        num_data=size_of(X),
        batch_size_fn=size_of,
    )
    products = []
    for columns in D.split(max_columns, dim=1):
        with parameters_kept(model):
            products.append(J @ columns)
    return torch.cat(products, dim=1)
