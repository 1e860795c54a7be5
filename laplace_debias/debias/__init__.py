"""From factors to a spectrum: directions from some data, curvatures from others."""

from laplace_debias.debias.auto import fit_auto
from laplace_debias.debias.bias import CurvatureBias, LayerBias, curvature_bias
from laplace_debias.debias.crossfit import fit_crossfit
from laplace_debias.debias.curvature_recorder import CurvatureRecorder
from laplace_debias.debias.eigen import eigh_float64, null_tolerance
from laplace_debias.debias.expected_bias import (
    MIN_EFFECTIVE_ROWS,
    ExpectedBias,
    FactorBias,
    expected_bias,
    expected_overestimation,
)
from laplace_debias.debias.few_rows import crossfit_rows, few_rows_from
from laplace_debias.debias.fold_blocks import crossfit_kron
from laplace_debias.debias.folds import crossfit_factor, isotonic
from laplace_debias.debias.inverse import inverse_inflation, resolvent_inflation
from laplace_debias.debias.options import AutoOptions, CrossfitOptions
from laplace_debias.debias.pairs import draw_pairs, pair_scores
from laplace_debias.debias.sampling import (
    DEFAULT_SHARE,
    WeightedDraw,
    curvature_order,
    draw_weighted,
    even_parts,
)
from laplace_debias.debias.span import null_floor, null_tail, outside_span, span_of
from laplace_debias.debias.spectrum import FitResult, decompose, reevaluate
from laplace_debias.debias.transport import carried, pixel_block
from laplace_debias.debias.two_batch import fit_factors, fit_single, fit_two_batch
from laplace_debias.kfac.counts import FitReport
from laplace_debias.kfac.thin import curvature_along

__all__ = [
    "MIN_EFFECTIVE_ROWS",
    "AutoOptions",
    "CrossfitOptions",
    "CurvatureBias",
    "CurvatureRecorder",
    "DEFAULT_SHARE",
    "ExpectedBias",
    "FactorBias",
    "FitReport",
    "FitResult",
    "LayerBias",
    "WeightedDraw",
    "carried",
    "crossfit_factor",
    "crossfit_kron",
    "crossfit_rows",
    "curvature_along",
    "curvature_bias",
    "curvature_order",
    "decompose",
    "draw_pairs",
    "draw_weighted",
    "eigh_float64",
    "even_parts",
    "expected_bias",
    "expected_overestimation",
    "few_rows_from",
    "fit_auto",
    "fit_crossfit",
    "fit_factors",
    "fit_single",
    "fit_two_batch",
    "inverse_inflation",
    "isotonic",
    "null_floor",
    "null_tail",
    "null_tolerance",
    "outside_span",
    "pair_scores",
    "pixel_block",
    "reevaluate",
    "resolvent_inflation",
    "span_of",
]
