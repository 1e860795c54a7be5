"""Debiased K-FAC Laplace approximations from mini-batches, for laplace-torch."""

from laplace_debias.calibration import EvaluationError, evaluate
from laplace_debias.compare import compare
from laplace_debias.comparison import ComparisonResult
from laplace_debias.crossfit_options import CrossfitOptions
from laplace_debias.curvature_bias import CurvatureBias, LayerBias
from laplace_debias.factory import Laplace
from laplace_debias.hook_backend import HookEF, HookGGN
from laplace_debias.kron_laplace import DebiasedKronLaplace, DebiasedKronLLLaplace
from laplace_debias.layers import freeze_unsupported
from laplace_debias.predictive import LinearizedPredictive, linearized_predictive
from laplace_debias.reports import CalibrationReport, ClassificationReport, RegressionReport
from laplace_debias.sweep import default_grid, sweep_prior_precision
from laplace_debias.sweep_result import SweepResult

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
    # diagnosis
    "CurvatureBias",
    "LayerBias",
]

__version__ = "0.1.0"
