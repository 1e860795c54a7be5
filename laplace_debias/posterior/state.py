"""Save and restore a fitted posterior as tensors, strings and numbers only."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from laplace_debias.debias.spectrum import FitResult
from laplace_debias.network.upstream import device_of, last_layer_name, posterior_params

__all__ = ["load_state", "save_state"]

FORMAT = 1


def save_state(la: Any, fitted: FitResult) -> dict[str, Any]:
    """Everything a posterior consists of, loadable with ``torch.load(weights_only=True)``.

    The decomposition itself is stored (laplace-torch stores the undecomposed factors, from which
    debiased eigenvalues cannot be recovered).

    Args:
        la: A debiased Laplace approximation.
        fitted: Its fit.

    Returns:
        The state.

    Example:
        >>> from torch import nn
        >>> from laplace_debias import Laplace
        >>> la = Laplace(nn.Linear(2, 3), "classification", "all", "kron", debias=True)
        >>> batch = (torch.randn(8, 2), torch.arange(8) % 3)
        >>> la.fit(batch, curvature_loader=(torch.randn(8, 2), torch.arange(8) % 3), n_data=16)
        >>> sorted(la.state_dict())[:3]
        ['cls_name', 'curvatures', 'debias']
    """
    return {
        "format": FORMAT,
        "cls_name": type(la).__name__,
        "debias": la.debias,
        "likelihood": _plain(la.likelihood),
        "parameters": _parameter_shapes(la),
        "last_layer_name": last_layer_name(la.model),
        "eigenvectors": fitted.Q,
        "eigenvalues_biased": fitted.lam,
        "eigenvalues": fitted.lam_tilde,
        "curvatures": fitted.curvatures,
        "mean": la.mean.detach(),
        "loss": torch.as_tensor(la.loss).detach(),
        "prior_mean": _detached(la.prior_mean),
        "prior_precision": _detached(la.prior_precision),
        "sigma_noise": _detached(la.sigma_noise),
        "temperature": float(la.temperature),
        "enable_backprop": bool(la.enable_backprop),
        "n_data": int(la.n_data),
        "n_outputs": int(la.n_outputs),
    }


def load_state(la: Any, state: dict[str, Any], take_over: Callable[[FitResult], None]) -> None:
    """Put a saved posterior into ``la``; on an error ``la`` is left as it was.

    Args:
        la: A debiased Laplace approximation around the same architecture.
        state: What :func:`save_state` returned.
        take_over: Makes a fit the posterior of ``la``.

    Raises:
        ValueError: If format, class, method, likelihood, last layer or parameters differ.

    Example:
        >>> from torch import nn
        >>> from laplace_debias import Laplace
        >>> la = Laplace(nn.Linear(2, 3), "classification", "all", "kron", debias=True)
        >>> load_state(la, {"format": 0}, print)
        Traceback (most recent call last):
        ...
        ValueError: Expected a state of format 1, got 0. Remedy: save it again with this version.
    """
    if state.get("format") != FORMAT:
        raise ValueError(
            f"Expected a state of format {FORMAT}, got {state.get('format')}. Remedy: save it "
            "again with this version."
        )
    expected = {
        "cls_name": type(la).__name__,
        "debias": la.debias,
        "likelihood": _plain(la.likelihood),
    }
    for key, value in expected.items():
        if state[key] != value:
            raise ValueError(
                f"Expected a state with {key}={value!r}, as this object, got {state[key]!r}. "
                "Remedy: build the Laplace object with the arguments of the saved one."
            )
    if state["last_layer_name"] is not None:
        la.restore_last_layer(state["last_layer_name"])
    ours, saved = _parameter_shapes(la), state["parameters"]
    if ours != saved:
        differing = [n for n in {**saved, **ours} if ours.get(n) != saved.get(n)]
        raise ValueError(
            "Expected the parameters that the state was fitted for, got a model that differs in "
            + "; ".join(
                f"'{n}': state {saved.get(n, 'absent')}, model {ours.get(n, 'absent')}"
                for n in differing[:5]
            )
            + (f" and {len(differing) - 5} more" if len(differing) > 5 else "")
            + ". Remedy: build the same architecture with the same parameters frozen."
        )
    device = device_of(la)

    def moved(blocks: list[list[Tensor]]) -> list[list[Tensor]]:
        return [[t.to(device) for t in block] for block in blocks]

    take_over(
        FitResult(
            moved(state["eigenvectors"]),
            moved(state["eigenvalues_biased"]),
            moved(state["eigenvalues"]),
            moved(state["curvatures"]),
            state["loss"].to(device),
            state["n_data"],
            state["n_outputs"],
        )
    )
    la.mean = state["mean"].to(device)
    la.prior_mean = state["prior_mean"]
    la.prior_precision = state["prior_precision"]
    la.sigma_noise = state["sigma_noise"]
    la.temperature = state["temperature"]
    la.enable_backprop = state["enable_backprop"]
    current = parameters_to_vector(posterior_params(la)).detach()
    if not torch.equal(current, la.mean.to(current.dtype)):
        warnings.warn(
            "The model's weights differ from those at which this posterior was fitted; load the "
            "matching weights into the model, or predictions mix both.",
            stacklevel=3,
        )


def _parameter_shapes(la: Any) -> dict[str, list[int]]:
    """Names and shapes of the Bayesian parameters."""
    return {
        name: list(p.shape)
        for name, p in zip(la.parameter_names, posterior_params(la), strict=True)
    }


def _plain(value: Any) -> str:
    """An enum's value, or the string itself."""
    return str(getattr(value, "value", value))


def _detached(value: Any) -> Any:
    """A tensor without its graph, anything else as it is."""
    return value.detach() if isinstance(value, Tensor) else value
