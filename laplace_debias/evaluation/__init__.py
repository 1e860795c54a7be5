"""Is the uncertainty any good? Metrics, reports, sweeps over the prior precision."""

from laplace_debias.evaluation.evaluate import EvaluationError, evaluate
from laplace_debias.evaluation.reports import (
    CalibrationReport,
    ClassificationReport,
    OODReport,
    RegressionReport,
    ReliabilityBins,
)
from laplace_debias.evaluation.sweep import default_grid, run_sweep, sweep_prior_precision
from laplace_debias.evaluation.sweep_result import SweepResult
from laplace_debias.evaluation.table import fresh_metrics

__all__ = [
    "CalibrationReport",
    "ClassificationReport",
    "EvaluationError",
    "OODReport",
    "RegressionReport",
    "ReliabilityBins",
    "SweepResult",
    "default_grid",
    "evaluate",
    "fresh_metrics",
    "run_sweep",
    "sweep_prior_precision",
]
