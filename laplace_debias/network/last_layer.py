"""Is the last layer of a network its end, and ordinary? A last-layer posterior rests on it."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs, Keys, size_of, take
from laplace_debias.network.check import N_CHECKED, agree, random_steps
from laplace_debias.network.features import outputs_and_features
from laplace_debias.network.preserve import devices_of, evaluation_mode
from laplace_debias.network.remembered import question_of, recall, remember
from laplace_debias.network.substitution import substituted
from laplace_debias.network.upstream import feature_extractor, last_layer_name, last_layer_of
from laplace_debias.network.verify import OFF, verify_data

__all__ = ["check_last_layer", "verify_last_layer"]


def check_last_layer(model: nn.Module, x: Inputs) -> str | None:
    r"""Whether outputs are :math:`f = W \phi + b` for any W and b of the last layer.

    With the weights as they are and with others, so that a layer whose ``forward`` happens to
    change nothing now (a mask over a pruned weight) is told from one that never does.

    Args:
        model: A feature extractor that knows its last layer.
        x: Inputs of a few data.

    Returns:
        What is wrong, or ``None``.

    Example:
        >>> from laplace.utils import FeatureExtractor
        >>> net = nn.Sequential(nn.Linear(2, 1), nn.Identity())
        >>> check_last_layer(FeatureExtractor(net, last_layer_name="0"), torch.ones(3, 2))
        >>> net[1] = nn.Sigmoid()
        >>> check_last_layer(FeatureExtractor(net, last_layer_name="0"), torch.ones(3, 2))[:19]
        'outputs that differ'
    """
    layer, features = cast(nn.Linear, last_layer_of(model)), list[Tensor]()
    params = list(layer.parameters())
    devices = devices_of(list(model.parameters()))
    steps = [(p, p.detach() + step) for p, step in zip(params, random_steps(params), strict=True)]
    with evaluation_mode(model), torch.no_grad(), torch.random.fork_rng(devices):
        for pairs in ([], steps):
            with substituted(pairs):
                f, phi = outputs_and_features(feature_extractor(model), x)
                said = nn.functional.linear(phi, layer.weight, layer.bias)
                by_layer = layer(phi)  # a hook before it would change its input once more
            if not all(agree(g.reshape(-1), f.reshape(-1)) for g in (said, by_layer)):
                return (
                    "outputs that differ from that (a temperature, a choice of a token, a "
                    "function after it; a hook or a `forward` of its own that changes its input, "
                    "weight or output)"
                )
            features.append(phi)
    if not agree(*features):
        return (
            "an input that depends on the layer's own parameters (it is called twice, or its "
            "weight is used before it)"
        )
    return None


def verify_last_layer(
    model: nn.Module, x: Inputs, key: Keys = "input_ids", targets: str = "labels"
) -> None:
    """Raise unless the last layer of a network is its end; see :func:`check_last_layer`.

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
    question = question_of("end", x, key, targets)
    if recall(model, question, x):
        return
    few = take(x, slice(0, min(size_of(x, key), N_CHECKED)), key)
    wrong = check_last_layer(model, few)
    if wrong is not None:
        raise ValueError(
            f"Expected the model to end in its last layer '{last_layer_name(model)}', in the "
            f"product of its weight and its input plus its bias, got {wrong}. Remedy: end "
            "the model there, in an ordinary nn.Linear with parameters of its own, or take the "
            f"layer as one of all, subset_of_weights='all' with parameters='head'. {OFF}"
        )
    remember(model, question, x, True)
