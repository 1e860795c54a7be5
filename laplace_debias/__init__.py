"""Debiased K-FAC Laplace approximations from mini-batches, for laplace-torch."""

from laplace_debias.comparison.compare import compare
from laplace_debias.comparison.options import CustomMethod, Prediction, Reference, Work
from laplace_debias.comparison.result import ComparisonResult
from laplace_debias.debias.bias import CurvatureBias, LayerBias
from laplace_debias.debias.options import CrossfitOptions
from laplace_debias.evaluation.evaluate import EvaluationError, evaluate
from laplace_debias.evaluation.reports import (
    CalibrationReport,
    ClassificationReport,
    RegressionReport,
)
from laplace_debias.evaluation.sweep import default_grid, sweep_prior_precision
from laplace_debias.evaluation.sweep_result import SweepResult
from laplace_debias.kfac.backend import HookEF, HookGGN
from laplace_debias.network.ownership import freeze_unsupported
from laplace_debias.posterior.factory import Laplace
from laplace_debias.posterior.kron import DebiasedKronLaplace, DebiasedKronLLLaplace
from laplace_debias.predictive.predictor import LinearizedPredictive, linearized_predictive

__all__ = [
    # the posterior
    "Laplace",
    "DebiasedKronLaplace",
    "DebiasedKronLLLaplace",
    "CrossfitOptions",
    "HookGGN",
    "HookEF",
    # the model
    "freeze_unsupported",
    # prediction and prior precision
    "linearized_predictive",
    "LinearizedPredictive",
    "sweep_prior_precision",
    "SweepResult",
    "default_grid",
    # evaluation
    "evaluate",
    "CalibrationReport",
    "ClassificationReport",
    "RegressionReport",
    "EvaluationError",
    "compare",
    "ComparisonResult",
    "CustomMethod",
    "Prediction",
    "Reference",
    "Work",
    # diagnosis
    "CurvatureBias",
    "LayerBias",
]

__version__ = "0.1.0"
