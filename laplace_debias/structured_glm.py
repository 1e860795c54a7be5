"""The linearised predictive as laplace-torch's classes call it."""

from __future__ import annotations

import torch
from laplace.utils.enums import Likelihood
from torch import Tensor

from laplace_debias.capture import Inputs
from laplace_debias.links import check_link, class_probabilities, needs_diagonal_only
from laplace_debias.predictive import linearized_predictive


class StructuredGLM:
    """Mix-in before a Kron class of laplace-torch: ``la(x)`` without forming Jacobians.

    It replaces the two methods that everything with ``pred_type="glm"`` goes through. A class in
    front of it may set ``_generator`` for the duration of a call; it is used for the samples of
    ``link_approx="mc"``.
    """

    _generator: torch.Generator | None = None

    def _glm_predictive_distribution(
        self, X: Inputs, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return output means and (co)variances in laplace-torch's shapes."""
        result = linearized_predictive(
            self, X, joint=joint, diagonal_output=diagonal_output and not joint
        )
        return result.mean.flatten() if joint else result.mean, result.covariance

    def _glm_forward_call(
        self,
        x: Inputs,
        likelihood: Likelihood | str,
        joint: bool = False,
        link_approx: str = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return class probabilities, or for regression the output means and (co)variances."""
        if likelihood == Likelihood.REGRESSION:
            return self._glm_predictive_distribution(x, joint, diagonal_output)
        check_link(link_approx)
        diagonal = needs_diagonal_only(link_approx, diagonal_output)
        mean, covariance = self._glm_predictive_distribution(x, diagonal_output=diagonal)
        return class_probabilities(
            mean,
            covariance,
            link_approx,
            diagonal=diagonal,
            n_samples=n_samples,
            generator=self._generator,
        )

    def functional_variance_fast(self, X: Inputs) -> tuple[Tensor, Tensor]:
        """Return output means and variances ``[n, C]`` (laplace-torch raises for Kron)."""
        return self._glm_predictive_distribution(X, diagonal_output=True)
