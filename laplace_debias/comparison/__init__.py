"""Methods against each other, at equal budgets and over many draws."""

from laplace_debias.comparison.compare import compare
from laplace_debias.comparison.gaps import Gap
from laplace_debias.comparison.options import CustomMethod, Fit, Prediction, Reference, Work
from laplace_debias.comparison.result import ComparisonResult
from laplace_debias.comparison.rows import ComparisonRow, Summary

__all__ = [
    "ComparisonResult",
    "ComparisonRow",
    "CustomMethod",
    "Gap",
    "Prediction",
    "Reference",
    "Fit",
    "Summary",
    "Work",
    "compare",
]
