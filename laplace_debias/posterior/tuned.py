"""What is chosen on validation data: the prior precision and the temperature of the logits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace_debias.evaluation.tuning import TuningResult, check_logit_temperature, tune

__all__ = ["Tuned"]

if TYPE_CHECKING:  # the class that it comes before in the bases
    from laplace.baselaplace import KronLaplace as _Base
else:
    _Base = object


class Tuned(_Base):
    """The part of a posterior that validation data decide."""

    _logit_temperature: float = 1.0

    @property
    def logit_temperature(self) -> float:
        """T, by which logits are divided: their means by T, their (co)variances by its square.

        It is 1 unless set or tuned, and unlike laplace-torch's ``temperature`` (which multiplies
        the posterior covariance) leaves the posterior over weights alone. Outputs as such
        (``functional_samples``, ``output_moments``), rewards and regressions are not divided.
        """
        return self._logit_temperature

    @logit_temperature.setter
    def logit_temperature(self, value: float) -> None:
        check_logit_temperature(value)
        self._logit_temperature = float(value)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Class probabilities of given logits, ``softmax(f / T)``.

        Args:
            outputs: Logits ``[..., C]``.
        """
        return torch.softmax(outputs / self.logit_temperature, dim=-1)

    def tune(
        self, val_loader: Iterable[Any], objective: str = "nll", **options: Any
    ) -> TuningResult:
        """Choose prior precision and ``logit_temperature`` on validation data, and take them.

        Args:
            val_loader: Validation data; training data would choose far too large a precision.
            objective: What to minimise, or maximise: ``"nll"``, or another metric's name.
            **options: Of :func:`laplace_debias.evaluation.tuning.tune`.

        Returns:
            What was tried.
        """
        result = tune(self, val_loader, objective, **options)
        self.prior_precision = result.prior_precision
        self.logit_temperature = result.logit_temperature
        return result
