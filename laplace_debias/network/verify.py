"""What a fit refuses, by the name of the layer, before it costs anything."""

from __future__ import annotations

import torch
from torch import nn

from laplace_debias.data.inputs import Inputs, Keys, size_of, take
from laplace_debias.network.check import N_CHECKED, agree
from laplace_debias.network.features import outputs_and_features
from laplace_debias.network.model_check import check_data, check_parameters
from laplace_debias.network.ownership import owned_parameters
from laplace_debias.network.preserve import evaluation_mode
from laplace_debias.network.products import has_own_forward
from laplace_debias.network.upstream import feature_extractor, last_layer_name, last_layer_of

__all__ = ["verify_data", "verify_last_layer", "verify_layers"]

_OFF = "`verify=False` turns this check off."


def verify_layers(
    model: nn.Module,
    x: Inputs,
    key: Keys = "input_ids",
    targets: str = "labels",
    *,
    inside: bool = True,
) -> set[str]:
    """Raise unless K-FAC's factors of a network mean what they say, on a few data.

    Args:
        model: The network; its parameters that require a gradient are Bayesian.
        x: Inputs of the first mini-batch.
        key: Which entries of a mapping run over the data.
        targets: The entry that holds the targets, if there is one.
        inside: Whether the backend looks into layers with a ``forward`` of their own.

    Returns:
        Names of the parameters that the mini-batch reaches.

    Raises:
        ValueError: If rows do not explain a parameter, or outputs do not belong to their data.

    Example:
        >>> sorted(verify_layers(nn.Linear(2, 1), torch.randn(3, 2)))
        ['bias', 'weight']
    """
    owned = owned_parameters(model)
    found, rows = check_parameters(model, x, owned, key)
    wrong = [f"{c.name} ({c.kind}): {c.note}" for c in found if c.name in rows.unexplained]
    wrong += [
        f"{p.name} ({type(p.layers[0]).__name__}): its layer has a `forward` of its own, which "
        "this backend does not look into. Remedy: leave `backend` out"
        for p in owned
        if not inside and has_own_forward(p.layers[0]) and p.name not in rows.unexplained
    ]
    if wrong:
        raise ValueError(
            "Expected the inputs and output gradients of every layer to explain all that its "
            "parameters do, got other derivatives of the whole network for "
            f"{'; '.join(wrong)}. Remedy: mend or freeze these layers, as said for each. {_OFF}"
        )
    verify_data(model, x, key, targets)
    return {p.name for p in owned if p.name not in rows.unreached}


def verify_last_layer(
    model: nn.Module, x: Inputs, key: Keys = "input_ids", targets: str = "labels"
) -> None:
    """Raise unless the last layer of a network is its end, on a few data.

    Args:
        model: A feature extractor that knows its last layer.
        x: Inputs of the first mini-batch.
        key: Which entries of a mapping run over the data.
        targets: The entry that holds the targets, if there is one.

    Raises:
        ValueError: If something comes after it, or outputs do not belong to their data.

    Example:
        >>> from laplace.utils import FeatureExtractor
        >>> net = FeatureExtractor(nn.Sequential(nn.Linear(2, 1)), last_layer_name="0")
        >>> verify_last_layer(net, torch.randn(3, 2))
    """
    verify_data(model, x, key, targets)
    few = take(x, slice(0, min(size_of(x, key), N_CHECKED)), key)
    with evaluation_mode(model), torch.no_grad():
        f, phi = outputs_and_features(feature_extractor(model), few)
        end = last_layer_of(model)(phi)
    if not agree(end.reshape(-1), f.reshape(-1)):
        raise ValueError(
            f"Expected the model to end in its last layer '{last_layer_name(model)}', got outputs "
            "that differ from that layer's (a temperature, a scaling, a function after it). "
            "Remedy: end the model there, or use subset_of_weights='all' with the other layers "
            f"frozen. {_OFF}"
        )


def verify_data(model: nn.Module, x: Inputs, key: Keys, targets: str = "labels") -> None:
    """Raise unless outputs belong to their data.

    Args:
        model: The network.
        x: Inputs of a mini-batch.
        key: Which entries of a mapping run over the data.
        targets: The entry that holds the targets, if there is one.

    Raises:
        ValueError: If they do not.

    Example:
        >>> verify_data(nn.Linear(2, 1), torch.randn(3, 2), "x")
    """
    wrong = check_data(model, x, key, targets)
    if wrong is not None:
        raise ValueError(
            f"Expected one row of outputs for each datum, whatever passes with it, got: {wrong}. "
            f"Remedy: let the model treat each datum by itself. {_OFF}"
        )
