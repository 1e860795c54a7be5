"""laplace-torch's factory with one more word."""

from __future__ import annotations

from typing import Any

import laplace
from laplace.baselaplace import BaseLaplace
from torch import nn

from laplace_debias.posterior.checks import debias_mode
from laplace_debias.posterior.kron import DebiasedKronLaplace, DebiasedKronLLLaplace

__all__ = ["Laplace"]

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
        likelihood: ``"classification"`` or ``"regression"``.
        subset_of_weights: ``"last_layer"`` or ``"all"`` (and laplace-torch's other choices with
            ``debias=False``).
        hessian_structure: ``"kron"`` for debiased approximations.
        *args: Handed to the class.
        debias: ``False`` is laplace-torch, unchanged. ``True`` or ``"two-batch"`` keeps the
            eigenbasis of one mini-batch and measures the curvature along it on another.
            ``"crossfit"`` takes the eigenbasis of all data drawn and measures on the folds that
            did not choose it; its options are ``n_folds``, ``sampling="curvature"`` (draw the
            data that carry curvature), ``n_curvature``, ``n_input``, ``n_pool``, ``scores`` and
            ``generator``, see :class:`~laplace_debias.debias.options.CrossfitOptions`.
            ``"single"`` uses one mini-batch (or a whole loader) for both, scaled to the training
            set: the biased baseline.
        **kwargs: Handed to the class, e.g. ``kfac_approx``, ``fisher``, ``sampler``, ``generator``,
            ``verify=False`` (no check of the model) and ``data_keys`` (the entries of mappings
            that have one row per datum), see :class:`DebiasedKronLaplace`.

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
