"""The network as it is: left as found, its parameters' owners, recorded calls, its loss."""

from laplace_debias.network.freezing import (
    FreezeSummary,
    check_supported,
    freeze_unsupported,
    unsupported_parameters,
)
from laplace_debias.network.layers import KFAC_TYPES, KFACLayer
from laplace_debias.network.loss import Likelihood, curvature_scores, mean_loss_hessian
from laplace_debias.network.model_check import ModelCheck, check_model
from laplace_debias.network.parametrized import bake_parametrizations
from laplace_debias.network.preserve import evaluation_mode, preserved
from laplace_debias.network.vectors import (
    FISHERS,
    SAMPLERS,
    Fisher,
    Sampler,
    backward_vectors,
    sampled_hessian_root,
    softmax_hessian_root,
)
from laplace_debias.network.verify import LayerCheck

__all__ = [
    "FISHERS",
    "Fisher",
    "FreezeSummary",
    "KFACLayer",
    "KFAC_TYPES",
    "LayerCheck",
    "Likelihood",
    "ModelCheck",
    "SAMPLERS",
    "Sampler",
    "backward_vectors",
    "bake_parametrizations",
    "check_model",
    "check_supported",
    "curvature_scores",
    "evaluation_mode",
    "freeze_unsupported",
    "mean_loss_hessian",
    "preserved",
    "sampled_hessian_root",
    "softmax_hessian_root",
    "unsupported_parameters",
]
