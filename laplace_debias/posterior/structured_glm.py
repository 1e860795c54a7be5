"""The linearised predictive as laplace-torch's classes call it."""

from __future__ import annotations

import torch
from laplace.utils.enums import Likelihood
from torch import Tensor

from laplace_debias.network.capture import Inputs
from laplace_debias.predictive.predictions import Prediction, glm_predictions
from laplace_debias.predictive.predictor import DEFAULT_MEMORY_BUDGET, StructuredPredictor


class StructuredGLM:
    """Mix-in before a Kron class of laplace-torch: ``la(x)`` without forming Jacobians.

    It replaces the two methods that everything with ``pred_type="glm"`` goes through. A class in
    front of it may set ``_generator`` for the duration of a call; it is used for all samples.

    Attributes:
        predictive_method: How ``la(x)`` gets its moments: ``"exact"``, ``"samples"`` (of the
            weights, through the linearised network: for very many outputs), or ``"auto"``.
        memory_budget: Bytes that a prediction should stay within.
    """

    predictive_method: str = "exact"
    memory_budget: int = DEFAULT_MEMORY_BUDGET
    _generator: torch.Generator | None = None

    def _glm_predictive_distribution(
        self, X: Inputs, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return exact output means and (co)variances in laplace-torch's shapes."""
        predictor = StructuredPredictor(self, memory_budget=self.memory_budget)
        result = predictor(X, diagonal_output and not joint, joint)
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
        options = (link_approx, n_samples, diagonal_output)
        if likelihood != Likelihood.REGRESSION:
            return self._glm_prediction(x, False, *options)[0].exp()
        if joint:
            return self._glm_predictive_distribution(x, joint=True)
        return self._glm_prediction(x, True, *options)

    def _glm_prediction(
        self, x: Inputs, regression: bool, link_approx: str, n_samples: int, diagonal_output: bool
    ) -> Prediction:
        """Return ``(log-probabilities,)``, or for regression the output means and (co)variances."""
        (prediction,) = glm_predictions(
            StructuredPredictor(self, memory_budget=self.memory_budget),
            x,
            regression=regression,
            link_approx=link_approx,
            n_samples=n_samples,
            method=self.predictive_method,
            generator=self._generator,
            diagonal_output=diagonal_output,
        )
        return prediction

    def functional_variance_fast(self, X: Inputs) -> tuple[Tensor, Tensor]:
        """Return output means and variances ``[n, C]`` (laplace-torch raises for Kron)."""
        return self._glm_predictive_distribution(X, diagonal_output=True)
