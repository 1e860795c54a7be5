"""The shape of a mini-batch quadratic: its bias along directions, and debiased CG."""

from laplace_debias.data.chunks import gather, partition
from laplace_debias.quadratics.batch_sizes import BatchSizeBias, bias_by_batch_size
from laplace_debias.quadratics.bias import DirectionalBias, directional_bias
from laplace_debias.quadratics.cg import CGSolution, CGStatus, cg, debiased_cg
from laplace_debias.quadratics.chosen import (
    RecordedProducts,
    choose_directions,
    kept_directions,
)
from laplace_debias.quadratics.directions import (
    Eigenpairs,
    normalize_directions,
    top_eigenvectors,
)
from laplace_debias.quadratics.overlaps import (
    EigenspaceOverlaps,
    eigenspace_overlaps,
    overlap_study,
)
from laplace_debias.quadratics.quadratic import Quadratic
from laplace_debias.quadratics.report import CurvatureBiasReport, curvature_bias_report
from laplace_debias.quadratics.restriction import RestrictedQuadratic
from laplace_debias.quadratics.studies import (
    BiasSeries,
    bias_by_model_size,
    bias_over_training,
    relative_biases,
)
from laplace_debias.quadratics.trajectory import TrajectoryMetrics, evaluate_trajectory

__all__ = [
    # the quadratic
    "Quadratic",
    "RestrictedQuadratic",
    "gather",
    "partition",
    # directions and solvers
    "CGSolution",
    "CGStatus",
    "Eigenpairs",
    "RecordedProducts",
    "cg",
    "choose_directions",
    "debiased_cg",
    "kept_directions",
    "normalize_directions",
    "top_eigenvectors",
    "TrajectoryMetrics",
    "evaluate_trajectory",
    # studies of the bias
    "BatchSizeBias",
    "BiasSeries",
    "DirectionalBias",
    "EigenspaceOverlaps",
    "bias_by_batch_size",
    "bias_by_model_size",
    "bias_over_training",
    "directional_bias",
    "eigenspace_overlaps",
    "overlap_study",
    "relative_biases",
    # the one-call diagnosis
    "CurvatureBiasReport",
    "curvature_bias_report",
]
