"""Kronecker factors of some data, from this package's engine or laplace-torch's backends."""

from laplace_debias.kfac.backend import HookEF, HookGGN
from laplace_debias.kfac.counts import FitCost, RowCount
from laplace_debias.kfac.engine import Engine, kfac_factors
from laplace_debias.kfac.factors import Block, Factors, merge
from laplace_debias.kfac.few_rows import KFAC_APPROXES, KFACApprox
from laplace_debias.kfac.upstream import BackendEngine

__all__ = [
    "BackendEngine",
    "Block",
    "Engine",
    "Factors",
    "FitCost",
    "HookEF",
    "HookGGN",
    "KFACApprox",
    "KFAC_APPROXES",
    "RowCount",
    "kfac_factors",
    "merge",
]
