"""Sampling networks: weights drawn from the posterior, pushed through the network itself.

laplace-torch writes each sample into the model's parameters, which leaves them aliasing the
posterior mean, or a sample if the forward pass raises. Here the model is called with other
parameters and never written to (:mod:`laplace_debias.network.substitution`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from laplace.utils import FeatureExtractor
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs
from laplace_debias.network.calling import call_model, classes_last
from laplace_debias.network.features import outputs_and_features
from laplace_debias.network.substitution import substituted
from laplace_debias.network.upstream import last_layer_of

__all__ = ["network_samples"]


def network_samples(
    model: nn.Module,
    names: Sequence[str],
    samples: Tensor,
    X: Inputs,
    **model_kwargs: Any,
) -> Iterator[Tensor]:
    r"""Outputs :math:`f(X; \theta_s)` of the network for each weight sample :math:`\theta_s`.

    Args:
        model: The network; for last-layer samples a ``FeatureExtractor``, whose features are then
            computed once for all samples.
        names: Names of the sampled parameters: those of ``model``, or of the last layer for a
            ``FeatureExtractor``.
        samples: Weight samples, ``[S, P]``, P the number of entries of these parameters.
        X: Inputs, ``[n, ...]`` or a mapping.
        **model_kwargs: Handed to the model's forward pass.

    Yields:
        One output ``[n, ..., C]`` per sample.

    Raises:
        ValueError: If outputs are not one row per datum.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> samples = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
        >>> [f.item() for f in network_samples(net, ["weight"], samples, torch.ones(1, 2))]
        [1.0, 3.0]
    """
    root: nn.Module
    given: Inputs
    kwargs: dict[str, Any]
    if isinstance(model, FeatureExtractor):
        features = outputs_and_features(model, X, **model_kwargs)[1]
        root, given, kwargs = last_layer_of(model), features, {}
    else:
        root, given, kwargs = model, X, model_kwargs
    params = [root.get_parameter(name) for name in names]
    for sample in samples:
        parts = torch.split(sample, [p.numel() for p in params])
        pairs = [(p, part.view(p.shape)) for p, part in zip(params, parts, strict=True)]
        with substituted(pairs):
            outputs = call_model(root, given, **kwargs)
        if outputs.ndim < 2 or (isinstance(given, Tensor) and len(outputs) != len(given)):
            raise ValueError(
                f"Expected one row of outputs per datum, got {list(outputs.shape)}. Remedy: a "
                "model that ends in `.squeeze()` loses the data's dimension for a single datum; "
                "name the dimension, as in `.squeeze(-1)`."
            )
        yield classes_last(outputs)
