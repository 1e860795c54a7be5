"""laplace-torch's classes, fitted on few data and debiased."""

from laplace_debias.posterior.from_factors import fit_from_factors
from laplace_debias.posterior.kron import DebiasedKronLaplace, DebiasedKronLLLaplace, Laplace
from laplace_debias.posterior.weight_decay import prior_precision_from_weight_decay

__all__ = [
    "DebiasedKronLLLaplace",
    "DebiasedKronLaplace",
    "Laplace",
    "fit_from_factors",
    "prior_precision_from_weight_decay",
]
