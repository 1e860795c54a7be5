"""Is the uncertainty any good? Metrics, reports, sweeps over the prior precision."""

from laplace_debias.evaluation.calibration import AdaptiveECE, ClasswiseECE
from laplace_debias.evaluation.distance import far_inputs, posterior_distance
from laplace_debias.evaluation.evaluate import EvaluationError, evaluate
from laplace_debias.evaluation.gaussian_streams import RegressionMetrics
from laplace_debias.evaluation.grid_search import gridsearch_prior_precision
from laplace_debias.evaluation.metrics import ECE, NLL, Accuracy, Brier, MeanEntropy
from laplace_debias.evaluation.predictors import run_sweep
from laplace_debias.evaluation.regression import CRPS, MSE, RMSE, Coverage, GaussianNLL, Sharpness
from laplace_debias.evaluation.reports import (
    CalibrationReport,
    ClassificationReport,
    OODReport,
    RegressionReport,
    ReliabilityBins,
)
from laplace_debias.evaluation.selective import AURC, RiskCoverage, risk_coverage
from laplace_debias.evaluation.streams import CalibrationMetrics
from laplace_debias.evaluation.sweep import sweep_prior_precision
from laplace_debias.evaluation.sweep_result import SweepResult
from laplace_debias.evaluation.table import fresh_metrics, metric_table
from laplace_debias.evaluation.tuning import tune
from laplace_debias.evaluation.tuning_result import LayerwiseTrial, TuningResult
from laplace_debias.evaluation.uncertainty import Uncertainty, mutual_information, uncertainty
from laplace_debias.predictive.eigenblocks import default_grid

__all__ = [
    "AURC",
    "CRPS",
    "ECE",
    "MSE",
    "NLL",
    "RMSE",
    "Accuracy",
    "AdaptiveECE",
    "Brier",
    "CalibrationMetrics",
    "CalibrationReport",
    "ClassificationReport",
    "ClasswiseECE",
    "Coverage",
    "EvaluationError",
    "GaussianNLL",
    "LayerwiseTrial",
    "MeanEntropy",
    "OODReport",
    "RegressionMetrics",
    "RegressionReport",
    "ReliabilityBins",
    "RiskCoverage",
    "Sharpness",
    "SweepResult",
    "TuningResult",
    "Uncertainty",
    "default_grid",
    "evaluate",
    "far_inputs",
    "fresh_metrics",
    "gridsearch_prior_precision",
    "metric_table",
    "mutual_information",
    "risk_coverage",
    "posterior_distance",
    "run_sweep",
    "sweep_prior_precision",
    "tune",
    "uncertainty",
]
