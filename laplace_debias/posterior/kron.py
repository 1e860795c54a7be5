"""Debiased K-FAC Laplace approximations: laplace-torch's classes, fitted on two mini-batches."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from laplace.baselaplace import KronLaplace
from laplace.lllaplace import KronLLLaplace
from torch import Tensor, nn

from laplace_debias.debias.options import CrossfitOptions
from laplace_debias.kfac.backend import HookGGN, HookInterface
from laplace_debias.kfac.upstream import choose_backend, supported_types
from laplace_debias.network.ownership import check_supported
from laplace_debias.posterior.debiased import (
    CROSSFIT,
    DebiasedPosterior,
    check_prior_precision,
    debias_mode,
)

__all__ = ["DebiasedKronLLLaplace", "DebiasedKronLaplace"]


def _prepared_arguments(
    likelihood: str, kwargs: dict[str, Any], debias: bool | str
) -> tuple[str, CrossfitOptions | None]:
    """Check what both constructors take; complete ``kwargs`` in place."""
    mode = debias_mode(debias)
    given = {name: kwargs.pop(name) for name in CrossfitOptions.names() if name in kwargs}
    if given and mode != CROSSFIT:
        raise ValueError(
            f"Expected {', '.join(map(repr, given))} with debias='crossfit' only, got "
            f"debias={mode!r}. Remedy: `Laplace(model, ..., debias='crossfit', ...)`."
        )
    if mode == CROSSFIT:
        if not issubclass(kwargs.get("backend") or HookGGN, HookInterface):
            raise ValueError(
                "Expected the backend HookGGN or HookEF with debias='crossfit', which weights each "
                f"datum, got {kwargs['backend'].__name__}. Remedy: leave `backend` out."
            )
    if getattr(likelihood, "value", likelihood) not in ("classification", "regression"):
        raise ValueError(
            "Expected likelihood 'classification' or 'regression', got "
            f"{likelihood!r}. Remedy: use `debias=False` for other likelihoods."
        )
    if kwargs.get("damping"):
        warnings.warn(
            "`damping=True` has no effect: laplace-torch drops it when it adds the prior.",
            stacklevel=4,
        )
    # laplace-torch writes into this dictionary
    kwargs["backend_kwargs"] = dict(kwargs.get("backend_kwargs") or {})
    return mode, CrossfitOptions(**given) if mode == CROSSFIT else None


def _check_scales(la: KronLaplace) -> None:
    """Scales must be positive; laplace-torch takes any number."""
    check_prior_precision(la._prior_precision)  # unchecked as long as the last layer is unknown
    for name in ("sigma_noise", "temperature"):
        value = float(getattr(la, name))
        if not 0 < value < float("inf"):
            raise ValueError(
                f"Expected a positive, finite `{name}`, got {value}. Remedy: pass e.g. 1.0."
            )


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
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> data = TensorDataset(torch.randn(64, 2), torch.randint(3, (64,)))
        >>> la = DebiasedKronLaplace(net, "classification")
        >>> la.fit(DataLoader(data, batch_size=16, shuffle=True))
        >>> la(torch.randn(5, 2)).shape, la.n_data
        (torch.Size([5, 3]), 64)
    """

    _key = ("all", "kron_debiased")
    _last_layer = False
    last_layer_name = None

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        *args: Any,
        debias: bool | str = True,
        **kwargs: Any,
    ) -> None:
        self.debias, self.crossfit = _prepared_arguments(likelihood, kwargs, debias)
        backend = choose_backend(kwargs.pop("backend", None), model)
        check_supported(model, supported_types(backend))
        super().__init__(model, likelihood, *args, backend=backend, **kwargs)
        _check_scales(self)

    @property
    def parameter_names(self) -> list[str]:
        """Names of the Bayesian parameters, one per block of the posterior."""
        return [name for name, p in self.model.named_parameters() if p.requires_grad]

    def _bayesian_parameters(self) -> list[nn.Parameter]:
        return self.params

    def _prepare(self, batch: Any, override: bool) -> None:
        """Nothing has to be known before the first factors."""

    def _restore_last_layer(self, name: str | None) -> None:
        """There is no last layer to restore."""


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
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> la = DebiasedKronLLLaplace(net, "regression", sigma_noise=0.1)
        >>> batch_a, batch_b = [(torch.randn(16, 2), torch.randn(16, 1)) for _ in range(2)]
        >>> la.fit(batch_a, curvature_loader=batch_b, n_data=1000)
        >>> mean, variance = la(torch.randn(5, 2))
        >>> mean.shape, variance.shape
        (torch.Size([5, 1]), torch.Size([5, 1, 1]))
    """

    _key = ("last_layer", "kron_debiased")
    _last_layer = True

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        *args: Any,
        debias: bool | str = True,
        **kwargs: Any,
    ) -> None:
        self.debias, self.crossfit = _prepared_arguments(likelihood, kwargs, debias)
        # convolutions in the features are no concern of the last layer's factors
        kwargs["backend"] = choose_backend(kwargs.get("backend"), nn.Identity())
        super().__init__(model, likelihood, *args, **kwargs)
        _check_scales(self)

    @property
    def parameter_names(self) -> list[str]:
        """Names of the last layer's parameters, one per block of the posterior."""
        return [name for name, _ in self.model.last_layer.named_parameters()]

    @property
    def last_layer_name(self) -> str | None:
        """Name of the last layer, ``None`` as long as it is not known."""
        return getattr(self.model, "_last_layer_name", None)

    @property
    def prior_precision_diag(self) -> Tensor:
        """Prior precision of every parameter, ``[P]``, from a scalar or layer-wise one."""
        parameters = self._bayesian_parameters()
        values = torch.as_tensor(self.prior_precision).expand(len(parameters))
        return torch.cat([v.expand(p.numel()) for v, p in zip(values, parameters, strict=True)])

    def _bayesian_parameters(self) -> list[nn.Parameter]:
        return list(self.model.last_layer.parameters())

    def _prepare(self, batch: Any, override: bool) -> None:
        """Find the last layer from a first mini-batch; check what could not be checked before."""
        if not override:
            raise ValueError(
                "Expected `override=True`, because last-layer approximations do not accumulate "
                "over fits (as in laplace-torch); got False. Remedy: fit on all data at once, or "
                "use subset_of_weights='all'."
            )
        if self.model.last_layer is None:
            self._find_last_layer(batch)
            self._last_layer_found()

    def _restore_last_layer(self, name: str | None) -> None:
        """Set the last layer of a saved posterior by name."""
        if self.model.last_layer is None:
            if name not in dict(self.model.model.named_modules()):
                raise ValueError(
                    f"Expected a model with a last layer named '{name}', got one without. Remedy: "
                    "build the architecture that the state was saved for."
                )
            self.model.set_last_layer(name)
            self._last_layer_found()
        elif name != self.last_layer_name:
            raise ValueError(
                f"Expected a state for the last layer '{self.last_layer_name}', got one for "
                f"'{name}'. Remedy: pass `last_layer_name={name!r}`."
            )

    def _last_layer_found(self) -> None:
        """Complete what the constructor could not know; checks the prior's shape."""
        parameters = self._bayesian_parameters()
        self.n_params = sum(p.numel() for p in parameters)
        self.n_layers = len(parameters)
        self.prior_precision = self._prior_precision
        self.prior_mean = self._prior_mean
