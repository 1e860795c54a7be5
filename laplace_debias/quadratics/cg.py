r"""Conjugate gradients on a quadratic, and their debiased version with a second mini-batch.

CG minimises :math:`q(\theta_0 + x) = \tfrac12 x^\top H x + x^\top g + c` along conjugate
directions: from the residual :math:`r_p = H x_p + g = \nabla q(\theta_p)` and the direction
:math:`s_p`,

.. math::
    \alpha_p = \frac{r_p^\top z_p}{s_p^\top H s_p}, \quad
    r_{p+1} = r_p + \alpha_p H s_p, \quad
    s_{p+1} = -z_{p+1} + \frac{r_{p+1}^\top z_{p+1}}{r_p^\top z_p} s_p, \quad z = M^{-1} r.

With the unit vector :math:`d_p = s_p / \|s_p\|` the update is :math:`\tau_p d_p`, and
:math:`\tau_p = \alpha_p \|s_p\|` is minus slope over curvature. Both were measured on the data that
chose the direction, so both are biased. Debiased CG keeps the directions and takes

.. math::
    \tilde\tau_p = - \frac{d_p^\top \tilde r_p}{d_p^\top \tilde H d_p}, \quad
    \tilde r_{p+1} = \tilde r_p + \tilde\tau_p \tilde H d_p, \quad \tilde r_0 = \tilde g,

from another mini-batch: one more product per iteration, two more vectors of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from laplace_debias.quadratics.directions import SymmetricOperator

Preconditioner = Callable[[Tensor], Tensor]


class CGStatus(str, Enum):
    """Why conjugate gradients stopped."""

    CONVERGED = "converged"
    MAX_ITERATIONS = "max iterations"
    NEGATIVE_CURVATURE = "negative curvature"


@dataclass(frozen=True)
class CGSolution:
    """Where conjugate gradients went, in ``I`` iterations, and why they stopped.

    Attributes:
        solution: The last ``theta_I - theta_0``, shape ``[P]``.
        magnitudes: Update magnitudes ``tau_p`` along unit directions, shape ``[I]``.
        residuals: ``||grad q(theta_p)||`` on the data that set the magnitudes, shape ``[I + 1]``.
        status: Converged, out of iterations, or a direction without positive curvature was met
            (the last iterate is the one before it).
        directions: Unit search directions as columns, shape ``[P, I]``, or ``None`` if not kept.
        n_products: Products with curvatures, of both mini-batches together.
        single_batch_magnitudes: For debiased CG the magnitudes of the mini-batch that chose the
            directions, shape ``[I]``; else ``None``.
        single_batch_residuals: For debiased CG the residuals of that mini-batch, ``[I + 1]``.
    """

    solution: Tensor
    magnitudes: Tensor
    residuals: Tensor
    status: CGStatus
    directions: Tensor | None
    n_products: int
    single_batch_magnitudes: Tensor | None = None
    single_batch_residuals: Tensor | None = None

    @property
    def unit_directions(self) -> Tensor:
        """The search directions, ``[P, I]``, or an error if they were not kept."""
        if self.directions is None:
            raise ValueError(
                "Expected a solution with its directions, got keep_directions=False. "
                "Only `solution`, the last iterate, is known. Remedy: keep_directions=True."
            )
        return self.directions

    @property
    def iterates(self) -> Tensor:
        """All ``theta_p - theta_0`` from ``p = 0``, as columns, shape ``[P, I + 1]``."""
        steps = self.unit_directions * self.magnitudes
        return torch.cat([torch.zeros_like(self.solution)[:, None], steps.cumsum(1)], 1)


@dataclass
class _SearchDirections:
    """The recursion of CG, one unit direction at a time; knows at the end why it stopped."""

    H: SymmetricOperator
    g: Tensor
    max_iter: int
    rtol: float
    damping: float
    preconditioner: Preconditioner
    magnitudes: list[Tensor] = field(default_factory=list)
    residuals: list[Tensor] = field(default_factory=list)
    status: CGStatus = CGStatus.MAX_ITERATIONS

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the unit direction ``d_p``, shape ``[P]``, and the magnitude ``tau_p``."""
        eps = torch.finfo(self.g.dtype).eps
        r = self.g.clone()
        self.residuals.append(r.norm())
        threshold = max(self.rtol, eps) * float(self.residuals[0])
        last: tuple[Tensor, Tensor, Tensor] | None = None  # s, H s and r^T z of the step before
        for p in range(self.max_iter + 1):
            if float(self.residuals[-1]) <= threshold:
                self.status = CGStatus.CONVERGED
                return
            if p == self.max_iter:
                return
            z = self.preconditioner(r)
            rz = r @ z
            if not float(rz) > 0:
                raise ValueError(
                    f"Expected a positive definite preconditioner, got r^T M^-1 r = "
                    f"{float(rz):.1e}. Remedy: check its sign and symmetry."
                )
            s = -z if last is None else -z + (rz / last[2]) * last[0]
            t = _damped_product(self.H, s, self.damping)
            if p == 1 and last is not None:
                _check_symmetric_pair(*last[:2], s, t)
            last = s, t, rz
            st = s @ t
            if float(st) <= eps * float(s.norm() * t.norm()):
                self.status = CGStatus.NEGATIVE_CURVATURE
                return
            alpha, length = rz / st, s.norm()
            self.magnitudes.append(alpha * length)
            yield s / length, self.magnitudes[-1]
            r += alpha * t
            self.residuals.append(r.norm())


