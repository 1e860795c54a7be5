"""Predictions of the linearised and of sampled networks, for many prior precisions at once."""

from laplace_debias.predictive.predictor import (
    LinearizedPredictive,
    SharedPredictor,
    StructuredPredictor,
    linearized_predictive,
)

__all__ = [
    "LinearizedPredictive",
    "SharedPredictor",
    "StructuredPredictor",
    "linearized_predictive",
]
