"""Predictions of a comparison's methods, and their metrics on every evaluation set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from laplace.baselaplace import KronLaplace
from torch import Tensor, nn

from laplace_debias.data.loaders import as_batches
from laplace_debias.data.processes import together, total
from laplace_debias.data.reading import read
from laplace_debias.data.targets import IGNORED
from laplace_debias.evaluation.gaussian_streams import RegressionMetrics
from laplace_debias.evaluation.metrics import entropy_auroc, entropy_fpr95
from laplace_debias.evaluation.predictors import model_predictor
from laplace_debias.evaluation.streams import CalibrationMetrics
from laplace_debias.evaluation.table import metric_table
from laplace_debias.network.loss import Likelihood, likelihood_name
from laplace_debias.network.preserve import evaluation_mode
from laplace_debias.network.upstream import device_of
from laplace_debias.predictive.links import needs_diagonal_only, position_log_probabilities
from laplace_debias.predictive.predictions import (
    Prediction,
    glm_predictions,
    logit_temperature_of,
)
from laplace_debias.predictive.predictor import SharedPredictor, StructuredPredictor

__all__ = ["Run", "evaluate_sets", "laplace_run", "named_sets", "plain_run", "predictor_run"]

# takes (i, prediction, targets or None) of each prediction i
Update = Callable[[int, Prediction, Tensor | None], None]


class Run(Protocol):
    """Reads a loader and hands over every prediction."""

    def __call__(
        self, loader: Iterable[Any], update: Update, *, labelled: bool = True, name: str = "loader"
    ) -> None:
        """Read; see :func:`laplace_debias.data.reading.read` for ``labelled`` and ``name``."""
        ...


def plain_run(
    model: nn.Module,
    key_y: str = "labels",
    likelihood: Likelihood = "classification",
    temperature: float = 1.0,
) -> Run:
    """Predictions of the plain model.

    Args:
        model: A network.
        key_y: Key of the targets in mini-batches that are mappings.
        likelihood: ``"classification"`` or ``"regression"``.
        temperature: What logits are divided by.

    Example:
        >>> run = plain_run(nn.Linear(2, 3))
        >>> run([(torch.ones(4, 2), torch.zeros(4))], lambda i, p, y: print(i, p[0].shape))
        0 torch.Size([4, 3])
    """
    predict = model_predictor(model, likelihood)

    def run(loader: Iterable[Any], update: Update, **reading: Any) -> None:
        device = next(model.parameters()).device
        with evaluation_mode(model):
            for X, y in read(loader, device, key_y, **reading):
                prediction = predict(X)
                if temperature != 1:  # the normalisation of log-probabilities does not matter
                    prediction = ((prediction[0] / temperature).log_softmax(-1),)
                update(0, prediction, y)

    return run


def laplace_run(
    las: list[KronLaplace], grid: list[float], link_approx: str, n_samples: int, seed: int
) -> Run:
    """Predictions of the linearised network for every posterior and prior precision.

    Args:
        las: Fitted approximations around the same model, which share the passes through it.
        grid: The k prior precisions.
        link_approx: See :mod:`laplace_debias.predictive.links`.
        n_samples: Number of samples for ``"mc"``.
        seed: Decides the random numbers.

    Returns:
        A run whose predictions are numbered ``posterior * k + i``.
    """
    predictors = [StructuredPredictor(la, grid, keep_graph=False) for la in las]
    return predictor_run(predictors, link_approx, n_samples, seed)


def predictor_run(
    predictors: Sequence[StructuredPredictor], link_approx: str, n_samples: int, seed: int
) -> Run:
    """The same for predictors over one grid.

    Every set starts from the same random numbers, whatever the posterior.

    Args:
        predictors: Predictors around the same model, which share the passes through it.
        link_approx: See :mod:`laplace_debias.predictive.links`.
        n_samples: Number of samples for ``"mc"``.
        seed: Decides the random numbers.

    Returns:
        A run whose predictions are numbered ``predictor * k + i``.
    """
    shared, las = SharedPredictor(predictors), [predictor.la for predictor in predictors]
    regression = likelihood_name(las[0].likelihood) == "regression"
    diagonal = needs_diagonal_only(link_approx) and not regression
    k = len(predictors[0].deltas)
    way = getattr(las[0], "predictive_method", "auto")

    @torch.no_grad()
    def run(loader: Iterable[Any], update: Update, **reading: Any) -> None:
        generators = [torch.Generator(device_of(la)).manual_seed(seed) for la in las]
        for x, y in read(loader, device_of(las[0]), las[0].dict_key_y, **reading):
            method = predictors[0].chosen_method(x, n_samples, diagonal) if way == "auto" else way
            if method != "exact":
                for number, (one, generator) in enumerate(zip(predictors, generators, strict=True)):
                    predictions = glm_predictions(
                        one,
                        x,
                        regression=regression,
                        link_approx=link_approx,
                        n_samples=n_samples,
                        method=method,
                        generator=generator,
                        logit_temperature=logit_temperature_of(las[number]),
                    )
                    for i, prediction in enumerate(predictions, number * k):
                        update(i, prediction, y)
                continue
            results = zip(shared(x, diagonal), generators, strict=True)
            for number, (result, generator) in enumerate(results):
                if regression:
                    for i, covariance in enumerate(result.covariance, number * k):
                        update(i, (result.mean, covariance), y)
                    continue
                T = logit_temperature_of(las[number])
                log_probs = position_log_probabilities(
                    result.mean / T,
                    result.covariance / T**2,
                    link_approx,
                    diagonal=diagonal,
                    n_samples=n_samples,
                    generator=generator,
                )
                for i, one in enumerate(log_probs, number * k):
                    update(i, (one,), y)

    return run


def evaluate_sets(
    run: Run,
    sets: dict[str, Iterable[Any]],
    k: int,
    n_bins: int,
    *,
    likelihood: Likelihood = "classification",
    sigma_noise: float | Tensor = 1.0,
    ignore_index: int = IGNORED,
) -> list[dict[str, float]]:
    """Metrics of k predictions on every set.

    Args:
        run: Makes the predictions.
        sets: Loaders by the prefix of their metrics; the test set comes first and has none.
        k: Number of predictions per datum.
        n_bins: Number of bins of the ECE.
        likelihood: ``"classification"`` or ``"regression"``, whose sets must all have targets.
        sigma_noise: Standard deviation of a regression's observation noise.
        ignore_index: The label of positions (tokens, pixels) that do not count.

    Returns:
        Metrics by name, for each of the k predictions.

    Raises:
        ValueError: If a set is empty, or its data or predictions are invalid.
    """
    values: list[dict[str, float]] = [{} for _ in range(k)]
    id_entropies: list[Tensor] = []
    classes = likelihood == "classification"
    for prefix, loader in sets.items():
        metrics: list[Any] = [
            CalibrationMetrics(n_bins, ignore_index)
            if classes
            else RegressionMetrics(sigma_noise=sigma_noise)
            for _ in range(k)
        ]

        def update(
            i: int, prediction: Prediction, y: Tensor | None, metrics: list[Any] = metrics
        ) -> None:
            if y is None:
                metrics[i].update_ood(*prediction)
            else:
                metrics[i].update(*prediction, y)

        name = f"ood_loader['{prefix}']" if prefix else "test_loader"
        with together("its share of the evaluation"):
            run(loader, update, labelled=not prefix or not classes, name=name)
        for i, metric in enumerate(metrics):
            known = id_entropies[i] if prefix and classes else None
            values[i] |= _set_values(metric, prefix, likelihood, known)
        if classes:
            id_entropies = id_entropies or [metric.entropies for metric in metrics]
    return values


def named_sets(
    test_loader: Iterable[Any],
    ood_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None,
    val_loader: Iterable[Any] | None,
) -> dict[str, Iterable[Any]]:
    """Evaluation sets by prefix of their metrics; the test set has none.

    Args:
        test_loader: The test set.
        ood_loader: Another set, or several by name.
        val_loader: Validation data.

    Returns:
        Loaders by prefix.
    """
    sets = {"": as_batches(test_loader)}
    if val_loader is not None:
        sets["val"] = as_batches(val_loader)
    if ood_loader is None:
        return sets
    return sets | (dict(ood_loader) if isinstance(ood_loader, Mapping) else {"ood": ood_loader})


def _set_values(
    metric: CalibrationMetrics | RegressionMetrics,
    prefix: str,
    likelihood: Likelihood,
    id_entropies: Tensor | None,
) -> dict[str, float]:
    """Numbers of one set, named with its prefix."""
    values: dict[str, float] = {}
    labelled = total(metric.n_data) > 0
    if labelled:
        scalars = metric.compute().scalars()
        values = {name: scalars[name] for name in metric_table(likelihood) if name in scalars}
    if id_entropies is not None and isinstance(metric, CalibrationMetrics):
        ood_entropies = metric.entropies if labelled else metric.ood_entropies
        values["mean_entropy"] = ood_entropies.double().mean().item()
        values["auroc"] = entropy_auroc(id_entropies, ood_entropies)
        values["fpr95"] = entropy_fpr95(id_entropies, ood_entropies)
    return {f"{prefix}_{name}" if prefix else name: value for name, value in values.items()}
