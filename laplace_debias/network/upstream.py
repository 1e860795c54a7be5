"""laplace-torch's objects as this library reads them: every private name of theirs, once.

A new release of laplace-torch that renames something is this file's work alone. What is read stands
in functions; what laplace-torch *calls* by private names is handed to public methods by
:func:`answering`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
from laplace.baselaplace import BaseLaplace, KronLaplace
from laplace.curvature import CurvatureInterface
from laplace.utils import FeatureExtractor, Kron, KronDecomposed
from torch import Tensor, nn

from laplace_debias.data.inputs import Keys

__all__ = [
    "answering",
    "backend_of",
    "decomposed",
    "device_of",
    "dtype_of",
    "feature_extractor",
    "forget_last_layer_name",
    "hessian_factor",
    "is_last_layer",
    "kron_of",
    "last_layer_of",
    "last_layer_name",
    "noise_of",
    "posterior_params",
    "row_keys",
    "unchecked_prior",
]

device_of: Callable[[BaseLaplace], torch.device] = attrgetter("_device")
"""Device of the model's parameters."""
dtype_of: Callable[[BaseLaplace], torch.dtype] = attrgetter("_dtype")
"""Type of the model's parameters."""
hessian_factor: Callable[[KronLaplace], Tensor] = attrgetter("_H_factor")
"""``1 / (sigma_noise**2 * temperature)``, by which the curvature is multiplied."""
backend_of: Callable[
    [BaseLaplace], tuple[type[CurvatureInterface], dict[str, Any], dict[str, Any]]
] = attrgetter("_backend_cls", "_backend_kwargs", "_asdl_fisher_kwargs")
"""The backend's class, the arguments of its constructor, and those of its ``kron``."""
unchecked_prior: Callable[[BaseLaplace], tuple[Any, Any]] = attrgetter(
    "_prior_precision", "_prior_mean"
)
"""Prior precision and mean as given, before their shapes could be checked."""


def is_last_layer(la: BaseLaplace) -> bool:
    """Whether a Laplace approximation covers the last layer only.

    Args:
        la: A Laplace approximation, ours or laplace-torch's.

    Example:
        >>> from laplace import Laplace
        >>> is_last_layer(Laplace(nn.Linear(2, 1), "regression", "last_layer", "kron"))
        True
    """
    return isinstance(la.model, FeatureExtractor)


def last_layer_name(model: nn.Module) -> str | None:
    """Name of a feature extractor's last layer.

    Args:
        model: What laplace-torch's last-layer classes hold as ``la.model``, or any other network.

    Returns:
        The name within the wrapped network; ``None`` where it is not known, or there is none.

    Example:
        >>> last_layer_name(nn.Linear(2, 1)) is None
        True
    """
    return getattr(model, "_last_layer_name", None)


def forget_last_layer_name(model: FeatureExtractor) -> None:
    """Make a feature extractor one whose last layer has no name yet.

    Args:
        model: One that knows its last layer.

    Example:
        >>> extractor = FeatureExtractor(nn.Sequential(nn.Linear(2, 1)), last_layer_name="0")
        >>> forget_last_layer_name(extractor)
        >>> last_layer_name(extractor) is None
        True
    """
    del model._last_layer_name


def feature_extractor(model: nn.Module) -> FeatureExtractor:
    """The model of a last-layer approximation as what it is.

    Args:
        model: What laplace-torch's last-layer classes hold as ``la.model``.

    Raises:
        TypeError: For any other network.

    Example:
        >>> feature_extractor(FeatureExtractor(nn.Linear(2, 1))).last_layer is None
        True
    """
    if not isinstance(model, FeatureExtractor):
        raise TypeError(
            f"Expected the FeatureExtractor of a last-layer approximation, got "
            f"{type(model).__name__}. Remedy: subset_of_weights='last_layer'."
        )
    return model


def last_layer_of(model: nn.Module) -> nn.Module:
    """The last layer of a feature extractor.

    Args:
        model: What laplace-torch's last-layer classes hold as ``la.model``.

    Raises:
        TypeError: For any other network.
        ValueError: If the last layer is not known yet.

    Example:
        >>> last_layer_of(FeatureExtractor(nn.Sequential(nn.Linear(2, 1)), last_layer_name="0"))
        Linear(in_features=2, out_features=1, bias=True)
    """
    layer = feature_extractor(model).last_layer
    if layer is None:
        raise ValueError(
            "Expected a feature extractor that knows its last layer, got one before its first "
            "forward pass. Remedy: call `la.fit`, or pass `last_layer_name`."
        )
    return layer


