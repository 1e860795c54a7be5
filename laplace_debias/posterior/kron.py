"""Debiased K-FAC Laplace approximations: laplace-torch's classes, fitted on few data."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from laplace.baselaplace import KronLaplace
from laplace.lllaplace import KronLLLaplace
from torch import Tensor

from laplace_debias.data.pool import is_map_style
from laplace_debias.data.reading import as_batches, unpack
from laplace_debias.network.features import LastLayerNetwork
from laplace_debias.network.preserve import preserved
from laplace_debias.network.upstream import (
    device_of,
    find_last_layer,
    last_layer_name,
    posterior_params,
    unchecked_prior,
)
from laplace_debias.posterior.debiased import DebiasedPosterior
from laplace_debias.posterior.state import left_as_it_was

__all__ = ["DebiasedKronLLLaplace", "DebiasedKronLaplace"]


class DebiasedKronLaplace(DebiasedPosterior, KronLaplace):
    """K-FAC Laplace approximation over all trainable weights, debiased.

    The eigenbasis of the Kronecker factors comes from one mini-batch, the curvature along it from
    another (see :mod:`laplace_debias.kfac.factors`). Everything else is ``laplace.KronLaplace``'s.

    Args:
        model: Trained network. Every trainable parameter must belong to a layer that K-FAC can
            represent (see :func:`laplace_debias.freeze_unsupported`); frozen ones are treated as
            certain.
        likelihood: ``"classification"`` or ``"regression"``.
        *args: Further arguments of ``laplace.KronLaplace``.
        debias: ``True`` or ``"two-batch"`` for the debiased posterior, ``"crossfit"`` for the
            cross-fitted one, ``"single"`` for the biased one of the same data.
        **kwargs: Further arguments of ``laplace.KronLaplace``; ``backend`` defaults to
            :class:`~laplace_debias.kfac.backend.HookGGN`. With ``debias="crossfit"`` also the
            options of :class:`~laplace_debias.debias.options.CrossfitOptions`.

    Raises:
        ValueError: If the model has trainable parameters that K-FAC cannot represent.

    Example:
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> data = TensorDataset(torch.randn(64, 2), torch.randint(3, (64,)))
        >>> la = DebiasedKronLaplace(net, "classification")
        >>> la.fit(DataLoader(data, batch_size=16, shuffle=True))
        >>> la(torch.randn(5, 2)).shape, la.n_data
        (torch.Size([5, 3]), 64)
    """

    _key = ("all", "kron_debiased")


class DebiasedKronLLLaplace(DebiasedPosterior, KronLLLaplace):
    """K-FAC Laplace approximation over the last layer, debiased.

    Args:
        model: Trained network that ends in an ``nn.Linear``. It is copied; all parameters of the
            copy's last layer are Bayesian, whether frozen or not.
        likelihood: ``"classification"`` or ``"regression"``.
        *args: Further arguments of ``laplace.KronLLLaplace``.
        debias: ``True`` or ``"two-batch"`` for the debiased posterior, ``"crossfit"`` for the
            cross-fitted one, ``"single"`` for the biased one of the same data.
        **kwargs: Further arguments of ``laplace.KronLLLaplace``; ``backend`` defaults to
            :class:`~laplace_debias.kfac.backend.HookGGN`. With ``debias="crossfit"`` also the
            options of :class:`~laplace_debias.debias.options.CrossfitOptions`.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> la = DebiasedKronLLLaplace(net, "regression", sigma_noise=0.1)
        >>> batch_a, batch_b = [(torch.randn(16, 2), torch.randn(16, 1)) for _ in range(2)]
        >>> la.fit(batch_a, curvature_loader=batch_b, n_data=1000)
        >>> mean, variance = la(torch.randn(5, 2))
        >>> mean.shape, variance.shape
        (torch.Size([5, 1]), torch.Size([5, 1, 1]))
    """

    _key = ("last_layer", "kron_debiased")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model = LastLayerNetwork.taking_over(self.model)

    @property
    def prior_precision_diag(self) -> Tensor:
        """Prior precision of every parameter, ``[P]``, from a scalar or layer-wise one."""
        parameters = posterior_params(self)
        values = torch.as_tensor(self.prior_precision).expand(len(parameters))
        return torch.cat([v.expand(p.numel()) for v, p in zip(values, parameters, strict=True)])

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """See :meth:`DebiasedPosterior.fit`; finds the last layer first, if it is not known."""
        with left_as_it_was(self):
            super().fit(*args, **kwargs)

    def _prepare(self, train_loader: Iterable[Any], override: bool) -> Iterable[Any]:
        """Find the last layer from a first datum or mini-batch, which is read but once."""
        if not override:
            raise ValueError(
                "Expected `override=True`, because last-layer approximations do not accumulate "
                "over fits (as in laplace-torch); got False. Remedy: fit on all data at once, or "
                "use subset_of_weights='all'."
            )
        if self.model.last_layer is not None:
            return train_loader
        if is_map_style(train_loader) and len(train_loader.dataset):
            # no sampler is asked, so the first fit draws the same data as later ones
            first = train_loader.collate_fn([train_loader.dataset[0]])
            loader = train_loader
        else:
            batches = iter(as_batches(train_loader))
            first = next(batches, None)
            if first is None:
                return []
            loader = itertools.chain([first], batches)
        unpack(first, device_of(self), self.dict_key_y)
        with preserved(self.model):  # laplace-torch's hooks stay if the forward pass raises
            self.model.eval()
            find_last_layer(self, first)
        self._last_layer_found()
        return loader

    def restore_last_layer(self, name: str | None) -> None:
        """Set the last layer of a saved posterior by name.

        Args:
            name: Its name within the wrapped network.

        Raises:
            ValueError: If there is no such layer, or another one was chosen.
        """
        if self.model.last_layer is None:
            if name not in dict(self.model.model.named_modules()):
                raise ValueError(
                    f"Expected a model with a last layer named '{name}', got one without. Remedy: "
                    "build the architecture that the state was saved for."
                )
            self.model.set_last_layer(name)
            self._last_layer_found()
        elif name != last_layer_name(self.model):
            raise ValueError(
                f"Expected a state for the last layer '{last_layer_name(self.model)}', got one for "
                f"'{name}'. Remedy: pass `last_layer_name={name!r}`."
            )

    def _last_layer_found(self) -> None:
        """Complete what the constructor could not know; checks the prior's shape."""
        parameters = list(self.model.last_layer.parameters())
        self.n_params = sum(p.numel() for p in parameters)
        self.n_layers = len(parameters)
        self.prior_precision, self.prior_mean = unchecked_prior(self)
