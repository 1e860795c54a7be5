"""What the debiased posteriors share: fitting on roles, diagnosis, saving.

The maths is in :mod:`laplace_debias.kfac.factors` and :mod:`laplace_debias.debias.fitting`; this
wires it to laplace-torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from laplace.baselaplace import KronLaplace
from laplace.utils import Kron
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from laplace_debias.data.reading import role_batches, training_size, unpack
from laplace_debias.debias.bias import CurvatureBias, curvature_bias
from laplace_debias.debias.fitting import (
    Fitted,
    accumulate_roles,
    check_seen,
    fit_factors,
    scaled_loss,
)
from laplace_debias.kfac.factors import rebuild
from laplace_debias.kfac.upstream import factor_function
from laplace_debias.posterior.crossfitting import CrossFitting
from laplace_debias.posterior.predicting import Predicting
from laplace_debias.posterior.state import load_state, save_state
from laplace_debias.posterior.structured_glm import StructuredGLM
from laplace_debias.posterior.tuning import Tuning

__all__ = ["DebiasedPosterior", "debias_mode"]

TWO_BATCH, SINGLE, CROSSFIT = "two-batch", "single", "crossfit"


def debias_mode(debias: bool | str) -> str:
    """The name of a debiasing method.

    Args:
        debias: ``True`` or ``"two-batch"``, ``"crossfit"``, or ``"single"``.

    Returns:
        ``"two-batch"``, ``"crossfit"`` or ``"single"``.

    Raises:
        ValueError: For anything else.

    Example:
        >>> debias_mode(True)
        'two-batch'
    """
    if debias is True:
        return TWO_BATCH
    if isinstance(debias, str) and debias in (TWO_BATCH, SINGLE, CROSSFIT):
        return debias
    raise ValueError(
        "Expected `debias` to be True or 'two-batch' (directions from one mini-batch, curvatures "
        "from another), 'crossfit' (directions from all data drawn, curvatures from folds that "
        "did not choose them), 'single' (one mini-batch for both, biased) or False "
        f"(laplace-torch's own class), got {debias!r}. Remedy: `Laplace(model, ..., debias=True)`."
    )


def check_prior_precision(value: float | Tensor) -> None:
    """Raise unless a prior precision is positive and finite.

    Args:
        value: One number or several.

    Raises:
        ValueError: If one is not.

    Example:
        >>> check_prior_precision(1.0)
    """
    given = torch.as_tensor(value).detach()
    if not bool((torch.isfinite(given) & (given > 0)).all()):
        raise ValueError(
            f"Expected a positive, finite prior precision, got {value}. Remedy: pass e.g. 1.0."
        )


class DebiasedPosterior(CrossFitting, Predicting, Tuning, StructuredGLM):
    """What both debiased classes share; comes before laplace-torch's class in the bases."""

    _fitted: Fitted | None = None

    def fit(
        self,
        train_loader: Iterable[Any],
        override: bool = True,
        progress_bar: bool = False,
        *,
        curvature_loader: Iterable[Any] | None = None,
        n_data: int | None = None,
    ) -> None:
        r"""Fit the posterior on the mini-batches of one or two loaders.

        One loader: its first mini-batch gives the directions, its second the curvatures, and the
        rest is not read. Two loaders: all of ``train_loader`` gives the directions, all of
        ``curvature_loader`` the curvatures, of any two sizes. With ``debias="single"`` everything
        in ``train_loader`` gives both; hand over ``next(iter(train_loader))`` and ``n_data`` for
        one mini-batch. With ``debias="crossfit"`` the first ``n_folds`` mini-batches are the
        folds, unless the options given to the constructor say otherwise. The M data of each role
        stand for all N training data:

        .. math:: H = U \,\mathrm{diag}(\mathrm{diag}(U^\top K_2 U))\, U^\top, \qquad
                  K_1 = U \Lambda U^\top,

        with :math:`K_1, K_2` the K-FAC matrices of both roles, scaled by N / M. The loss that
        enters ``log_marginal_likelihood`` is scaled in the same way.

        The model is left as it was (laplace-torch's attribute ``output_size`` is set on it); if
        anything raises, this object is left as it was, too.

        Args:
            train_loader: A loader of mini-batches ``(X, y)`` or mappings, any iterable of them, or
                one mini-batch ``(X, y)``.
            override: Whether to forget earlier fits. With ``False`` the factors of each role are
                added to those of earlier fits, each with its own N, and decomposed again (all
                weights only).
            progress_bar: Whether to show one, advanced by mini-batches.
            curvature_loader: The data for the curvatures.
            n_data: N, by default ``len(train_loader.dataset)``.

        Raises:
            ValueError: If the loaders, targets or inputs do not fit; see the messages.
        """
        if curvature_loader is not None and self.debias != TWO_BATCH:
            raise ValueError(
                f"Expected no `curvature_loader` with debias={self.debias!r}, which takes all data "
                "from `train_loader`; got one. Remedy: use debias=True."
            )
        N = training_size(train_loader, curvature_loader, n_data)
        if self.debias == CROSSFIT:
            self._fit_crossfit(train_loader, N, override, progress_bar)
            return
        batches = role_batches(train_loader, curvature_loader, self.debias == TWO_BATCH)
        first = next(batches)
        self._prepare(first[1], override)
        past = None if override or self._fitted is None else (self._fitted, self.n_data)

        with factor_function(
            self._backend_cls,
            self.model,
            self._likelihood,
            last_layer=self._last_layer,
            backend_kwargs={
                "dict_key_x": self.dict_key_x,
                "dict_key_y": self.dict_key_y,
                **self._backend_kwargs,
            },
            kron_kwargs=self._asdl_fisher_kwargs,
        ) as factors_of:
            roles = accumulate_roles(
                itertools.chain([first], batches),
                lambda batch: factors_of(*unpack(batch, self._device, self.dict_key_y)),
                progress_bar,
            )
        check_seen(N, roles, disjoint=curvature_loader is None)
        fitted = fit_factors(roles, N, self.parameter_names, past)
        loss = scaled_loss(roles, N)
        if past is not None:
            loss, N = loss + self.loss, N + self.n_data
        self._finish(fitted, loss, N, next(iter(roles.values())).n_outputs)

    def _finish(self, fitted: Fitted, loss: Tensor, N: int, n_outputs: int) -> None:
        """Take over a fit whole, after everything that can raise."""
        self._set_posterior(fitted)
        self.loss, self.n_data, self.n_outputs = loss.to(self._dtype), N, n_outputs
        self.model.output_size = n_outputs  # read by laplace-torch's backends
        self.mean = parameters_to_vector(self._bayesian_parameters())
        if not self.enable_backprop:
            self.mean = self.mean.detach()

    def curvature_bias(self, fraction: float = 0.1) -> CurvatureBias:
        """How far the directions' data over-estimated their top curvature, per layer.

        Two mini-batches are one draw: where few data carry most of the curvature, the noise of
        the overall scale can hide the bias, and a ratio below 1 at both ends says just that.

        Args:
            fraction: Share of a layer's directions that counts as its top, and as its bottom.

        Returns:
            Biased and debiased mean curvatures at both ends; ``print`` shows a table.

        Raises:
            AttributeError: Before ``fit``.
            ValueError: With ``debias="single"``, where nothing was measured a second time.
        """
        self._check_H_init()
        if self.debias == SINGLE:
            raise ValueError(
                "Expected a debiased fit, got debias='single', which measures every curvature "
                "once, on the data that chose its direction. Remedy: fit with debias=True."
            )
        fitted = self._fitted
        return curvature_bias(self.parameter_names, fitted.lam, fitted.lam_tilde, fraction)

    def state_dict(self) -> dict[str, Any]:
        """The posterior as tensors, strings and numbers, for ``torch.load(weights_only=True)``."""
        self._check_H_init()
        return save_state(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a posterior without fitting.

        Args:
            state_dict: What ``state_dict()`` returned for the same architecture.

        Raises:
            ValueError: If class, method, likelihood or parameters differ from this object's.
        """
        load_state(self, state_dict)

    @property
    def H_facs(self) -> Kron | None:
        """Undecomposed factors of the posterior, as laplace-torch keeps them; built on demand."""
        if self._fitted is None:
            return None
        return Kron(rebuild(self.H.eigenvectors, self.H.eigenvalues))

    @H_facs.setter
    def H_facs(self, value: None) -> None:
        if value is not None:
            raise AttributeError(
                "Expected the factors to come from `fit` or `load_state_dict`, got an assignment. "
                "Remedy: call one of these."
            )

    def log_marginal_likelihood(self, *args: Any, **kwargs: Any) -> Tensor:
        """Log marginal likelihood of all N training data; see laplace-torch."""
        self._check_H_init()
        return super().log_marginal_likelihood(*args, **kwargs)

    @property
    def prior_precision(self) -> Tensor:
        """Prior precision, one number or one per parameter tensor."""
        return KronLaplace.prior_precision.fget(self)

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        check_prior_precision(value)
        KronLaplace.prior_precision.fset(self, value)

    @property
    def _likelihood(self) -> str:
        return str(getattr(self.likelihood, "value", self.likelihood))

    def _check_H_init(self) -> None:
        if self._fitted is None:
            raise AttributeError(
                f"Expected a fitted {type(self).__name__}, got one without a posterior. Remedy: "
                "call `la.fit(train_loader)` or `la.load_state_dict(...)` first."
            )

    def _init_H(self) -> None:
        # nothing is accumulated in place, so nothing has to be allocated; before `fit`
        # laplace-torch takes an undecomposed `Kron` to mean "prior only"
        self.H = Kron([])

    def _set_posterior(self, fitted: Fitted) -> None:
        """Hand the decomposition over to laplace-torch in the model's dtype."""
        H = fitted.decomposed(self._dtype, self.damping)
        for name, block in zip(self.parameter_names, H.eigenvalues, strict=True):
            if not all(torch.isfinite(values).all() for values in block):
                raise ValueError(
                    f"Expected the curvature of '{name}' to fit into {self._dtype}, got "
                    "eigenvalues beyond its range. Remedy: use bfloat16 or float32 for the model."
                )
        self._fitted, self.H = fitted, H