def cg(
    H: SymmetricOperator,
    g: Tensor | None = None,
    *,
    max_iter: int = 30,
    rtol: float = 1e-5,
    damping: float = 0.0,
    preconditioner: Preconditioner | None = None,
    keep_directions: bool = True,
) -> CGSolution:
    """Minimise a quadratic by conjugate gradients: solve ``(H + damping I) x = -g``.

    Costs one product per iteration.

    Args:
        H: A :class:`Quadratic`, a curvlinops operator or a symmetric matrix, shape ``(P, P)``.
        g: Gradient at ``x = 0``, shape ``[P]``; ``None`` takes ``H.gradient``.
        max_iter: Largest number of iterations.
        rtol: Converged when ``||r_p|| <= rtol ||g||`` (never below the dtype's epsilon).
        damping: ``delta >= 0``, added to the diagonal of the curvature.
        preconditioner: Function ``r -> M^{-1} r`` with M symmetric positive definite.
        keep_directions: Keep all search directions (and so all iterates), or the last iterate only.

    Returns:
        The solution with its status. An indefinite operator is no error: the status says so, and
        the iterate before the direction of negative curvature is returned.

    Raises:
        ValueError: For mismatched shapes, numbers that are not finite, a non-symmetric operator or
            a preconditioner that is not positive definite.

    Example:
        >>> H, g = torch.diag(torch.tensor([1.0, 2.0])), torch.tensor([-1.0, -2.0])
        >>> result = cg(H, g)
        >>> result.solution, result.status.value
        (tensor([1.0000, 1.0000]), 'converged')
    """
    g = _check_problem(H, g, max_iter, rtol, damping)
    search = _SearchDirections(H, g, max_iter, rtol, damping, preconditioner or torch.clone)
    x, directions = torch.zeros_like(g), []
    for d, tau in search:
        x += tau * d
        if keep_directions:
            directions.append(d)
    count = len(search.magnitudes)
    return CGSolution(
        solution=x,
        magnitudes=_stack(search.magnitudes, g),
        residuals=torch.stack(search.residuals),
        status=search.status,
        directions=_columns(directions, g) if keep_directions else None,
        n_products=count + (search.status is CGStatus.NEGATIVE_CURVATURE),
    )