def decomposed(la: KronLaplace) -> KronDecomposed:
    """The curvature of a fitted Kron approximation.

    Args:
        la: A Kron Laplace approximation, ours or laplace-torch's.

    Raises:
        AttributeError: If it has not been fitted.

    Example:
        >>> from laplace import Laplace
        >>> decomposed(Laplace(nn.Linear(2, 1), "regression", "all", "kron"))
        Traceback (most recent call last):
        AttributeError: Expected a fitted Laplace approximation, got one without curvature. ...
    """
    if not isinstance(la.H, KronDecomposed):
        raise AttributeError(
            "Expected a fitted Laplace approximation, got one without curvature. "
            "Remedy: call `la.fit(train_loader)` first."
        )
    return la.H


def kron_of(blocks: Sequence[Sequence[Tensor]]) -> Kron:
    """Blocks as laplace-torch holds them.

    Args:
        blocks: ``[B, A]`` or ``[B]`` per parameter.

    Returns:
        Their ``Kron``, which laplace-torch annotates as if each block were one tensor.

    Example:
        >>> len(kron_of([[torch.eye(2), torch.eye(3)], [torch.eye(2)]]))
        2
    """
    return Kron(cast("list[tuple[Tensor] | Tensor]", [list(block) for block in blocks]))


def posterior_params(la: KronLaplace) -> list[Tensor]:
    """The parameter tensors of the blocks of a posterior, in its order.

    Args:
        la: A Kron Laplace approximation; for a last layer one that knows it.

    Returns:
        One tensor per block. laplace-torch counts frozen parameters of a last layer in.

    Example:
        >>> from laplace import Laplace
        >>> la = Laplace(nn.Linear(2, 1), "regression", "all", "kron")
        >>> [tuple(p.shape) for p in posterior_params(la)]
        [(1, 2), (1,)]
    """
    if not is_last_layer(la):
        return list(la.params)
    params: list[Tensor] = list(last_layer_of(la.model).parameters())
    if not isinstance(la.H, KronDecomposed) or len(params) == len(la.H):
        return params
    return [p for p in params if p.requires_grad]


def noise_of(la: BaseLaplace) -> Tensor:
    """Standard deviation of the observation noise.

    Args:
        la: A Laplace approximation, ours or laplace-torch's.

    Returns:
        One number, or one per output.

    Example:
        >>> from laplace import Laplace
        >>> noise_of(Laplace(nn.Linear(2, 1), "regression", sigma_noise=0.5))
        tensor(0.5000)
    """
    noise: Tensor = getattr(la, "observation_noise", la.sigma_noise)
    return noise


def row_keys(la: BaseLaplace) -> Keys:
    """Which entries of inputs that are mappings run over the data.

    Args:
        la: A Laplace approximation, ours or laplace-torch's.

    Returns:
        What the user named, with the targets; or laplace-torch's one key of the inputs.

    Example:
        >>> from laplace import Laplace
        >>> row_keys(Laplace(nn.Linear(2, 1), "regression", dict_key_x="x"))
        'x'
    """
    keys = getattr(la, "data_keys", None)
    return la.dict_key_x if keys is None else (*keys, la.dict_key_y)


_Class = TypeVar("_Class", bound=type)


def answering(cls: _Class) -> _Class:
    """Let laplace-torch's calls by private names reach the public methods of a class.

    Args:
        cls: A class that comes before laplace-torch's in the bases, with ``check_fitted``,
            ``output_moments``, ``network_samples`` and ``network_predictions``.

    Returns:
        The same class.

    Example:
        >>> @answering
        ... class Posterior:
        ...     def output_moments(self, X, joint, diagonal_output):
        ...         return X, joint
        >>> Posterior()._glm_predictive_distribution("X", joint=True)
        ('X', True)
    """

    def check(la: Any) -> None:
        la.check_fitted()

    def init(la: Any) -> None:
        # nothing is accumulated in place, so nothing has to be allocated; before `fit`
        # laplace-torch takes an undecomposed `Kron` to mean "prior only"
        la.H = Kron([])

    def moments(la: Any, X: Any, joint: bool = False, diagonal_output: bool = False) -> Any:
        return la.output_moments(X, joint, diagonal_output)

    def samples(la: Any, X: Any, n_samples: int = 100, generator: Any = None, **kwargs: Any) -> Any:
        return la.network_samples(X, n_samples, generator, **kwargs)

    def predictions(
        la: Any, X: Any, n_samples: int = 100, generator: Any = None, **kwargs: Any
    ) -> Any:
        return la.network_predictions(X, n_samples, generator, **kwargs)

    for name, method in {
        "_check_H_init": check,
        "_init_H": init,
        "_glm_predictive_distribution": moments,
        "_nn_functional_samples": samples,
        "_nn_predictive_samples": predictions,
    }.items():
        setattr(cls, name, method)
    return cls
