"""What a posterior predicts: from which predictor or sampled networks, and through which link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from laplace.utils.enums import Likelihood
from torch import Tensor

from laplace_debias.data.inputs import Inputs, on_device
from laplace_debias.network.calling import as_outputs
from laplace_debias.network.loss import likelihood_name
from laplace_debias.network.preserve import evaluation_mode, no_autocast
from laplace_debias.network.upstream import device_of, posterior_params
from laplace_debias.predictive.links import (
    check_n_samples,
    mean_label_log_probabilities,
    mean_log_probabilities,
)
from laplace_debias.predictive.network_samples import network_samples
from laplace_debias.predictive.predictions import Prediction, glm_predictions

__all__ = [
    "inverse_link",
    "kept_predictor",
    "log_probabilities",
    "predictive",
    "sampled_outputs",
]


def predictive(
    la: Any,
    x: Inputs,
    pred_type: str,
    link_approx: str,
    options: tuple[int, bool, torch.Generator | None],
    /,
    *,
    joint: bool = False,
    fitting: bool = False,
    **model_kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Class probabilities, or mean and (co)variance where outputs are the predictions.

    Args:
        la: A fitted debiased Laplace approximation.
        x: Inputs of n data.
        pred_type: ``"glm"`` or ``"nn"``.
        link_approx: The link approximation.
        options: Number of samples, whether to drop covariances, and the generator.
        joint: Whether to return the covariance across data.
        fitting: Whether ``x`` holds pairs, for reward modelling.
        **model_kwargs: For the network's forward pass with ``pred_type="nn"``.

    Example:
        >>> from laplace_debias import Laplace
        >>> la = Laplace(torch.nn.Linear(2, 1), "regression", "all", "kron", debias="single")
        >>> la.fit((torch.randn(8, 2), torch.randn(8, 1)), n_data=8)
        >>> mean, variance = predictive(la, torch.randn(5, 2), "glm", "probit", (1, False, None))
        >>> mean.shape, variance.shape
        (torch.Size([5, 1]), torch.Size([5, 1, 1]))
    """
    n_samples, _, generator = options
    if not _predicts_values(la, fitting):
        log_p: Tensor = la.log_probabilities(x, pred_type, link_approx, *options, **model_kwargs)
        return (log_p[..., 1] if _predicts_labels(la) else log_p).exp()
    pred_type, link_approx = _checked(la, pred_type, link_approx, generator)
    if pred_type == "nn":
        samples = la.network_samples(x, n_samples, generator, **model_kwargs)
        return samples.mean(0), samples.var(0)
    if joint:
        moments: tuple[Tensor, Tensor] = la.output_moments(x, joint=True)
        return moments
    mean, variance = _linearized(la, x, link_approx, options, values=True)
    return mean, variance


def log_probabilities(
    la: Any,
    x: Inputs,
    pred_type: str,
    link_approx: str,
    options: tuple[int, bool, torch.Generator | None],
    /,
    **model_kwargs: Any,
) -> Tensor:
    """Logarithms of class probabilities, never by way of the probabilities.

    Args:
        la: A fitted debiased Laplace approximation.
        x: Inputs of n data.
        pred_type: ``"glm"`` or ``"nn"``.
        link_approx: The link approximation.
        options: Number of samples, whether to drop covariances, and the generator.
        **model_kwargs: For the network's forward pass with ``pred_type="nn"``.

    Raises:
        ValueError: For a regression, or arguments that do not fit.

    Example:
        >>> from laplace_debias import Laplace
        >>> la = Laplace(torch.nn.Linear(2, 3), "classification", "all", "kron", debias="single")
        >>> la.fit((torch.randn(8, 2), torch.arange(8) % 3), n_data=8)
        >>> log_probabilities(la, torch.randn(5, 2), "glm", "probit", (1, False, None)).shape
        torch.Size([5, 3])
    """
    if likelihood_name(la.likelihood) == "regression":
        raise ValueError(
            "Expected a classification, got a regression, which has no classes. Remedy: "
            "`la(x)` returns its mean and covariance."
        )
    n_samples, _, generator = options
    labels = _predicts_labels(la)
    pred_type, link_approx = _checked(la, pred_type, link_approx, generator)
    if pred_type == "nn":
        samples = la.network_samples(x, n_samples, generator, **model_kwargs)
        mean = mean_label_log_probabilities if labels else mean_log_probabilities
        log_p = mean(samples / la.logit_temperature)
    else:
        log_p = _linearized(la, x, link_approx, options, values=False)[0]
    return log_p if labels else as_outputs(log_p)


def inverse_link(la: Any, fs: Tensor) -> Tensor:
    """Probabilities of sampled outputs, or the outputs themselves where they are the predictions.

    Args:
        la: A debiased Laplace approximation.
        fs: Samples ``[S, n, C]``.

    Example:
        >>> from laplace_debias import Laplace
        >>> la = Laplace(torch.nn.Linear(2, 1), "bernoulli", "all", "kron", debias=True)
        >>> inverse_link(la, torch.zeros(1, 1, 1)).item()
        0.5
    """
    if _predicts_labels(la):
        return torch.sigmoid(fs / la.logit_temperature)
    return fs if _predicts_values(la) else la.probabilities(fs)