def debiased_cg(
    H: SymmetricOperator,
    H_tilde: SymmetricOperator,
    g: Tensor | None = None,
    g_tilde: Tensor | None = None,
    *,
    max_iter: int = 30,
    rtol: float = 1e-5,
    damping: float = 0.0,
    preconditioner: Preconditioner | None = None,
    keep_directions: bool = True,
    side_by_side: bool = True,
) -> CGSolution:
    """Conjugate gradients with directions from one mini-batch and magnitudes from another.

    Costs two products per iteration, one with each curvature. With the same mini-batch twice it is
    plain CG.

    Args:
        H: Curvature that makes the search directions, shape ``(P, P)``; a :class:`Quadratic`, a
            curvlinops operator or a symmetric matrix.
        H_tilde: Curvature of the other mini-batch, for the update magnitudes.
        g: Gradient that goes with ``H``, shape ``[P]``; ``None`` takes ``H.gradient``.
        g_tilde: Gradient that goes with ``H_tilde``; ``None`` takes ``H_tilde.gradient``.
        max_iter: Largest number of iterations.
        rtol: The directions end when the first mini-batch's residual has fallen by this factor.
        damping: ``delta >= 0``, added to the diagonal of both curvatures.
        preconditioner: Function ``r -> M^{-1} r`` for the search directions.
        keep_directions: Keep all search directions (and so all iterates), or the last iterate only.
        side_by_side: Alternate between the two mini-batches (two more vectors of memory), or make
            all directions first and multiply ``H_tilde`` onto them at once, in blocks.

    Returns:
        The solution; ``residuals`` are those of the second mini-batch.

    Raises:
        ValueError: As :func:`cg`.

    Example:
        >>> H, g = torch.diag(torch.tensor([1.0, 2.0])), torch.tensor([-1.0, -2.0])
        >>> debiased_cg(H, 2 * H, g, g).solution
        tensor([0.5000, 0.5000])
    """
    g = _check_problem(H, g, max_iter, rtol, damping)
    g_tilde = _check_problem(H_tilde, g_tilde, max_iter, rtol, damping)
    if g.shape != g_tilde.shape:
        raise ValueError(
            f"Expected two quadratics in one space, got {len(g)} and {len(g_tilde)} dimensions. "
            "Remedy: build both with the same model and the same trainable parameters."
        )
    search = _SearchDirections(H, g, max_iter, rtol, damping, preconditioner or torch.clone)
    if side_by_side:
        pairs: Iterable[tuple[Tensor, Tensor]] = (
            (d, _damped_product(H_tilde, d, damping)) for d, _ in search
        )
    else:
        D = _columns([d for d, _ in search], g)
        HD = _damped_product(H_tilde, D, damping) if D.shape[1] else D
        pairs = zip(D.unbind(1), HD.unbind(1), strict=True)

    eps = torch.finfo(g.dtype).eps
    x, r = torch.zeros_like(g), g_tilde.clone()
    directions, magnitudes, residuals = [], [], [r.norm()]
    stopped = False
    for d, t in pairs:
        curvature = d @ t
        if float(curvature) <= eps * float(t.norm()):
            stopped = True
            break
        tau = -(d @ r) / curvature
        x += tau * d
        r += tau * t
        magnitudes.append(tau)
        residuals.append(r.norm())
        if keep_directions:
            directions.append(d)
    count = len(magnitudes)
    made = len(search.magnitudes)  # directions, each of which cost a product on both mini-batches
    return CGSolution(
        solution=x,
        magnitudes=_stack(magnitudes, g),
        residuals=torch.stack(residuals),
        status=CGStatus.NEGATIVE_CURVATURE if stopped else search.status,
        directions=_columns(directions, g) if keep_directions else None,
        n_products=2 * made + (search.status is CGStatus.NEGATIVE_CURVATURE),
        single_batch_magnitudes=_stack(search.magnitudes[:count], g),
        single_batch_residuals=torch.stack(search.residuals[: count + 1]),
    )


def _damped_product(H: SymmetricOperator, V: Tensor, damping: float) -> Tensor:
    """Multiply ``H + damping I`` onto ``V``, and refuse what is not finite."""
    HV = H @ V
    if damping:
        HV = HV + damping * V
    if not torch.isfinite(HV).all():
        raise ValueError(
            "Expected a finite product with the curvature, got NaN or infinity. "
            "Remedy: look for NaN in the model and the data, or add damping."
        )
    return HV


def _check_problem(
    H: SymmetricOperator, g: Tensor | None, max_iter: int, rtol: float, damping: float
) -> Tensor:
    """Return the gradient after all checks that cost no product."""
    if g is None:
        g = getattr(H, "gradient", None)
        if not isinstance(g, Tensor):
            raise ValueError(
                f"Expected a gradient, got None and a {type(H).__name__} without one. Remedy: pass "
                "it, or a Quadratic, which has its own."
            )
    if g.ndim != 1 or tuple(H.shape) != (len(g), len(g)):
        raise ValueError(
            f"Expected a gradient [P] and a curvature (P, P), got {tuple(g.shape)} and "
            f"{tuple(H.shape)}. Remedy: pass a flat gradient and the curvature of the same space."
        )
    if not torch.isfinite(g).all():
        raise ValueError(
            "Expected a finite gradient, got NaN or infinity. Remedy: check loss and data."
        )
    if max_iter < 1 or not rtol >= 0 or not 0 <= damping < float("inf"):
        raise ValueError(
            f"Expected max_iter >= 1, rtol >= 0 and a finite damping >= 0, got {max_iter}, {rtol} "
            f"and {damping}. Remedy: pass values in these ranges; 0 switches rtol or damping off."
        )
    return g


def _check_symmetric_pair(s: Tensor, t: Tensor, s_next: Tensor, t_next: Tensor) -> None:
    """Raise unless ``s^T (H s') = (H s)^T s'`` up to rounding, for products CG needs anyway."""
    gap = float((s @ t_next - t @ s_next).abs())
    size = float(s.norm() * t_next.norm() + t.norm() * s_next.norm())
    if gap > torch.finfo(s.dtype).eps ** 0.5 * size:
        raise ValueError(
            f"Expected a symmetric operator, got s^T H s' that differs from s'^T H s by {gap:.1e} "
            f"(relative {gap / size:.1e}). Remedy: symmetrise it, e.g. (H + H^T) / 2."
        )


def _stack(scalars: list[Tensor], like: Tensor) -> Tensor:
    """Stack scalars, of which there may be none."""
    return torch.stack(scalars) if scalars else like.new_zeros(0)


def _columns(vectors: list[Tensor], like: Tensor) -> Tensor:
    """Stack vectors as columns, of which there may be none."""
    return torch.stack(vectors, 1) if vectors else like.new_zeros(len(like), 0)
