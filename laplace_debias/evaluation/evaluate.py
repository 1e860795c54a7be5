"""Is the uncertainty any good? Evaluate a Laplace approximation, or a plain model, on a loader.

Regression predictions are Gaussian, with the predictive (co)variance of the functions plus the
observation noise; a plain model has no function variance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from laplace.baselaplace import BaseLaplace
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs
from laplace_debias.data.processes import processes, together
from laplace_debias.data.reading import read
from laplace_debias.data.targets import IGNORED
from laplace_debias.evaluation.gaussian_streams import RegressionMetrics
from laplace_debias.evaluation.predictors import (
    for_metrics,
    ignore_index_of,
    laplace_predictor,
    model_predictor,
)
from laplace_debias.evaluation.reports import CalibrationReport
from laplace_debias.evaluation.streams import CalibrationMetrics
from laplace_debias.network.loss import likelihood_name
from laplace_debias.network.preserve import evaluation_mode
from laplace_debias.network.upstream import device_of, noise_of

__all__ = ["EvaluationError", "evaluate"]


class EvaluationError(ValueError):
    """An evaluation could not be finished; what was finished is kept.

    Attributes:
        partial: The report of the mini-batches before the one that failed, or ``None`` if there
            was none. If only the OOD loader failed, the in-distribution part is complete.
    """

    def __init__(self, message: str, partial: CalibrationReport | None) -> None:
        """Keep the partial report beside the message."""
        super().__init__(message)
        self.partial = partial


def evaluate(
    predictor: BaseLaplace | nn.Module,
    loader: Iterable[Any],
    *,
    ood_loader: Iterable[Any] | None = None,
    likelihood: str | None = None,
    pred_type: str | None = None,
    link_approx: str = "probit",
    n_samples: int = 100,
    sigma_noise: float = 1.0,
    n_bins: int = 15,
    ignore_index: int = IGNORED,
    generator: torch.Generator | None = None,
    progress_bar: bool | None = None,
) -> CalibrationReport:
    """Evaluate class predictions, or Gaussian predictions, on a loader.

    Metrics are those of a sweep (:mod:`laplace_debias.evaluation.table`), from log-probabilities.

    The data are read once, in evaluation mode; modes and the global random state (if a
    ``generator`` is given) are as before afterwards.

    Args:
        predictor: A fitted Laplace approximation, ours or laplace-torch's, or a plain model: the
            MAP baseline, whose outputs are logits (classification) or means (regression).
        loader: Mini-batches ``(X, y)``, or mappings with the targets under ``dict_key_y`` of the
            Laplace approximation (``"labels"`` for a plain model); or one such mini-batch.
        ood_loader: Out-of-distribution inputs, for classification: mini-batches ``(X, y)``, whose
            ``y`` is ignored, or mappings, or tensors ``X``; or one such mini-batch.
        likelihood: ``"classification"`` or ``"regression"``, for a plain model (classification if
            not given). A Laplace approximation knows its own.
        pred_type: ``"glm"`` or ``"nn"``, as laplace-torch; its own default if not given.
        link_approx: ``"probit"``, ``"mc"``, ``"bridge"`` or ``"bridge_norm"``, as laplace-torch.
        n_samples: Number of samples for ``link_approx="mc"`` or ``pred_type="nn"``.
        sigma_noise: Standard deviation of a plain regression model's observation noise. A Laplace
            approximation has its own.
        n_bins: Number of bins of the ECE.
        ignore_index: The label of positions (tokens, pixels) that do not count, for a plain model;
            a Laplace approximation has its own. ``n_data`` counts positions.
        generator: Makes sampled predictions reproducible. It is advanced by one draw.
        progress_bar: Show a progress bar; by default on a terminal, if it takes some seconds.

    Returns:
        A ``ClassificationReport`` or a ``RegressionReport``.

    Raises:
        EvaluationError: If a loader is empty, or a mini-batch or its predictions are invalid (NaN,
            not probabilities, labels out of range, other shapes). Its ``partial`` holds the report
            of everything before.
        ValueError: If the arguments do not fit together.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> report = evaluate(model, [(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]))])
        >>> report.n_data, report.accuracy
        (4, 0.5)
    """
    model: nn.Module
    noise: float | Tensor = sigma_noise
    if isinstance(predictor, BaseLaplace):
        _check_laplace(predictor, likelihood)
        model, kind = predictor.model, likelihood_name(predictor.likelihood)
        device, key_y, noise = device_of(predictor), predictor.dict_key_y, noise_of(predictor)
        ignore_index = ignore_index_of(predictor)
        predict = laplace_predictor(predictor, pred_type, link_approx, n_samples)
    elif isinstance(predictor, nn.Module):
        kind = likelihood_name(likelihood or "classification")
        model, key_y = predictor, "labels"
        first = next(iter([*model.parameters(), *model.buffers()]), torch.empty(0))
        device = first.device
        predict = model_predictor(model, kind)
    else:
        raise ValueError(
            "Expected a fitted Laplace approximation or an nn.Module, got "
            f"{type(predictor).__name__}. Remedy: feed `CalibrationMetrics` with log-probabilities "
            "of any other origin."
        )
    if kind == "regression" and ood_loader is not None:
        raise ValueError(
            "Expected no `ood_loader` for a regression, whose report has no OOD part; got one. "
            "Remedy: evaluate it as a loader of its own."
        )
    metrics: CalibrationMetrics | RegressionMetrics
    if kind != "regression":
        metrics = CalibrationMetrics(n_bins, ignore_index)
    else:
        metrics = RegressionMetrics(sigma_noise=noise)
    shapes: set[torch.Size] = set()
    with evaluation_mode(model), _weights_kept(model), _seeded(generator, device):
        with (
            together("its share of the evaluation"),
            _keeping(metrics, "loader", lambda: metrics.n_data),
        ):
            shown: dict[str, Any] = {"progress": "evaluate", "progress_bar": progress_bar}
            for X, y in read(loader, device, key_y, **shown):
                shapes |= {X.shape[1:]} if isinstance(X, Tensor) else set()
                if isinstance(metrics, CalibrationMetrics):
                    (log_probs,) = predict(X)
                    if kind == "bernoulli":
                        (log_probs,), y = for_metrics((log_probs,), y, kind)
                    metrics.update(log_probs, y)
                else:
                    mean, variance = predict(X)
                    metrics.update(mean, variance, y)
        if ood_loader is not None and isinstance(metrics, CalibrationMetrics):
            ood = metrics
            with (
                together("its share of the OOD evaluation"),
                _keeping(ood, "ood_loader", lambda: ood.n_ood),
            ):
                shown["progress"] = "evaluate OOD"
                for X, labels in read(
                    ood_loader, device, key_y, labelled=False, name="ood_loader", **shown
                ):
                    _check_shape(X, shapes)
                    ood.update_ood(predict(X)[0], labels)
    return metrics.compute()


def _check_laplace(la: BaseLaplace, likelihood: str | None) -> None:
    """Raise if the approximation is not fitted, or the likelihood is not its own."""
    if getattr(la, "n_data", None) == 0:
        raise ValueError(
            f"Expected a fitted {type(la).__name__}, got one that has seen no data. Remedy: call "
            "`la.fit(train_loader)` first."
        )
    own = likelihood_name(la.likelihood)
    if likelihood not in (None, own):
        raise ValueError(
            f"Expected no `likelihood`, or that of the Laplace approximation ({own!r}), got "
            f"{likelihood!r}. Remedy: leave it out."
        )


def _check_shape(X: Inputs, shapes: set[torch.Size]) -> None:
    """Raise if all in-distribution inputs have one shape and the OOD inputs another."""
    if isinstance(X, Tensor) and len(shapes) == 1 and X.shape[1:] not in shapes:
        raise ValueError(
            f"Expected OOD inputs of the in-distribution shape {['N', *next(iter(shapes))]}, got "
            f"{list(X.shape)}. Remedy: resize or crop them to it."
        )


@contextmanager
def _keeping(
    metrics: CalibrationMetrics | RegressionMetrics, name: str, count: Callable[[], int]
) -> Iterator[None]:
    """Turn an invalid or missing mini-batch into an error that keeps the report so far."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        # a report of several processes takes all of them
        partial = metrics.compute() if metrics.n_data and processes() is None else None
        raise EvaluationError(
            f"`{name}` failed after {count()} data: {error} (What was evaluated before is in this "
            "error's `partial`.)",
            partial,
        ) from error


@contextmanager
def _weights_kept(model: nn.Module) -> Iterator[None]:
    """Put the parameters' own tensors back.

    laplace-torch's ``"nn"`` predictive replaces them by views of samples and of its mean.
    """
    kept = [(param, param.data) for param in model.parameters()]
    try:
        yield
    finally:
        for param, data in kept:
            param.data = data


@contextmanager
def _seeded(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """Let a generator decide what is sampled inside, and leave the global state as it was.

    laplace-torch's predictives ignore their ``generator`` and draw from the global state.
    """
    if generator is None:
        yield
        return
    seed = torch.randint(2**63 - 1, (), generator=generator, device=generator.device).item()
    devices = [device] if device.type not in ("cpu", "meta") else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield
