"""laplace-torch's objects as this library reads them: every private name of theirs, once.

A new release of laplace-torch that renames something is this file's work alone. What is read stands
in functions; what laplace-torch *calls* by private names stands in :class:`PrivateProtocol`, which
hands it to public methods.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from laplace.baselaplace import BaseLaplace, KronLaplace
from laplace.utils import FeatureExtractor, Kron, KronDecomposed
from torch import Tensor, nn

__all__ = [
    "PrivateProtocol",
    "backend_of",
    "device_of",
    "dtype_of",
    "find_last_layer",
    "hessian_factor",
    "is_last_layer",
    "last_layer_name",
    "posterior_params",
    "unchecked_prior",
]

device_of: Callable[[BaseLaplace], torch.device] = attrgetter("_device")
"""Device of the model's parameters."""
dtype_of: Callable[[BaseLaplace], torch.dtype] = attrgetter("_dtype")
"""Type of the model's parameters."""
hessian_factor: Callable[[KronLaplace], Tensor] = attrgetter("_H_factor")
"""``1 / (sigma_noise**2 * temperature)``, by which the curvature is multiplied."""
backend_of: Callable[[BaseLaplace], tuple[type, dict, dict]] = attrgetter(
    "_backend_cls", "_backend_kwargs", "_asdl_fisher_kwargs"
)
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


def find_last_layer(la: BaseLaplace, batch: Any) -> None:
    """Let laplace-torch look for the last layer in one forward pass of a mini-batch.

    Args:
        la: A last-layer approximation that does not know its last layer yet.
        batch: A mini-batch ``(X, y)`` or a mapping.
    """
    la._find_last_layer(batch)


def posterior_params(la: KronLaplace) -> list[nn.Parameter]:
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
    params = list(la.model.last_layer.parameters())
    if not isinstance(la.H, KronDecomposed) or len(params) == len(la.H):
        return params
    return [p for p in params if p.requires_grad]


class PrivateProtocol:
    """What laplace-torch calls by private names, as public methods that a subclass gives.

    It comes before laplace-torch's class in the bases. Nothing is computed here.
    """

    H: Any

    def check_fitted(self) -> None:
        """Raise unless there is a posterior."""
        raise NotImplementedError

    def output_moments(
        self, X: Any, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Means and (co)variances of the linearised network's outputs."""
        raise NotImplementedError

    def network_samples(
        self,
        X: Any,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """Outputs of sampled networks, ``[S, n, C]``."""
        raise NotImplementedError

    def network_predictions(
        self,
        X: Any,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """The same through the inverse link."""
        raise NotImplementedError

    def _check_H_init(self) -> None:
        self.check_fitted()

    def _init_H(self) -> None:
        # nothing is accumulated in place, so nothing has to be allocated; before `fit`
        # laplace-torch takes an undecomposed `Kron` to mean "prior only"
        self.H = Kron([])

    def _glm_predictive_distribution(
        self, X: Any, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        return self.output_moments(X, joint, diagonal_output)

    def _nn_functional_samples(
        self, X: Any, n_samples: int = 100, generator: Any = None, **model_kwargs: Any
    ) -> Tensor:
        return self.network_samples(X, n_samples, generator, **model_kwargs)

    def _nn_predictive_samples(
        self, X: Any, n_samples: int = 100, generator: Any = None, **model_kwargs: Any
    ) -> Tensor:
        return self.network_predictions(X, n_samples, generator, **model_kwargs)
