"""A quadratic restricted to the span of a few directions: the plane of a contour plot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RestrictedQuadratic:
    r"""The quadratic ``tau -> q(theta_0 + D tau)`` for directions ``D`` of shape ``[P, K]``.

    .. math::
        q(\theta_0 + D \tau) = \tfrac{1}{2} \tau^\top [D^\top H D]\, \tau
        + \tau^\top [D^\top g] + c

    All brackets are computed once; then a value anywhere in the span costs nothing.

    Attributes:
        matrix: ``D^T H D``, shape ``[K, K]``.
        gradient: ``D^T g``, shape ``[K]``.
        constant: ``c``, a scalar tensor.

    Example:
        >>> q = RestrictedQuadratic(2 * torch.eye(2), torch.tensor([-2.0, 0.0]), torch.tensor(1.0))
        >>> q.value(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        tensor([0., 2.])
    """

    matrix: Tensor
    gradient: Tensor
    constant: Tensor

    def value(self, tau: Tensor) -> Tensor:
        """Evaluate the quadratic at coefficients ``tau``.

        Args:
            tau: Coefficients, shape ``[..., K]``.

        Returns:
            Values, shape ``[...]``.
        """
        if tau.shape[-1:] != self.gradient.shape:
            raise ValueError(
                f"Expected coefficients of shape [..., {len(self.gradient)}], "
                f"got {tuple(tau.shape)}. Remedy: pass one coefficient per direction."
            )
        quadratic = torch.einsum("...i,ij,...j->...", tau, self.matrix, tau)
        return 0.5 * quadratic + tau @ self.gradient + self.constant

    def curvatures(self) -> Tensor:
        """Return the directional curvatures ``d_p^T H d_p``, shape ``[K]``."""
        return self.matrix.diagonal()

    def slopes(self, steps: Tensor | None = None) -> Tensor:
        r"""Return the directional slopes at ``theta_0``, or along a path through the span.

        With ``steps`` the slope along ``d_p`` is taken where the path
        ``theta_p = theta_0 + sum_{j<p} steps_j d_j`` has come to:
        ``d_p^T (H (theta_p - theta_0) + g)``. No further product with ``H`` is needed.

        Args:
            steps: Update magnitudes of the path, shape ``[K]``.

        Returns:
            Slopes, shape ``[K]``.
        """
        if steps is None:
            return self.gradient
        return self.gradient + self.matrix.tril(-1) @ steps
