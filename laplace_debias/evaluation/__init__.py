"""Is the uncertainty any good? Metrics, reports, sweeps over the prior precision."""

from laplace_debias.evaluation.distance import far_inputs, posterior_distance
from laplace_debias.evaluation.evaluate import EvaluationError, evaluate
from laplace_debias.evaluation.grid_search import gridsearch_prior_precision
from laplace_debias.evaluation.metrics import ECE, NLL, Accuracy, Brier, MeanEntropy
from laplace_debias.evaluation.predictors import run_sweep
from laplace_debias.evaluation.regression import MSE, RMSE, Coverage, GaussianNLL
from laplace_debias.evaluation.reports import (
    CalibrationReport,
    ClassificationReport,
    OODReport,
    RegressionReport,
    ReliabilityBins,
)
from laplace_debias.evaluation.streams import CalibrationMetrics, RegressionMetrics
from laplace_debias.evaluation.sweep import default_grid, sweep_prior_precision
from laplace_debias.evaluation.sweep_result import SweepResult
from laplace_debias.evaluation.table import fresh_metrics, metric_table

__all__ = [
    "ECE",
    "MSE",
    "NLL",
    "RMSE",
    "Accuracy",
    "Brier",
    "CalibrationMetrics",
    "CalibrationReport",
    "ClassificationReport",
    "Coverage",
    "EvaluationError",
    "GaussianNLL",
    "MeanEntropy",
    "OODReport",
    "RegressionMetrics",
    "RegressionReport",
    "ReliabilityBins",
    "SweepResult",
    "default_grid",
    "evaluate",
    "far_inputs",
    "fresh_metrics",
    "gridsearch_prior_precision",
    "metric_table",
    "posterior_distance",
    "run_sweep",
    "sweep_prior_precision",
]
