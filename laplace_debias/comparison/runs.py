"""Predictions of a comparison's methods, and their metrics on every evaluation set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from laplace.baselaplace import KronLaplace
from torch import Tensor, nn

from laplace_debias.data.reading import read
from laplace_debias.evaluation.metrics import entropy_auroc
from laplace_debias.evaluation.predictors import model_predictor
from laplace_debias.evaluation.streams import CalibrationMetrics
from laplace_debias.evaluation.table import metric_table
from laplace_debias.network.preserve import evaluation_mode
from laplace_debias.network.upstream import device_of
from laplace_debias.predictive.links import class_log_probabilities, needs_diagonal_only
from laplace_debias.predictive.predictions import glm_predictions
from laplace_debias.predictive.predictor import SharedPredictor, StructuredPredictor

__all__ = ["Run", "evaluate_sets", "laplace_run", "plain_run"]

# takes (i, log-probabilities [n, C], labels [n] or None) of each prediction i
Update = Callable[[int, Tensor, Tensor | None], None]


class Run(Protocol):
    """Reads a loader and hands over every prediction."""

    def __call__(
        self, loader: Iterable[Any], update: Update, *, labelled: bool = True, name: str = "loader"
    ) -> None:
        """Read; see :func:`laplace_debias.data.reading.read` for ``labelled`` and ``name``."""
        ...


def plain_run(model: nn.Module, key_y: str = "labels") -> Run:
    """Predictions of the plain model.

    Args:
        model: A classifier.
        key_y: Key of the labels in mini-batches that are mappings.

    Example:
        >>> run = plain_run(nn.Linear(2, 3))
        >>> run([(torch.ones(4, 2), torch.zeros(4))], lambda i, lp, y: print(i, lp.shape))
        0 torch.Size([4, 3])
    """
    predict = model_predictor(model, "classification")

    def run(loader: Iterable[Any], update: Update, **reading: Any) -> None:
        device = next(model.parameters()).device
        with evaluation_mode(model):
            for X, y in read(loader, device, key_y, **reading):
                (log_probs,) = predict(X)
                update(0, log_probs, y)

    return run


def laplace_run(
    las: list[KronLaplace], grid: list[float], link_approx: str, n_samples: int, seed: int
) -> Run:
    """Predictions of the linearised network for every posterior and prior precision.

    Every set starts from the same random numbers, whatever the posterior.

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
    shared, diagonal = SharedPredictor(predictors), needs_diagonal_only(link_approx)
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
                        regression=False,
                        link_approx=link_approx,
                        n_samples=n_samples,
                        method=method,
                        generator=generator,
                    )
                    for i, (log_probs,) in enumerate(predictions, number * len(grid)):
                        update(i, log_probs, y)
                continue
            results = zip(shared(x, diagonal), generators, strict=True)
            for number, (result, generator) in enumerate(results):
                log_probs = class_log_probabilities(
                    result.mean,
                    result.covariance,
                    link_approx,
                    diagonal=diagonal,
                    n_samples=n_samples,
                    generator=generator,
                )
                for i, one in enumerate(log_probs, number * len(grid)):
                    update(i, one, y)

    return run


def evaluate_sets(
    run: Run, sets: dict[str, Iterable[Any]], k: int, n_bins: int
) -> list[dict[str, float]]:
    """Metrics of k predictions on every set.

    Args:
        run: Makes the predictions.
        sets: Loaders by the prefix of their metrics; the test set comes first and has none.
        k: Number of predictions per datum.
        n_bins: Number of bins of the ECE.

    Returns:
        Metrics by name, for each of the k predictions.

    Raises:
        ValueError: If a set is empty, or its data or predictions are invalid.
    """
    values: list[dict[str, float]] = [{} for _ in range(k)]
    id_entropies: list[Tensor] = []
    for prefix, loader in sets.items():
        metrics = [CalibrationMetrics(n_bins) for _ in range(k)]

        def update(
            i: int,
            log_probs: Tensor,
            y: Tensor | None,
            metrics: list[CalibrationMetrics] = metrics,
        ) -> None:
            if y is None:
                metrics[i].update_ood(log_probs)
            else:
                metrics[i].update(log_probs, y)

        name = f"ood_loader['{prefix}']" if prefix else "test_loader"
        run(loader, update, labelled=not prefix, name=name)
        for i, metric in enumerate(metrics):
            values[i] |= _set_values(metric, prefix, id_entropies[i] if prefix else None)
        id_entropies = id_entropies or [metric.entropies for metric in metrics]
    return values


def _set_values(
    metric: CalibrationMetrics, prefix: str, id_entropies: Tensor | None
) -> dict[str, float]:
    """Numbers of one set, named with its prefix."""
    values: dict[str, float] = {}
    if metric.n_data:
        report = metric.compute()
        values = {name: getattr(report, name) for name in metric_table("classification")}
    if id_entropies is not None:
        ood_entropies = metric.entropies if metric.n_data else metric.ood_entropies
        values["mean_entropy"] = ood_entropies.double().mean().item()
        values["auroc"] = entropy_auroc(id_entropies, ood_entropies)
    return {f"{prefix}_{name}" if prefix else name: value for name, value in values.items()}
