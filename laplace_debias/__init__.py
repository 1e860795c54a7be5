"""Debiased K-FAC Laplace approximations from mini-batches, for laplace-torch."""

try:
    import torchmetrics  # noqa: F401  imports torchvision where there is one
except RuntimeError as error:
    if "torchvision" not in str(error):
        raise
    raise ImportError(
        "Expected a torchvision that belongs to this torch, or none, got one that does not load "
        f"({error}). Remedy: `pip uninstall torchvision`, which this library does not need, or "
        "install matching versions of both, `pip install --upgrade torch torchvision`."
    ) from None  # the cause stands in the message

from laplace_debias.comparison import (
    ComparisonResult,
    CustomMethod,
    Prediction,
    Reference,
    Work,
    compare,
)
from laplace_debias.debias import (
    AutoOptions,
    CrossfitOptions,
    CurvatureBias,
    CurvatureRecorder,
    ExpectedBias,
    FactorBias,
    FitReport,
    LayerBias,
)
from laplace_debias.evaluation import (
    CalibrationReport,
    ClassificationReport,
    EvaluationError,
    RegressionReport,
    SweepResult,
    TuningResult,
    Uncertainty,
    default_grid,
    evaluate,
    far_inputs,
    posterior_distance,
    sweep_prior_precision,
    uncertainty,
)
from laplace_debias.kfac import HookEF, HookGGN
from laplace_debias.network import (
    FreezeSummary,
    LayerCheck,
    ModelCheck,
    bake_parametrizations,
    check_model,
    freeze_unsupported,
)
from laplace_debias.posterior import (
    DebiasedKronLaplace,
    DebiasedKronLLLaplace,
    Laplace,
    prior_precision_from_weight_decay,
)
from laplace_debias.predictive import LinearizedPredictive, linearized_predictive

__all__ = [
    # the posterior
    "Laplace",
    "DebiasedKronLaplace",
    "DebiasedKronLLLaplace",
    "AutoOptions",
    "CrossfitOptions",
    "FitReport",
    "CurvatureRecorder",
    "HookGGN",
    "HookEF",
    # the model
    "check_model",
    "ModelCheck",
    "LayerCheck",
    "freeze_unsupported",
    "bake_parametrizations",
    "FreezeSummary",
    # prediction and prior precision
    "linearized_predictive",
    "LinearizedPredictive",
    "sweep_prior_precision",
    "SweepResult",
    "default_grid",
    "prior_precision_from_weight_decay",
    "TuningResult",
    # evaluation
    "evaluate",
    "CalibrationReport",
    "ClassificationReport",
    "RegressionReport",
    "EvaluationError",
    "uncertainty",
    "Uncertainty",
    "posterior_distance",
    "far_inputs",
    "compare",
    "ComparisonResult",
    "CustomMethod",
    "Prediction",
    "Reference",
    "Work",
    # diagnosis
    "CurvatureBias",
    "LayerBias",
    "ExpectedBias",
    "FactorBias",
]

__version__ = "0.1.0"
