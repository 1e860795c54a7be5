r"""Prior precision and logit temperature from validation data, then a prior per layer.

The logits of the linearised network are Gaussian with means :math:`\mu` and covariances
:math:`\Sigma(\delta)`. Divided by :math:`T` they have means :math:`\mu / T` and covariances
:math:`\Sigma(\delta) / T^2`: every T of a grid comes from the moments of one pass, as every
:math:`\delta` does.

A regression has no logits, but a noise :math:`\sigma`. With noise :math:`s \sigma` and prior
precision :math:`\delta` the posterior precision is :math:`(H / \sigma^2 + s^2 \delta) / s^2`, so
that :math:`\Sigma(\delta; s \sigma) = s^2\, \Sigma(s^2 \delta; \sigma)`: for every ridge
:math:`s^2 \delta` of the grid, all covariances of targets scale with :math:`s^2`, and the NLL is
lowest at :math:`s^2 = \mathrm{mean}\, r^\top (\Sigma + \sigma^2)^{-1} r / D`, r the residuals.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from laplace.baselaplace import KronLaplace
from torch import Tensor
from torch.nn.functional import logsigmoid
from torchmetrics import Metric

from laplace_debias.data.loaders import is_main
from laplace_debias.data.processes import counted, together, total
from laplace_debias.data.reading import read
from laplace_debias.evaluation.layerwise import layerwise_trial
from laplace_debias.evaluation.predictors import (
    for_metrics,
    ignore_index_of,
    model_predictor,
)
from laplace_debias.evaluation.regression import ScaledResiduals, scaled_nll
from laplace_debias.evaluation.table import fresh_metrics
from laplace_debias.evaluation.tuning_result import LayerwiseTrial, TuningResult
from laplace_debias.network.loss import likelihood_name
from laplace_debias.network.preserve import evaluation_mode
from laplace_debias.network.upstream import device_of, noise_of
from laplace_debias.predictive.eigenblocks import PriorPrecisions, check_fitted, default_grid
from laplace_debias.predictive.links import (
    check_link,
    label_log_probabilities,
    needs_diagonal_only,
    position_log_probabilities,
)
from laplace_debias.predictive.predictions import Prediction, PredictorOf, check_method, moments_by

__all__ = ["LayerwiseTrial", "TuningResult", "check_logit_temperature", "tune"]

LOGIT_TEMPERATURES = tuple(2 ** (i / 4) for i in range(-8, 9))
"""From 1/4 to 4, four per factor of two."""


def check_logit_temperature(value: float) -> None:
    """Raise unless a temperature is positive and finite.

    Args:
        value: The temperature T.

    Raises:
        ValueError: If it is not.

    Example:
        >>> check_logit_temperature(1.5)
    """
    if not 0 < float(value) < float("inf"):
        raise ValueError(
            f"Expected a positive, finite `logit_temperature`, got {value}. Remedy: pass e.g. 1.0."
        )


def tune(
    la: KronLaplace,
    val_loader: Iterable[Any],
    objective: str = "nll",
    *,
    predictor_of: PredictorOf,
    prior_precisions: PriorPrecisions | None = None,
    logit_temperatures: Sequence[float] | None = None,
    noise: bool = True,
    layerwise: bool = True,
    link_approx: str = "probit",
    n_samples: int = 100,
    seed: int = 0,
    progress_bar: bool | None = None,
) -> TuningResult:
    r"""Find prior precision and logit temperature on validation data; ``la`` is left as it is.

    A regression has a ``sigma_noise`` in place of a temperature: the best one for every prior
    precision is known in closed form.

    All pairs of the grid come from one pass. Then one more pass prepares a prior precision per
    parameter tensor, found by gradient steps on every other datum and kept only where the data in
    between confirm it: their mean improvement has to exceed its standard error. ``la.tune(...)``
    does the same and takes the result.

    The marginal likelihood of the training data often picks far too small a prior precision for a
    network that was not trained with it; validation data do not.

    Args:
        la: A fitted ``KronLaplace`` or ``KronLLLaplace``.
        val_loader: Mini-batches ``(x, y)`` or mappings, or one such mini-batch.
        objective: Name of a metric with a direction, see
            :func:`~laplace_debias.evaluation.table.metric_table`.
        predictor_of: Makes the linearised predictive of ``la`` at given prior precisions:
            :class:`~laplace_debias.predictive.predictor.StructuredPredictor`.
        prior_precisions: k numbers; by default
            :func:`~laplace_debias.predictive.eigenblocks.default_grid`. Where the noise is tuned
            they move by what the posterior itself explains of the residuals.
        logit_temperatures: By default 17 from 1/4 to 4; a regression has none.
        noise: Whether to scale the ``sigma_noise`` of a regression as well, for the objective
            ``"nll"``; with ``False`` it stays what the user said.
        layerwise: Whether to try a prior precision per parameter tensor: for the objective
            ``"nll"``, with the link ``"probit"`` or for regression.
        link_approx: Link approximation; use the one you predict with.
        n_samples: Number of samples for ``"mc"``.
        seed: Decides the random numbers of ``"mc"``, which all pairs share.
        progress_bar: Show progress bars; by default on a terminal.

    Returns:
        A :class:`TuningResult`.

    Raises:
        ValueError: For an unknown objective or link, grids that are none, or an empty loader.

    Example:
        >>> from laplace_debias import Laplace
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Linear(2, 2)
        >>> X = torch.randn(40, 2)
        >>> batch = (X, (X[:, 0] > 0).long())
        >>> la = Laplace(net, "classification", "all", "kron", debias="single")
        >>> la.fit(batch, n_data=40)
        >>> result = la.tune(batch, prior_precisions=[1.0, 10.0], logit_temperatures=[0.5, 1.0])
        >>> len(result.values), len(result.values[0])
        (2, 2)
    """
    check_fitted(la)
    check_link(link_approx)
    likelihood = likelihood_name(la.likelihood)
    regression = likelihood == "regression"
    Ts = _temperatures(logit_temperatures, regression)
    grid = default_grid(la.n_data) if prior_precisions is None else prior_precisions
    tuned_noise = regression and noise and objective == "nll"
    if tuned_noise and iter(val_loader) is not val_loader:  # what is read once is read below
        grid = plain_square(la, val_loader) * torch.as_tensor(grid)
    predictor = predictor_of(la, grid, keep_graph=False)
    deltas = predictor.deltas
    if not bool((deltas == deltas[:, :1]).all()):
        raise ValueError(
            f"Expected scalar prior precisions, got layer-wise ones of shape {list(deltas.shape)}. "
            "Remedy: leave them to `layerwise=True`, or use `sweep_prior_precision`."
        )
    k = len(deltas)
    # the last row is the plain network's
    sigma = noise_of(la)
    copies = fresh_metrics(
        [objective], (k + 1) * len(Ts), likelihood, sigma_noise=sigma, device=deltas.device
    )[objective]
    scales: list[Metric] = [
        ScaledResiduals(sigma).to(deltas.device) for _ in range(k + 1 if tuned_noise else 0)
    ]
    direction = copies[0].higher_is_better
    if direction is None:
        raise ValueError(
            f"Expected an objective that says whether large or small values are better, got "
            f"{objective!r}. Remedy: 'nll'."
        )
    labels = likelihood == "bernoulli"
    diagonal = labels or (needs_diagonal_only(link_approx) and not regression)
    generator = torch.Generator(deltas.device).manual_seed(seed)
    method, ignored = str(getattr(la, "predictive_method", "auto")), ignore_index_of(la)
    check_method(method)
    n_data, apart = 0, not labels
    shown: dict[str, Any] = {"progress": "tune", "progress_bar": progress_bar}
    with torch.no_grad(), together("its share of the validation data"):
        for x, y in read(val_loader, device_of(la), la.dict_key_y, name="val_loader", **shown):
            way = predictor.chosen_method(x, n_samples, diagonal) if method == "auto" else method
            result = moments_by(predictor, x, way, n_samples, generator, diagonal)
            covariance = result.covariance if predictor.many else result.covariance[None]
            covariance = torch.cat([covariance, torch.zeros_like(covariance[:1])])  # plain
            # positions of a datum are no data that could judge what others chose
            apart &= way == "exact" and result.mean.ndim == 2
            n_rows = len(y)
            state = generator.get_state()
            for j, T in enumerate(Ts):
                generator.set_state(state)
                links = (link_approx, diagonal, n_samples, generator)
                predictions = _predictions(result.mean, covariance, T, likelihood, *links)
                for i, prediction in enumerate(predictions):
                    rows, targets = for_metrics(prediction, y, likelihood, ignored)
                    n_rows = n_rows if labels else len(targets)
                    if len(targets):
                        copies[i * len(Ts) + j].update(*rows, targets)
                        for metric in scales[i : i + 1]:
                            metric.update(*rows, targets)
            n_data += n_rows
    n_data, apart = counted(n_data), not total(int(not apart))
    flat = [float(metric.compute()) for metric in copies]
    squares = [float(metric.compute()) for metric in scales] or [1.0] * (k + 1)
    if scales:
        D = la.n_outputs
        flat = [scaled_nll(nll, s2, D) for nll, s2 in zip(flat, squares, strict=True)]
    values = [tuple(flat[i : i + len(Ts)]) for i in range(0, len(flat), len(Ts))]
    ridges = deltas[:, 0].tolist()
    found = TuningResult(
        objective=objective,
        higher_is_better=direction,
        prior_precisions=tuple(d / (s or math.nan) for d, s in zip(ridges, squares, strict=False)),
        logit_temperatures=Ts,
        values=tuple(values[:-1]),
        plain=values[-1],
        n_data=n_data,
        link_approx=None if regression else link_approx,
        noise_scales=tuple(map(math.sqrt, squares[:-1])) if scales else None,
    )
    for text in found.warnings() if is_main() else ():
        warnings.warn(text, stacklevel=3)
    differentiable = objective == "nll" and (regression or link_approx == "probit")
    if not layerwise or not differentiable or not apart or deltas.shape[1] < 2:
        return found
    i, j = found.best_index
    options: dict[str, Any] = {"predictor_of": predictor_of, "progress_bar": progress_bar}
    # what no point of the grid has seen is not for gradients to find
    options["bounds"] = (min(ridges), max(ridges))
    options["noise_scale"] = found.noise_scale
    trial = layerwise_trial(la, val_loader, ridges[i], Ts[j], **options)
    return found.with_trial(trial)


def plain_square(la: KronLaplace, val_loader: Iterable[Any]) -> float:
    """By how much the noise's variance is off for the plain network, by forward passes alone.

    Ridges of a grid of prior precisions that are multiplied by it belong to these prior precisions
    once the noise is tuned, up to what the posterior itself explains.

    Args:
        la: A fitted regression; its mode is left as it is.
        val_loader: Mini-batches ``(x, y)`` or mappings, or one such mini-batch.

    Returns:
        The mean squared residual over the variance of the noise; 1 where there is none.
    """
    metric: Metric = ScaledResiduals(noise_of(la)).to(device_of(la))
    predict = model_predictor(la.model, "regression")
    with evaluation_mode(la.model), together("its share of the validation data"):
        for x, y in read(val_loader, device_of(la), la.dict_key_y, name="val_loader"):
            rows, targets = for_metrics(predict(x), y, "regression")
            metric.update(*rows, targets)
    square = float(metric.compute())
    return square if 0 < square < math.inf else 1.0


def _temperatures(given: Sequence[float] | None, regression: bool) -> tuple[float, ...]:
    """The grid of temperatures: positive numbers, and 1 alone for a regression."""
    if regression:
        if given is not None and set(map(float, given)) != {1.0}:
            raise ValueError(
                f"Expected no `logit_temperatures` for a regression, which has no logits; got "
                f"{list(given)}. Remedy: leave them out."
            )
        return (1.0,)
    Ts = LOGIT_TEMPERATURES if given is None else tuple(map(float, given))
    if not Ts:
        raise ValueError(
            "Expected at least one logit temperature, got none. Remedy: pass e.g. [1.0]."
        )
    for T in Ts:
        check_logit_temperature(T)
    return tuple(sorted(Ts))


def _predictions(
    mean: Tensor,
    covariance: Tensor,
    T: float,
    likelihood: str,
    link_approx: str,
    diagonal: bool,
    n_samples: int,
    generator: torch.Generator,
) -> list[Prediction]:
    """Predictions for every covariance; the last one's is zero, which not every link can take."""
    if likelihood == "regression":
        return [(mean, one) for one in covariance]
    options: dict[str, Any] = {"n_samples": n_samples, "generator": generator}
    f, covariance = mean / T, covariance[:-1] / T**2
    if likelihood == "bernoulli":
        log_probs = label_log_probabilities(f, covariance, link_approx, **options)
        plain = logsigmoid(torch.stack([-f, f], dim=-1))
    else:
        options["diagonal"] = diagonal
        log_probs = position_log_probabilities(f, covariance, link_approx, **options)
        plain = f.log_softmax(-1)
    return [*((one,) for one in log_probs), (plain,)]