def sampled_outputs(
    la: Any, X: Inputs, n_samples: int, generator: torch.Generator | None, /, **model_kwargs: Any
) -> Tensor:
    """Outputs ``[S, n, C]`` of networks with sampled weights; the model is never written to.

    Args:
        la: A fitted debiased Laplace approximation.
        X: Inputs of n data.
        n_samples: Number S of networks.
        generator: Source of the samples.
        **model_kwargs: For the network's forward pass.

    Example:
        >>> from laplace_debias import Laplace
        >>> la = Laplace(torch.nn.Linear(2, 1), "regression", "all", "kron", debias="single")
        >>> la.fit((torch.randn(8, 2), torch.randn(8, 1)), n_data=8)
        >>> sampled_outputs(la, torch.randn(5, 2), 7, None).shape
        torch.Size([7, 5, 1])
    """
    check_n_samples(n_samples)
    X = on_device(X, device_of(la))
    samples = la.sample(n_samples, generator)
    with evaluation_mode(la.model), no_autocast():
        outputs = torch.stack(
            list(network_samples(la.model, la.parameter_names, samples, X, **model_kwargs))
        )
    return outputs if la.enable_backprop else outputs.detach()


def kept_predictor(
    la: Any, kept: tuple[Any, Any] | None, make: Callable[[], Any]
) -> tuple[Any, Any]:
    """What is kept between predictions, made anew if something that it depends on has changed.

    That is the fit, the prior precision, the noise, the temperature, and which parameters there
    are, where and of which type; their values are the model's own.

    Args:
        la: A fitted debiased Laplace approximation.
        kept: What this function has returned before, or ``None``.
        make: Makes a predictor.

    Returns:
        A key, and the predictor that belongs to it.

    Example:
        >>> from laplace_debias import Laplace
        >>> la = Laplace(torch.nn.Linear(2, 1), "regression", "all", "kron", debias=True)
        >>> first = kept_predictor(la, None, object)
        >>> kept_predictor(la, first, object) is first
        True
        >>> la.prior_precision = 2.0
        >>> kept_predictor(la, first, object) is first
        False
    """
    params = posterior_params(la)
    scales = [la.prior_precision, torch.as_tensor(la.sigma_noise)]
    key = (
        [la.H, *scales, *params],
        [_version(t) for t in scales],
        [(p.device, p.dtype, p.shape) for p in params],
        (float(la.temperature), la.memory_budget, la.enable_backprop),
        (la.verify, la.data_keys),
    )
    return kept if kept is not None and _same(kept[0], key) else (key, make())


def _linearized(
    la: Any,
    x: Inputs,
    link_approx: str,
    options: tuple[int, bool, torch.Generator | None],
    *,
    values: bool,
) -> Prediction:
    """``(log-probabilities,)``, or means and (co)variances, of the linearised network."""
    n_samples, diagonal_output, generator = options
    (prediction,) = glm_predictions(
        la.predictor(),
        x,
        regression=values,
        link_approx=link_approx,
        n_samples=n_samples,
        method=la.predictive_method,
        generator=generator,
        diagonal_output=diagonal_output,
        labels=_predicts_labels(la) and not values,
        logit_temperature=la.logit_temperature,
    )
    return prediction


def _checked(
    la: Any, pred_type: str, link_approx: str, generator: torch.Generator | None
) -> tuple[str, str]:
    """Names of the kind of prediction and the link; an error if they do not fit."""
    pred_type, link_approx = (
        str(getattr(pred_type, "value", pred_type)),
        str(getattr(link_approx, "value", link_approx)),
    )
    if pred_type not in ("glm", "nn"):
        raise ValueError(
            f"Expected pred_type 'glm' or 'nn', got {pred_type!r}. Remedy: pass one of them."
        )
    if pred_type == "nn" and link_approx != "mc":
        raise ValueError(
            f"Expected link_approx='mc' with pred_type='nn', got {link_approx!r}. Remedy: "
            "sampled networks know no other link."
        )
    if generator is not None and (
        not isinstance(generator, torch.Generator) or generator.device != device_of(la)
    ):
        raise ValueError(
            f"Expected a torch.Generator on {device_of(la)}, got {generator!r}. Remedy: "
            "`torch.Generator(device)`."
        )
    return pred_type, link_approx


def _predicts_labels(la: Any) -> bool:
    """Whether every output is a yes-or-no label of its own."""
    return likelihood_name(la.likelihood) == "bernoulli"


def _predicts_values(la: Any, fitting: bool = False) -> bool:
    """Whether outputs are the predictions: for a regression, and for rewards."""
    rewards = la.likelihood == Likelihood.REWARD_MODELING and not fitting
    return bool(rewards or likelihood_name(la.likelihood) == "regression")


def _version(t: Tensor) -> Any:
    """What changes with a tensor's values; one of inference mode does not count its changes."""
    return t.tolist() if t.is_inference() else t._version


def _same(one: tuple[Any, ...], two: tuple[Any, ...]) -> bool:
    """Whether two keys of a kept predictor agree; tensors and posteriors by identity."""
    objects, others = one[0], two[0]
    return (
        len(objects) == len(others)
        and all(a is b for a, b in zip(objects, others, strict=True))
        and one[1:] == two[1:]
    )
