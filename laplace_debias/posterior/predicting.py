"""Prediction for the debiased classes: evaluation mode, honoured generators, untouched models."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from laplace_debias.network.preserve import evaluation_mode, preserved
from laplace_debias.predictive.links import mean_log_probabilities
from laplace_debias.predictive.network_samples import network_samples

__all__ = ["Predicting"]


class Predicting:
    """Mix-in before laplace-torch's class: the same methods without their side effects."""

    _generator: torch.Generator | None = None
    _last_layer: bool

    def __call__(
        self,
        x: Tensor | MutableMapping[str, Any],
        pred_type: str = "glm",
        joint: bool = False,
        link_approx: str = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
        **model_kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Posterior predictive, as laplace-torch's, in evaluation mode and with its ``generator``.

        Args:
            x: Inputs ``[n, ...]`` or a mapping.
            pred_type: ``"glm"`` (linearised network) or ``"nn"`` (sampled networks).
            joint: Regression: whether to return the covariance across data.
            link_approx: ``"probit"``, ``"mc"``, ``"bridge"`` or ``"bridge_norm"``.
            n_samples: Number of samples for ``"mc"``.
            diagonal_output: Whether to drop covariances between outputs.
            generator: Source of every random number drawn in this call.
            fitting: laplace-torch's switch for reward modelling.
            **model_kwargs: For the network's forward pass with ``pred_type="nn"``.

        Returns:
            Class probabilities ``[n, C]``, or for regression mean and (co)variance.

        Raises:
            AttributeError: Before ``fit``.
        """
        with self._predicting(generator):
            return super().__call__(
                x,
                pred_type,
                joint,
                link_approx,
                n_samples,
                diagonal_output,
                generator,
                fitting,
                **model_kwargs,
            )

    def log_probabilities(
        self,
        x: Tensor | MutableMapping[str, Any],
        pred_type: str = "glm",
        link_approx: str = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """Logarithms of the class probabilities, also of those too small for their dtype.

        The logarithm of ``la(x)`` is minus infinity where a probability underflows; here it is
        a number. Metrics are computed from it.

        Args:
            x: Inputs ``[n, ...]`` or a mapping.
            pred_type: ``"glm"`` (linearised network) or ``"nn"`` (sampled networks).
            link_approx: For ``"glm"``: ``"probit"``, ``"mc"``, ``"bridge"`` or ``"bridge_norm"``.
            n_samples: Number of samples for ``"mc"`` and ``"nn"``.
            diagonal_output: Whether to drop covariances between outputs.
            generator: Source of every random number drawn in this call.
            **model_kwargs: For the network's forward pass with ``pred_type="nn"``.

        Returns:
            Log-probabilities ``[n, C]``.

        Raises:
            AttributeError: Before ``fit``.
            ValueError: For a regression, or an unknown ``pred_type`` or link.
        """
        if self.likelihood != "classification":
            raise ValueError(
                f"Expected a classification, got the likelihood {str(self.likelihood)!r}. Remedy: "
                "`la(x)` returns the mean and covariance of a regression."
            )
        if pred_type not in ("glm", "nn"):
            raise ValueError(
                f"Expected pred_type 'glm' or 'nn', got {pred_type!r}. Remedy: pass one of them."
            )
        with self._predicting(generator):
            if pred_type == "nn":
                fs = self._network_samples(x, n_samples, **model_kwargs)
                return mean_log_probabilities(fs)
            return self._glm_prediction(x, False, link_approx, n_samples, diagonal_output)[0]

    def functional_samples(self, x, pred_type="glm", n_samples=100, *args, **kwargs) -> Tensor:
        """Samples of the network's outputs, ``[S, n, C]``; see laplace-torch."""
        with self._predicting():
            return super().functional_samples(x, pred_type, n_samples, *args, **kwargs)

    def predictive_samples(self, x, pred_type="glm", n_samples=100, *args, **kwargs) -> Tensor:
        """Samples of the predictive, ``[S, n, C]``; see laplace-torch."""
        with self._predicting():
            return super().predictive_samples(x, pred_type, n_samples, *args, **kwargs)

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Weight samples ``[S, P]`` from the posterior; see laplace-torch."""
        self._check_H_init()
        return super().sample(n_samples, generator or self._generator)

    @contextmanager
    def _predicting(self, generator: torch.Generator | None = None) -> Iterator[None]:
        """Evaluation mode, an untouched model, and every draw from the call's generator."""
        self._check_H_init()
        self._generator = generator  # laplace-torch does not pass it on
        try:
            with preserved(self.model), evaluation_mode(self.model):
                yield
        finally:
            self._generator = None

    def _network_samples(self, X, n_samples, generator=None, **model_kwargs) -> Iterator[Tensor]:
        """Outputs of sampled networks, one after the other."""
        if isinstance(X, Tensor):
            X = X.to(self._device)
        samples = self.sample(n_samples, generator)
        for f in network_samples(self.model, self.parameter_names, samples, X, **model_kwargs):
            yield f if self.enable_backprop else f.detach()

    def _nn_functional_samples(self, X, n_samples=100, generator=None, **model_kwargs) -> Tensor:
        return torch.stack(list(self._network_samples(X, n_samples, generator, **model_kwargs)))

    def _nn_predictive_samples(self, X, n_samples=100, generator=None, **model_kwargs) -> Tensor:
        fs = self._nn_functional_samples(X, n_samples, generator, **model_kwargs)
        return torch.softmax(fs, dim=-1) if self.likelihood == "classification" else fs

    def _nn_predictive_classification(self, X, n_samples=100, **model_kwargs) -> Tensor:
        fs = self._network_samples(X, n_samples, **model_kwargs)
        return mean_log_probabilities(fs).exp()
