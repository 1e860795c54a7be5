"""Debiased K-FAC Laplace approximations from mini-batches, for laplace-torch."""

from laplace_debias.curvature_bias import CurvatureBias, LayerBias
from laplace_debias.factory import Laplace
from laplace_debias.kron_laplace import DebiasedKronLaplace, DebiasedKronLLLaplace
from laplace_debias.layers import freeze_unsupported

__all__ = [
    # the posterior
    "Laplace",
    "DebiasedKronLaplace",
    "DebiasedKronLLLaplace",
    # the model
    "freeze_unsupported",
    # diagnosis
    "CurvatureBias",
    "LayerBias",
]

__version__ = "0.1.0"
