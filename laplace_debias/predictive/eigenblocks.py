r"""The posterior precision of a fitted Kron Laplace, block by block, in its eigenbasis.

Conventions (those of laplace-torch's ``KronDecomposed``). Block :math:`l` belongs to one
parameter tensor. With :math:`h` the Hessian factor (``1 / (sigma_noise**2 * temperature)``) and
:math:`\delta` the prior precision of the block, the posterior precision is

.. math::
    P_l = (Q_B \otimes Q_A) \, \mathrm{diag}(h \, \lambda_B \otimes \lambda_A + \delta)
          \, (Q_B \otimes Q_A)^\top

for a weight (rows :math:`d_{out}`, columns :math:`d_{in}`, flattened row by row), and
:math:`P_l = Q \, \mathrm{diag}(h \lambda + \delta) \, Q^\top` for a block with a single factor (a
bias). The eigenbasis does not depend on :math:`\delta`: many prior precisions share everything
but the last elementwise inverse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from laplace.baselaplace import BaseLaplace, KronLaplace
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from laplace_debias.kfac.thin import bases_of, frame_values
from laplace_debias.network.preserve import no_autocast
from laplace_debias.network.upstream import (
    decomposed,
    hessian_factor,
    is_last_layer,
    last_layer_of,
    posterior_params,
)

PriorPrecisions = float | Tensor | Sequence[float | Tensor]


@dataclass(frozen=True)
class EigenBlock:
    """One block of the posterior precision in its eigenbasis, for k prior precisions.

    Attributes:
        name: Name of the parameter, for messages.
        param: The parameter tensor that the block belongs to.
        Q: Eigenvectors, ``(Q_B, Q_A)`` for a weight or ``(Q,)`` for a single-factor block; some may
            be thin, and stand for a frame (:mod:`laplace_debias.kfac.thin`).
        lam: Eigenvalues of the likelihood's curvature, ``[d_out, d_in]`` or ``[d]``; with thin
            eigenvectors one for each column of the frame, d + r.
        delta: The k prior precisions of this block, ``[k]``.
        max_numel: Most numbers that :meth:`inverses` may hold in one array.
        keep: Whether :meth:`inverses` may keep its result.
    """

    name: str
    param: Tensor
    Q: tuple[Tensor, ...]
    lam: Tensor
    delta: Tensor
    max_numel: int = 2**26
    keep: bool = True
    _kept: dict[bool, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def turned(self) -> EigenBlock:
        """The block of the transposed parameter, for a weight ``[d_in, d_out]``."""
        return replace(self, Q=self.Q[::-1], lam=self.lam.T.contiguous(), _kept={})

    def inverse(
        self, ks: slice = slice(None), input_first: bool = False, rows: slice = slice(None)
    ) -> Tensor:
        r"""Return the posterior variances in the eigenbasis, :math:`1 / (\lambda + \delta_k)`.

        Args:
            ks: Which of the ``padded`` prior precisions.
            input_first: Return ``[d_in, d_out, k]`` instead of ``[D, k]``.
            rows: Which rows of ``lam``.
        """
        lam = self.lam[rows].T.contiguous() if input_first else self.lam[rows].flatten()
        return (lam.unsqueeze(-1) + self.padded[ks]).reciprocal_()

    @property
    def padded(self) -> Tensor:
        """The prior precisions, with the last repeated up to a multiple of 16 if there are many.

        Products with 14 columns take more than twice the time of those with 16: matrix kernels are
        as wide as vector registers.
        """
        extra = -len(self.delta) % 16 if len(self.delta) > 8 else 0
        return torch.cat([self.delta, self.delta[-1:].expand(extra)])

    def inverses(self, input_first: bool = False, rows: slice = slice(None)) -> Iterator[Tensor]:
        """Yield :meth:`inverse` for all ``padded`` prior precisions, in parts.

        At most ``max_numel`` numbers at once. What fits is kept for the next call, if ``keep``
        says so.

        Args:
            input_first: See :meth:`inverse`.
            rows: Which rows of ``lam``, without ``input_first``.
        """
        size = max(1, self.max_numel // self.lam[rows].numel())
        if self.keep and len(self.padded) * self.lam.numel() <= self.max_numel:
            if input_first not in self._kept:
                self._kept[input_first] = self.inverse(input_first=input_first)
            kept = self._kept[input_first]
            yield kept if input_first else kept.view(*self.lam.shape, -1)[rows].flatten(0, -2)
            return
        for start in range(0, len(self.padded), size):
            yield self.inverse(slice(start, start + size), input_first, rows)


def prior_grid(
    prior_precisions: PriorPrecisions, n_blocks: int, like: Tensor
) -> tuple[Tensor, bool]:
    """Bring one or many prior precisions to one form.

    Args:
        prior_precisions: A number or 0-d tensor (one scalar prior precision), a 1-d tensor, array
            or sequence of k numbers (k scalar ones), a ``[k, n_blocks]`` tensor (k layer-wise
            ones), or a sequence that mixes numbers and layer-wise 1-d tensors.
        n_blocks: Number of blocks (parameter tensors) of the posterior.
        like: A tensor whose dtype and device the result takes.

    Returns:
        The grid ``[k, n_blocks]``, and whether there were many (``False`` for a single number).

    Raises:
        ValueError: If a value is not positive and finite or a length is wrong.

    Example:
        >>> grid, many = prior_grid([1.0, torch.tensor([2.0, 3.0])], 2, torch.zeros(1))
        >>> grid.tolist(), many
        ([[1.0, 1.0], [2.0, 3.0]], True)
    """
    if isinstance(prior_precisions, np.ndarray):
        prior_precisions = torch.as_tensor(prior_precisions)
    rows: list[float | Tensor]
    if isinstance(prior_precisions, Tensor):
        values = prior_precisions.detach()
        if values.ndim > 2:
            raise ValueError(
                f"Expected prior precisions with at most 2 dimensions [k, {n_blocks}], got shape "
                f"{tuple(values.shape)}. Remedy: pass a number, k numbers, or a [k, {n_blocks}] "
                "tensor."
            )
        many = values.ndim > 0
        rows = [values] if values.ndim == 0 else list(values)
    elif isinstance(prior_precisions, Sequence) and not isinstance(prior_precisions, str):
        rows, many = list(prior_precisions), True
    else:
        rows, many = [prior_precisions], False
    if not rows:
        raise ValueError(
            "Expected at least one prior precision, got none. Remedy: pass e.g. [0.1, 1.0]."
        )

    grid = []
    for given in rows:
        try:
            row = torch.as_tensor(given, dtype=torch.float64).detach().reshape(-1)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"Expected a prior precision to be a number or a tensor, got {given!r}. "
                "Remedy: pass positive floats."
            ) from error
        if len(row) not in (1, n_blocks):
            raise ValueError(
                f"Expected a prior precision of length 1 or {n_blocks} (one per parameter tensor), "
                f"got length {len(row)}. Remedy: pass a number or a tensor of {n_blocks} values."
            )
        if not (torch.isfinite(row).all() and (row > 0).all()):
            raise ValueError(
                f"Expected positive, finite prior precisions, got {row.tolist()}. "
                "Remedy: pass values greater than 0."
            )
        grid.append(row.expand(n_blocks))
    return torch.stack(grid).to(dtype=like.dtype, device=like.device), many


def check_fitted(la: KronLaplace) -> None:
    """Raise if ``la`` is not a fitted Kron Laplace approximation.

    Raises:
        TypeError: If ``la`` is not a ``KronLaplace``.
        AttributeError: If it has not been fitted.
    """
    if not isinstance(la, KronLaplace):
        raise TypeError(
            f"Expected a KronLaplace or KronLLLaplace, got {type(la).__name__}. "
            'Remedy: build it with hessian_structure="kron".'
        )
    decomposed(la)


@no_autocast()
def eigen_blocks(la: KronLaplace, deltas: Tensor, memory_budget: int) -> list[EigenBlock]:
    """Return the blocks of the posterior precision for the given prior precisions.

    Args:
        la: A fitted Kron Laplace approximation.
        deltas: Prior precisions ``[k, n_blocks]``.
        memory_budget: Bytes to stay within; a quarter of it may hold posterior variances.

    Raises:
        ValueError: If the blocks of ``la.H`` do not match the parameters.
    """
    params, H = posterior_params(la), decomposed(la)
    bases = bases_of(H)
    if len(params) != len(H):
        raise ValueError(
            f"Expected one curvature block per parameter tensor ({len(params)}), got {len(H)}. "
            "Remedy: refit, as the model or its frozen parameters changed since la.fit."
        )
    names = {id(p): name for name, p in la.model.named_parameters()}
    offsets = H.deltas.expand(len(params))
    max_numel = max(1, memory_budget // (4 * deltas.element_size()))
    keep = len(deltas) * sum(p.numel() for p in params) <= max_numel
    blocks = []
    for i, p in enumerate(params):
        dtype = torch.promote_types(p.dtype, torch.float32)
        Qs = tuple(Q.detach().to(dtype) for Q in bases[i])
        lams = [lam.detach().to(dtype) for lam in H.eigenvalues[i]]
        if math.prod(map(len, lams)) != p.numel():
            raise ValueError(
                f"Expected a block of {p.numel()} rows for {names.get(id(p))!r} of shape "
                f"{tuple(p.shape)}, got {math.prod(map(len, lams))}. Remedy: refit the "
                "approximation."
            )
        lams = [frame_values(*pair) for pair in zip(lams, Qs, strict=True)]
        lam = lams[0] if len(lams) == 1 else torch.outer(lams[0], lams[1])
        lam = hessian_factor(la).detach().to(dtype) * lam + offsets[i].to(dtype)
        name, delta = names.get(id(p), f"block {i}"), deltas[:, i].to(dtype)
        blocks.append(EigenBlock(name, p, Qs, lam, delta, max_numel, keep))
    return blocks


def default_grid(n_data: int) -> Tensor:
    r"""Return the paper's grid: N times 13 log-spaced beta from 1e-4 to 1, and 10.

    Args:
        n_data: The number N of training data; ``prior_precision = N * beta``.

    Example:
        >>> grid = default_grid(100)
        >>> len(grid), round(grid[0].item(), 6), round(grid[-1].item(), 6)
        (14, 0.01, 1000.0)
    """
    beta = torch.cat([torch.logspace(-4, 0, 13, dtype=torch.float64), torch.tensor([10.0])])
    return n_data * beta


def has_closed_form(la: BaseLaplace) -> bool:
    """Whether the Jacobians of a posterior are known from its features: of a last layer they are.

    Args:
        la: A Laplace approximation, ours or laplace-torch's.

    Returns:
        False for all layers, and for a last layer whose weight a parametrisation computes.

    Example:
        >>> from laplace import Laplace
        >>> has_closed_form(Laplace(torch.nn.Linear(2, 1), "regression", "all", "kron"))
        False
    """
    return is_last_layer(la) and not is_parametrized(last_layer_of(la.model))
