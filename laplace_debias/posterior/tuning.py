"""Prior-precision tuning for the debiased classes: laplace-torch's words, the sweep's one pass."""

from __future__ import annotations

from typing import Any

import torch
from laplace.utils.enums import TuningMethod

from laplace_debias.evaluation.grid_search import Loss, gridsearch_prior_precision

__all__ = ["Tuning"]


class Tuning:
    """Mix-in before laplace-torch's class that runs its grid search on the sweep."""

    def optimize_prior_precision(
        self,
        pred_type: str = "glm",
        method: str = "marglik",
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: float | torch.Tensor = 1.0,
        prior_structure: str = "scalar",
        val_loader: Any = None,
        loss: Loss | None = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: str = "probit",
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float = 10.0,
    ) -> None:
        """Choose the prior precision, as laplace-torch does.

        ``method="gridsearch"`` evaluates all grid points in one pass over the data, each with a
        fresh metric, never chooses NaN, and leaves the prior precision as it was if anything
        raises. ``method="marglik"`` is laplace-torch's.

        Args:
            pred_type: ``"glm"`` or ``"nn"`` (one pass per grid point).
            method: ``"marglik"`` or ``"gridsearch"``.
            n_steps: Gradient steps on the marginal likelihood.
            lr: Learning rate of these steps.
            init_prior_prec: Where these steps start.
            prior_structure: ``"scalar"`` or ``"layerwise"``, for the marginal likelihood.
            val_loader: Validation data for the grid search.
            loss: A ``torchmetrics.Metric`` or a function; by default the negative log likelihood,
                for regression that of the Gaussian predictive.
            log_prior_prec_min: Exponent of the smallest prior precision of the grid.
            log_prior_prec_max: Exponent of the largest.
            grid_size: Number of grid points.
            link_approx: Link approximation of the grid search; use the one you predict with.
            n_samples: Number of samples, where there are any.
            verbose: Whether to print the result.
            progress_bar: Whether to show one.
            log_prior_prec_base: Base of the exponents.

        Raises:
            AttributeError: Before ``fit``.
            ValueError: If there is no validation loader, or an argument is unknown.
        """
        self._check_H_init()
        before = self.prior_precision
        try:
            if method == TuningMethod.GRIDSEARCH:
                result = gridsearch_prior_precision(
                    self,
                    val_loader,
                    pred_type=pred_type,
                    loss=loss,
                    log_prior_prec_min=log_prior_prec_min,
                    log_prior_prec_max=log_prior_prec_max,
                    grid_size=grid_size,
                    log_prior_prec_base=log_prior_prec_base,
                    link_approx=link_approx,
                    n_samples=n_samples,
                    progress_bar=progress_bar,
                )
                self.prior_precision = result.best("loss")
                if verbose:
                    print(f"Optimized prior precision is {self.prior_precision}.")
            else:
                super().optimize_prior_precision(
                    pred_type,
                    method,
                    n_steps,
                    lr,
                    init_prior_prec,
                    prior_structure,
                    val_loader,
                    verbose=verbose,
                    progress_bar=progress_bar,
                )
        except BaseException:
            self.prior_precision = before
            raise
