"""Debiased K-FAC Laplace approximations: laplace-torch's classes and its factory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import laplace
import torch
from laplace.baselaplace import BaseLaplace, KronLaplace
from laplace.lllaplace import KronLLLaplace
from torch import Tensor, nn

from laplace_debias.data.inputs import take
from laplace_debias.data.loaders import as_batches
from laplace_debias.data.map_style import is_map_style
from laplace_debias.data.processes import together
from laplace_debias.data.reading import unpack
from laplace_debias.debias.options import debias_mode
from laplace_debias.network.features import LastLayerNetwork
from laplace_debias.network.preserve import evaluation_mode
from laplace_debias.network.upstream import (
    device_of,
    feature_extractor,
    last_layer_name,
    last_layer_of,
    posterior_params,
    row_keys,
    unchecked_prior,
)
from laplace_debias.posterior.debiased import DebiasedPosterior
from laplace_debias.posterior.several import agreed_name
from laplace_debias.posterior.state import left_as_it_was

__all__ = ["DebiasedKronLLLaplace", "DebiasedKronLaplace", "Laplace"]


class DebiasedKronLaplace(DebiasedPosterior, KronLaplace):
    """K-FAC Laplace approximation over all trainable weights, debiased.

    The eigenbasis of the Kronecker factors comes from one mini-batch, the curvature along it from
    another (see :mod:`laplace_debias.kfac.factors`). Everything else is ``laplace.KronLaplace``'s.

    Args:
        model: Trained network. Every trainable parameter must belong to a layer that K-FAC can
            represent (see :func:`laplace_debias.freeze_unsupported`); frozen ones are treated as
            certain.
        likelihood: ``"classification"``, ``"regression"``, or ``"bernoulli"`` (one logit, or many
            labels, with targets in [0, 1] of the outputs' shape).
        *args: Further arguments of ``laplace.KronLaplace``.
        debias: ``"auto"`` for a fit to a tolerance, ``True`` or ``"two-batch"`` for the debiased
            posterior, ``"crossfit"`` for the
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


# laplace-torch's own last layer types its prior unlike its base
class DebiasedKronLLLaplace(DebiasedPosterior, KronLLLaplace):  # type: ignore[misc]
    """K-FAC Laplace approximation over the last layer, debiased.

    Args:
        model: Trained network that ends in an ``nn.Linear``. It is copied; all parameters of the
            copy's last layer are Bayesian, whether frozen or not.
        likelihood: ``"classification"``, ``"regression"``, or ``"bernoulli"`` (one logit, or many
            labels, with targets in [0, 1] of the outputs' shape).
        *args: Further arguments of ``laplace.KronLLLaplace``.
        debias: ``"auto"`` for a fit to a tolerance, ``True`` or ``"two-batch"`` for the debiased
            posterior, ``"crossfit"`` for the
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
        self.model = LastLayerNetwork.taking_over(feature_extractor(self.model))

    @property
    def prior_precision_diag(self) -> Tensor:
        """Prior precision of every parameter, ``[P]``, from a scalar or layer-wise one."""
        parameters = posterior_params(self)
        values = torch.as_tensor(self.prior_precision).expand(len(parameters))
        return torch.cat([v.expand(p.numel()) for v, p in zip(values, parameters, strict=True)])

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """See :meth:`DebiasedPosterior.fit`; finds the last layer first, if it is not known."""
        with torch.inference_mode(False), left_as_it_was(self):
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
        with together("finding its last layer"):
            loader = self._found_last_layer(train_loader)
        name = agreed_name(last_layer_name(self.model))
        if self.model.last_layer is None and name is not None:  # this process has no data
            self.restore_last_layer(name)
        return loader

    def _found_last_layer(self, train_loader: Any) -> Iterable[Any]:
        """The loader to read, after the last layer was found by a first datum, if there is one."""
        if is_map_style(train_loader) and len(train_loader.dataset):
            # no sampler is asked, so the first fit draws the same data as later ones
            first = train_loader.collate_fn([train_loader.dataset[0]])
            loader: Iterable[Any] = train_loader
        else:
            batches = iter(as_batches(train_loader, triples=True))
            first = next(batches, None)
            if first is None:
                return []
            loader = itertools.chain([first], batches)
        X, _ = unpack(first, device_of(self), self.dict_key_y, key_w=self.dict_key_w)
        with evaluation_mode(self.model), torch.no_grad():
            one: Any = take(X, slice(0, 1), row_keys(self))
            feature_extractor(self.model).find_last_layer(one)
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
        parameters = list(last_layer_of(self.model).parameters())
        self.n_params = sum(p.numel() for p in parameters)
        self.n_layers = len(parameters)
        self.prior_precision, self.prior_mean = unchecked_prior(self)


_CLASSES = {"all": DebiasedKronLaplace, "last_layer": DebiasedKronLLLaplace}


def Laplace(
    model: nn.Module,
    likelihood: str,
    subset_of_weights: str = "last_layer",
    hessian_structure: str = "kron",
    *args: Any,
    debias: bool | str = False,
    **kwargs: Any,
) -> BaseLaplace:
    """Laplace approximation around a trained network, debiased on request.

    Args:
        model: Trained network.
        likelihood: ``"classification"``, ``"regression"``, or ``"bernoulli"`` (one logit, or many
            labels, with targets in [0, 1] of the outputs' shape).
        subset_of_weights: ``"last_layer"`` or ``"all"`` (and laplace-torch's other choices with
            ``debias=False``).
        hessian_structure: ``"kron"`` for debiased approximations.
        *args: Handed to the class.
        debias: ``False`` is laplace-torch, unchanged. ``"auto"`` makes as many backward passes as
            it takes to come within ``tolerance`` (0.05: 5 %) of the full batch's predictive
            standard deviations, and says in ``la.fit_report`` how near it came; its options are
            ``tolerance``, ``n_passes``, ``max_seconds``, ``n_pool`` and ``scores``, see
            :class:`~laplace_debias.debias.options.AutoOptions`. ``True`` or ``"two-batch"`` keeps
            the eigenbasis of one mini-batch and measures the curvature along it on another.
            ``"crossfit"`` takes the eigenbasis of all data drawn and measures on the folds that
            did not choose it; its options are ``n_folds``, ``sampling="curvature"`` (draw the
            data that carry curvature), ``n_passes`` (backward passes) or ``n_curvature`` (data),
            ``n_input``, ``n_pool``, ``scores`` and ``generator``, see
            :class:`~laplace_debias.debias.options.CrossfitOptions`.
            ``"single"`` uses one mini-batch (or a whole loader) for both, scaled to the training
            set: the biased baseline.
        **kwargs: Handed to the class, e.g. ``kfac_approx``, ``fisher``, ``sampler``, ``generator``,
            ``verify=False`` (no check of the model), ``data_keys`` (the entries of mappings
            that have one row per datum), ``parameters`` (which are Bayesian: ``"lora"``,
            ``"head"``, a name or pattern, or a list of them) and ``output`` (a function that picks
            the tensor of outputs from what the model returns), see :class:`DebiasedKronLaplace`.

    Returns:
        A :class:`DebiasedKronLaplace` or :class:`DebiasedKronLLLaplace`, or with ``debias=False``
        whatever ``laplace.Laplace`` returns.

    Raises:
        ValueError: If ``debias`` is unknown, or the structure has no chosen directions to debias.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
        >>> type(Laplace(net, "classification", "all", "kron", debias=True)).__name__
        'DebiasedKronLaplace'
        >>> type(Laplace(net, "classification", "all", "kron")).__name__
        'KronLaplace'
    """
    if debias is False:
        return laplace.Laplace(
            model, likelihood, subset_of_weights, hessian_structure, *args, **kwargs
        )
    mode = debias_mode(debias)
    structure = getattr(hessian_structure, "value", hessian_structure)
    subset = getattr(subset_of_weights, "value", subset_of_weights)
    if structure not in ("kron", "kron_debiased"):
        why = {
            "diag": "a diagonal's directions are the coordinate axes: nothing is chosen from the "
            "data, so nothing is biased",
        }.get(structure, "debiasing is implemented at the level of Kronecker factors")
        raise ValueError(
            f"Expected hessian_structure='kron' with debias={debias!r}, got {structure!r}: {why}. "
            "Remedy: hessian_structure='kron', or debias=False."
        )
    if subset not in _CLASSES:
        raise ValueError(
            f"Expected subset_of_weights 'all' or 'last_layer' with debias={debias!r}, got "
            f"{subset!r}. Remedy: to leave parameters out, freeze them (`requires_grad_(False)`) "
            "and use 'all'."
        )
    la: BaseLaplace = _CLASSES[subset](model, likelihood, *args, debias=mode, **kwargs)
    return la
