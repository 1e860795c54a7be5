r"""curvlinops' linear operators, once: a new release of theirs is this file's work alone.

The GGN is :math:`G = \tfrac{1}{N} \sum_n J_n^\top \Lambda_n J_n` with the model's Jacobian
:math:`J_n` and the loss Hessian :math:`\Lambda_n` in the outputs. For directions :math:`D`

.. math::
    D^\top G D = \tfrac{1}{N} \sum_n (J_n D)^\top \Lambda_n (J_n D),

so for curvatures along directions products with the Jacobian suffice: nothing is propagated
backwards, which saves well over half of the work of a GGN-vector product.
"""

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
from torch.func import jacrev, jvp, vmap

from laplace_debias.data.chunks import Chunk
from laplace_debias.data.inputs import Inputs, size_of
from laplace_debias.network.preserve import parameters_kept

__all__ = [
    "CURVATURES",
    "Curvature",
    "CurvatureOperator",
    "check_loss",
    "check_targets",
    "curvature_operator",
    "ggn_gram",
    "jacobian_products",
    "loss_hessian_products",
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


def check_loss(loss: nn.Module) -> None:
    """Raise unless the loss is a plain mean, so that chunks may be averaged by their size.

    Example:
        >>> check_loss(nn.MSELoss())
    """
    if getattr(loss, "reduction", None) != "mean":
        raise ValueError(
            f"Expected a loss with reduction='mean', got {getattr(loss, 'reduction', None)!r}: "
            "the quadratic is that of a mean over data. Remedy: use e.g. CrossEntropyLoss()."
        )
    if getattr(loss, "weight", None) is not None:
        raise ValueError(
            "Expected a loss without class weights, got one with them: its mean is over weights, "
            "and means over chunks do not add up. Remedy: use the loss without `weight`."
        )


def check_targets(loss: nn.Module, chunks: Iterable[Chunk]) -> None:
    """Raise if the loss would leave out targets, and so take its mean over fewer data.

    Example:
        >>> check_targets(nn.CrossEntropyLoss(), [(torch.zeros(1, 2), torch.zeros(1).long())])
    """
    ignored = getattr(loss, "ignore_index", None)
    if ignored is not None and any(
        not y.is_floating_point() and bool((y == ignored).any()) for _, y in chunks
    ):
        raise ValueError(
            f"Expected targets that all count, got some equal to ignore_index={ignored}: the mean "
            "would be over the others only. Remedy: leave these data out."
        )
