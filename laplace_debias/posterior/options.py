"""What may be said of a debiased posterior when it is made, and what goes together."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laplace_debias.debias.options import AUTO, CROSSFIT, CrossfitOptions
from laplace_debias.kfac.few_rows import KFAC_APPROXES
from laplace_debias.network.objective import Objective
from laplace_debias.network.vectors import FISHERS, SAMPLERS, Fisher

__all__ = [
    "check_backend",
    "check_objective",
    "check_scales",
    "chosen_curvature",
    "chosen_fisher",
    "noise_ratios",
    "warn_of_damping",
]


def check_backend(name: str, *, debias: str, draws: bool, labels: bool, plain: bool) -> None:
    """Raise unless one of laplace-torch's backends can do what is asked for.

    Args:
        name: Its name; this package's own backends need no check.
        debias: The method.
        draws: Whether that method weights each datum.
        labels: Whether the likelihood is ``"bernoulli"``.
        plain: Whether the training loss is the plain one.

    Raises:
        ValueError: If it cannot.

    Example:
        >>> check_backend("AsdlGGN", debias="two-batch", draws=False, labels=False, plain=True)
    """
    if draws:
        raise ValueError(
            f"Expected the backend HookGGN or HookEF with debias={debias!r}, which weights each "
            f"datum, got {name}. Remedy: leave `backend` out."
        )
    if labels:
        raise ValueError(
            "Expected the backend HookGGN or HookEF with likelihood='bernoulli', which no other "
            f"knows, got {name}. Remedy: leave `backend` out."
        )
    if not plain:
        raise ValueError(
            "Expected the backend HookGGN or HookEF with class weights, label smoothing or one "
            f"noise per output, got {name}. Remedy: leave `backend` out."
        )


def noise_ratios(noise: Any) -> tuple[Tensor | None, Any]:
    """Noises of the outputs, and the common factor of them that stays tunable.

    Args:
        noise: ``sigma_noise`` as it was given: a number, or one for each output.

    Returns:
        The noises ``[C]`` and 1, or ``None`` and the one number.

    Raises:
        ValueError: For a string.

    Example:
        >>> noise_ratios(0.5), noise_ratios([1.0, 2.0])
        ((None, 0.5), (tensor([1., 2.]), 1.0))
    """
    if isinstance(noise, str):
        raise ValueError(
            f"Expected `sigma_noise` to be a number, or one for each output, got {noise!r}. "
            "Remedy: pass e.g. 1.0."
        )
    if isinstance(noise, Tensor | Sequence) and torch.as_tensor(noise).numel() > 1:
        return torch.as_tensor(noise).detach(), 1.0
    return None, noise


def check_objective(objective: Objective, debias: str) -> None:
    """Raise unless a method can do with the training loss.

    Args:
        objective: What it differs in from the plain one.
        debias: The method.

    Raises:
        ValueError: For class weights with ``"crossfit"``.

    Example:
        >>> check_objective(Objective(), "crossfit")
    """
    if objective.class_weights is not None and debias == CROSSFIT:
        raise ValueError(
            "Expected no `class_weights` with debias='crossfit', whose passes over a pool know no "
            "labels, got some. Remedy: debias=True or 'single'."
        )


def warn_of_damping(damping: Any, stacklevel: int = 2) -> None:
    """Say that laplace-torch's ``damping`` has no effect, if it is asked for.

    Args:
        damping: The argument.
        stacklevel: Of whom the warning speaks, counted from the caller.

    Example:
        >>> warn_of_damping(False)
    """
    if damping:
        warnings.warn(
            "`damping=True` has no effect: laplace-torch drops it when it adds the prior.",
            stacklevel=stacklevel + 1,
        )


def chosen_curvature(
    la: Any, kind: str, fisher: Fisher | None, default: Fisher, kwargs: Any, foreign: str | None
) -> Fisher:
    """Check backend, training loss and options of the curvature together.

    Args:
        la: The posterior that is being made; knows its method, its objective and its options.
        kind: The likelihood.
        fisher: Which vectors are propagated back, as said, or ``None``.
        default: What the backend takes.
        kwargs: Arguments of the backend.
        foreign: Name of one of laplace-torch's backends, if it is one.

    Returns:
        Which vectors are propagated back.

    Raises:
        ValueError: If something is unknown, or does not go together.
    """
    draws, plain = la.options is not None, la.objective == Objective()
    if isinstance(la.options, CrossfitOptions) and la.options.n_passes and default == "exact":
        default = "mc"  # a budget of passes goes furthest with one for each datum
    if foreign is not None:
        labels = kind == "bernoulli"
        check_backend(foreign, debias=la.debias, draws=draws, labels=labels, plain=plain)
    return chosen_fisher(
        fisher,
        default,
        debias=la.debias,
        kfac_approx=la.kfac_approx,
        sampler=la.sampler,
        backend_kwargs=kwargs,
        foreign=foreign,
    )


def chosen_fisher(
    fisher: Fisher | None,
    default: Fisher,
    *,
    debias: str,
    kfac_approx: str,
    sampler: str,
    backend_kwargs: dict[str, Any],
    foreign: str | None = None,
) -> Fisher:
    """Check the options of the curvature; the backend decides where nothing was said.

    Args:
        fisher: What was said, or ``None``.
        default: What the backend takes.
        debias: The method.
        kfac_approx: How positions are summed.
        sampler: How vectors are drawn.
        backend_kwargs: Arguments of the backend.
        foreign: Name of one of laplace-torch's backends, if it is one.

    Returns:
        Which vectors are propagated back.

    Raises:
        ValueError: If options are unknown, or do not go together.

    Example:
        >>> options = {"kfac_approx": "expand", "sampler": "trace", "backend_kwargs": {}}
        >>> chosen_fisher(None, "exact", debias="two-batch", **options)
        'exact'
    """
    if foreign is not None:
        if kfac_approx != "expand" or fisher is not None or sampler != "trace":
            raise ValueError(
                "Expected `kfac_approx`, `fisher` and `sampler` with the backends HookGGN and "
                f"HookEF only, got them with {foreign}. Remedy: leave `backend` out."
            )
        return "exact"
    if "stochastic" in backend_kwargs:
        raise ValueError(
            "Expected the sampled curvature as an option of its own, got "
            "backend_kwargs={'stochastic': ...}. Remedy: fisher='mc'."
        )
    for name, value, known in (
        ("kfac_approx", kfac_approx, KFAC_APPROXES),
        ("fisher", fisher or default, FISHERS),
        ("sampler", sampler, SAMPLERS),
    ):
        if value not in known:
            raise ValueError(
                f"Expected `{name}` to be one of {known}, got {value!r}. Remedy: pass one of them."
            )
    if debias == AUTO and (fisher or default) != "exact":
        raise ValueError(
            "Expected the exact curvature with debias='auto', whose draws are of its own, got "
            f"fisher={fisher or default!r}. Remedy: leave `fisher` and `backend` out."
        )
    return fisher or default


def check_scales(sigma_noise: Any, temperature: Any) -> None:
    """Raise unless noise and temperature are positive and finite.

    Args:
        sigma_noise: Standard deviation of the observation noise.
        temperature: laplace-torch's, of the posterior.

    Raises:
        ValueError: If one is not.

    Example:
        >>> check_scales(1.0, 1.0)
    """
    for name, given in (("sigma_noise", sigma_noise), ("temperature", temperature)):
        value = float(given)
        if not 0 < value < float("inf"):
            raise ValueError(
                f"Expected a positive, finite `{name}`, got {value}. Remedy: pass e.g. 1.0."
            )


def check_prior_precision(value: float | Tensor) -> None:
    """Raise unless a prior precision is positive and finite.

    Args:
        value: One number or several.

    Raises:
        ValueError: If one is not.

    Example:
        >>> check_prior_precision(1.0)
    """
    try:
        given = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"Expected a prior precision as a number or a tensor, got {value!r}. Remedy: pass e.g. "
            "1.0."
        ) from error
    if not bool((torch.isfinite(given) & (given > 0)).all()):
        raise ValueError(
            f"Expected a positive, finite prior precision, got {value}. Remedy: pass e.g. 1.0."
        )


def check_parameters(found: Sequence[str], expected: Sequence[str]) -> None:
    """Raise unless a fit is about to cover the parameters that the posterior was built for.

    Args:
        found: Names of the parameters that require a gradient now.
        expected: Names of those that did when the posterior was built.

    Raises:
        ValueError: If they differ.

    Example:
        >>> check_parameters(("weight",), ["weight"])
    """
    if list(found) != list(expected):
        raise ValueError(
            "Expected the parameters that required a gradient when this object was built, "
            f"{list(expected)}, got {list(found)}. Remedy: freeze parameters before building it, "
            "and build a new one."
        )
