"""One page for your own model, with a recommendation; needs the extra ``plots``."""

from laplace_debias.reporting.predictions import Predicted, predict
from laplace_debias.reporting.recommend import Recommendation, recommend
from laplace_debias.reporting.report import report
from laplace_debias.reporting.sections import Report

__all__ = ["Predicted", "Recommendation", "Report", "predict", "recommend", "report"]
