"""Save and restore a fitted posterior as tensors, strings and numbers only.

A state has the number of its format. A release that changes the layout raises ``FORMAT`` by one and
adds to ``UPGRADES`` what brings a state of the format before to the new one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from laplace_debias.debias.spectrum import FitResult
from laplace_debias.network.upstream import device_of, last_layer_name, posterior_params

__all__ = ["left_as_it_was", "load_state", "save_state"]

State = dict[str, Any]


def _listed_parameters(state: State) -> State:
    """Format 1 to 2: names and shapes of the parameters as a list instead of a mapping."""
    return {**state, "parameters": [[name, shape] for name, shape in state["parameters"].items()]}


def _unit_logit_temperature(state: State) -> State:
    """Format 2 to 3: logits were not divided by anything."""
    return {**state, "logit_temperature": 1.0}


def _unknown_objective(state: State) -> State:
    """Format 3 to 4: class weights, smoothing and ignored labels were not recorded."""
    return {**state, "objective": None}


UPGRADES: dict[int, Callable[[State], State]] = {
    1: _listed_parameters,
    2: _unit_logit_temperature,
    3: _unknown_objective,
    4: dict,  # bases may be thin since; full ones are read as they are
}
"""What brings a state of each earlier format to the next one."""
FORMAT = 5
KEYS = (
    "cls_name", "debias", "likelihood", "parameters", "last_layer_name", "eigenvectors",
    "eigenvalues_biased", "eigenvalues", "curvatures", "mean", "loss", "prior_mean",
    "prior_precision", "sigma_noise", "temperature", "logit_temperature",
    "enable_backprop", "n_data", "n_outputs", "objective",
)  # fmt: skip


def save_state(la: Any, fitted: FitResult) -> State:
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
        "parameters": [[name, shape] for name, shape in _parameter_shapes(la).items()],
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
        "logit_temperature": float(la.logit_temperature),
        "enable_backprop": bool(la.enable_backprop),
        "n_data": int(la.n_data),
        "n_outputs": int(la.n_outputs),
        "objective": _objective(la),
        **_noise_ratios(la),
    }


def load_state(la: Any, state: State, take_over: Callable[[FitResult], None]) -> None:
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
        >>> load_state(la, {"format": 9}, print)
        Traceback (most recent call last):
        ...
        ValueError: Expected a state of format 1 to 5, got 9. Remedy: update laplace_debias, ...
    """
    state = _upgraded(state)
    expected = {
        "cls_name": type(la).__name__,
        "debias": la.debias,
        "likelihood": _plain(la.likelihood),
    }
    ours, theirs = _noise_ratios(la).get("output_noise"), state.get("output_noise")
    same = ours is theirs if ours is None or theirs is None else torch.equal(ours, theirs)
    if not same:
        raise ValueError(
            f"Expected a state with the noise {ours} of each output, as this object, got {theirs}. "
            "Remedy: build the Laplace object with the `sigma_noise` of the saved one."
        )
    _check_objective(_objective(la), state["objective"])
    for key, value in expected.items():
        if state[key] != value:
            raise ValueError(
                f"Expected a state with {key}={value!r}, as this object, got {state[key]!r}. "
                "Remedy: build the Laplace object with the arguments of the saved one."
            )
    with left_as_it_was(la):
        _restore(la, state, take_over)


def _restore(la: Any, state: State, take_over: Callable[[FitResult], None]) -> None:
    """Put a state of the newest format and the right kind into ``la``."""
    if state["last_layer_name"] is not None:
        la.restore_last_layer(state["last_layer_name"])
    ours, saved = _parameter_shapes(la), dict(state["parameters"])
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
    la.logit_temperature = state["logit_temperature"]
    la.enable_backprop = state["enable_backprop"]
    current = torch.cat([p.detach().reshape(-1) for p in posterior_params(la)])
    if not torch.equal(current, la.mean.to(current.dtype)):
        warnings.warn(
            "The model's weights differ from those at which this posterior was fitted; load the "
            "matching weights into the model, or predictions mix both.",
            stacklevel=3,
        )


def _upgraded(state: State) -> State:
    """A state of any known format in the newest one."""
    found = state.get("format")
    if found not in (*UPGRADES, FORMAT):
        remedy = (
            "update laplace_debias, the state is of a newer release"
            if isinstance(found, int) and found > FORMAT
            else "load what a debiased posterior's `state_dict()` returned; a state of "
            "laplace-torch holds no debiased eigenvalues, so fit again"
        )
        raise ValueError(
            f"Expected a state of format {min(UPGRADES)} to {FORMAT}, got {found}. "
            f"Remedy: {remedy}."
        )
    for number in range(found, FORMAT):
        state = UPGRADES[number](state)
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise ValueError(
            f"Expected a state with {', '.join(KEYS)}, got one without {', '.join(missing)}. "
            "Remedy: load the whole of what `state_dict()` returned."
        )
    return state


@contextmanager
def left_as_it_was(la: Any) -> Iterator[None]:
    """Undo every change of ``la`` inside the block if it raises.

    Args:
        la: A debiased Laplace approximation, whose attributes are replaced, not written into.

    Yields:
        Nothing; ``la`` may be changed inside the ``with`` block.

    Example:
        >>> from torch import nn
        >>> from laplace_debias import Laplace
        >>> la = Laplace(nn.Linear(2, 3), "classification", "all", "kron", debias=True)
        >>> try:
        ...     with left_as_it_was(la):
        ...         la.temperature = 3.0
        ...         raise RuntimeError
        ... except RuntimeError:
        ...     la.temperature
        1.0
    """
    before, last_layer = dict(vars(la)), last_layer_name(la.model)
    size = {name: value for name, value in vars(la.model).items() if name == "output_size"}
    try:
        yield
    except BaseException:
        if last_layer is None and last_layer_name(la.model) is not None:
            la.model.forget_last_layer()
        vars(la.model).pop("output_size", None)
        vars(la.model).update(size)
        vars(la).clear()
        vars(la).update(before)
        raise


def _parameter_shapes(la: Any) -> dict[str, list[int]]:
    """Names and shapes of the Bayesian parameters."""
    return {
        name: list(p.shape)
        for name, p in zip(la.parameter_names, posterior_params(la), strict=True)
    }


def _noise_ratios(la: Any) -> dict[str, Tensor]:
    """The noise of each output, if a posterior has more than one."""
    noise = getattr(la.objective, "output_noise", None)
    return {} if noise is None else {"output_noise": noise.double().cpu()}


def _objective(la: Any) -> list[list[Any]]:
    """What the loss of the fit differed in from the plain one, as names and values."""
    own = la.objective
    weights = own.class_weights
    return [
        ["class_weights", None if weights is None else weights.float().tolist()],
        ["label_smoothing", float(own.label_smoothing)],
        ["ignore_index", int(own.ignore_index)],
    ]


def _check_objective(ours: list[list[Any]], theirs: list[list[Any]] | None) -> None:
    """Raise if a state was fitted with another loss; earlier formats do not tell."""
    for (key, value), (_, saved) in zip(ours, theirs or (), strict=False):
        if saved != value:
            raise ValueError(
                f"Expected a state with {key}={value}, as this object, got {saved}. Remedy: build "
                "the Laplace object with the arguments of the saved one."
            )


def _plain(value: Any) -> str:
    """An enum's value, or the string itself."""
    return str(getattr(value, "value", value))


def _detached(value: Any) -> Any:
    """A tensor without its graph, anything else as it is."""
    return value.detach() if isinstance(value, Tensor) else value
