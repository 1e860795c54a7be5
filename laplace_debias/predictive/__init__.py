"""Predictions of the linearised and of sampled networks, for many prior precisions at once."""

from laplace_debias.predictive.linearized import linearized_predictive
from laplace_debias.predictive.predictor import (
    LinearizedPredictive,
    SharedPredictor,
    StructuredPredictor,
)

__all__ = [
    "LinearizedPredictive",
    "SharedPredictor",
    "StructuredPredictor",
    "linearized_predictive",
]
