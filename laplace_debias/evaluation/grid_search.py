"""laplace-torch's grid search for the prior precision, on top of the sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torchmetrics
from laplace.baselaplace import KronLaplace
from laplace.utils.enums import PredType
from torch import Tensor

from laplace_debias.data.loaders import bar
from laplace_debias.data.processes import counted, processes, together
from laplace_debias.data.reading import read
from laplace_debias.evaluation.predictors import (
    Predict,
    Update,
    for_metrics,
    ignore_index_of,
    laplace_predictor,
    run_sweep,
)
from laplace_debias.evaluation.sweep_result import SweepResult
from laplace_debias.evaluation.table import UserMetric, metric_table
from laplace_debias.network.loss import likelihood_name
from laplace_debias.network.upstream import device_of, dtype_of, noise_of
from laplace_debias.predictive.eigenblocks import check_fitted, prior_grid
from laplace_debias.predictive.predictions import Prediction, PredictorOf

__all__ = ["Loss", "gridsearch_prior_precision"]

Loss = torchmetrics.Metric | Callable[..., Tensor | float]


class _Callable(torchmetrics.Metric):
    """A loss function of all predictions and targets at once, collected batch by batch."""

    full_state_update = False

    def __init__(self, function: Callable[..., Tensor | float]) -> None:
        super().__init__()
        self.function = function
        self.collected: list[tuple[Tensor, ...]] = []

    def update(self, *arguments: Tensor) -> None:
        self.collected.append(arguments)

    def compute(self) -> Tensor:
        if processes() is not None:
            raise ValueError(
                "Expected a `torchmetrics.Metric` as the loss of several processes, which can be "
                "collected over them, got a function. Remedy: wrap it in a metric, or leave `loss` "
                "out for the negative log likelihood."
            )
        parts = [torch.cat(part) for part in zip(*self.collected, strict=True)]
        return torch.as_tensor(self.function(*parts))


def gridsearch_prior_precision(
    la: KronLaplace,
    val_loader: Iterable[Any],
    *,
    predictor_of: PredictorOf,
    pred_type: str = "glm",
    loss: Loss | None = None,
    log_prior_prec_min: float = -4,
    log_prior_prec_max: float = 4,
    grid_size: int = 100,
    log_prior_prec_base: float = 10.0,
    link_approx: str = "probit",
    n_samples: int = 100,
    generator: torch.Generator | None = None,
    progress_bar: bool | None = None,
) -> SweepResult:
    """Evaluate a loss on laplace-torch's grid, with its arguments and their meaning.

    Every grid point gets a fresh copy of the loss. ``la`` is left as it was; take
    ``result.best("loss")``, which never chooses NaN.

    Args:
        la: A fitted ``KronLaplace`` or ``KronLLLaplace``.
        val_loader: Mini-batches ``(x, y)`` or mappings, or one such mini-batch.
        predictor_of: Makes the linearised predictive of ``la`` at given prior precisions:
            :class:`~laplace_debias.predictive.predictor.StructuredPredictor`.
        pred_type: ``"glm"``, in one pass over the data, or ``"nn"``, in one pass per grid point.
        loss: A ``torchmetrics.Metric``, or a function of all probabilities and labels (regression:
            of means, covariances and targets); smaller is better. By default the negative log
            likelihood, for regression that of the Gaussian predictive with observation noise.
        log_prior_prec_min: Exponent of the smallest prior precision.
        log_prior_prec_max: Exponent of the largest.
        grid_size: Number of prior precisions.
        log_prior_prec_base: Base of the exponents.
        link_approx: Link approximation for ``"glm"``; ``"nn"`` knows ``"mc"`` only, and takes it.
        n_samples: Number of samples, if any.
        generator: Random number generator for samples.
        progress_bar: Show a progress bar; by default on a terminal, if it takes some seconds.

    Returns:
        A :class:`SweepResult` with the metric ``"loss"``.

    Raises:
        ValueError: If there is no loader, it is empty, or an argument is unknown.

    Example:
        >>> from laplace import Laplace
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> loader = DataLoader(TensorDataset(torch.randn(8, 3), torch.randint(2, (8,))), 8)
        >>> la = Laplace(model, "classification", "all", "kron")
        >>> la.fit(loader)
        >>> from laplace_debias.predictive.predictor import StructuredPredictor
        >>> result = gridsearch_prior_precision(
        ...     la, loader, predictor_of=StructuredPredictor, grid_size=5
        ... )
        >>> len(result.values["loss"])
        5
    """
    check_fitted(la)
    if val_loader is None:
        raise ValueError(
            "Expected a validation loader for the grid search, got None. Remedy: pass "
            "val_loader=..."
        )
    if pred_type not in (PredType.GLM, PredType.NN):
        raise ValueError(
            f"Expected pred_type 'glm' or 'nn', got {pred_type!r}. Remedy: pass one of them."
        )
    if loss is not None and not callable(loss):
        raise ValueError(
            f"Expected loss to be a torchmetrics.Metric or a function, got {type(loss).__name__}. "
            "Remedy: leave it out for the negative log likelihood."
        )
    grid = torch.logspace(
        log_prior_prec_min, log_prior_prec_max, grid_size, base=log_prior_prec_base
    )
    losses = [_fresh(la, loss) for _ in range(grid_size)]

    def update(i: int, prediction: Prediction, y: Tensor) -> None:
        losses[i].update(*prediction, y)

    options: dict[str, Any] = {
        "link_approx": link_approx,
        "n_samples": n_samples,
        "generator": generator,
    }
    if pred_type == PredType.GLM:
        predictor = predictor_of(la, grid, keep_graph=False)
        n_data = run_sweep(la, predictor, val_loader, update, progress_bar=progress_bar, **options)
    else:
        predict = laplace_predictor(la, "nn", **options)
        n_data = _run_networks(la, grid, val_loader, predict, update, progress_bar)
    values = tuple(float(metric.compute().sum()) for metric in losses)
    grid = grid.to(device=device_of(la), dtype=dtype_of(la))
    link = "mc" if pred_type == PredType.NN else str(getattr(link_approx, "value", link_approx))
    return SweepResult(grid, {"loss": values}, {"loss": False}, n_data, link)


def _fresh(la: KronLaplace, loss: Loss | None) -> torchmetrics.Metric:
    """Return a fresh metric for one grid point."""
    if loss is None:
        table = metric_table(likelihood_name(la.likelihood), sigma_noise=noise_of(la))
        metric = table["nll"]()
    else:
        metric = UserMetric(loss if isinstance(loss, torchmetrics.Metric) else _Callable(loss))
    return metric.to(device_of(la))


@contextmanager
def _prior_precision(la: KronLaplace) -> Iterator[None]:
    """Put the prior precision back afterwards, also when something raises."""
    before = la.prior_precision
    try:
        yield
    finally:
        la.prior_precision = before


def _run_networks(
    la: KronLaplace,
    grid: Tensor,
    loader: Iterable[Any],
    predict: Predict,
    update: Update,
    progress_bar: bool | None,
) -> int:
    """Predict by sampling networks, one pass over the data per grid point."""
    prior_grid(grid, 1, grid)
    likelihood = likelihood_name(la.likelihood)
    with torch.no_grad(), _prior_precision(la), together("its share of the grid search"):
        for i, delta in enumerate(bar(grid, "[Grid]", shown=progress_bar)):
            la.prior_precision = delta
            n_data = 0
            for x, y in read(loader, device_of(la), la.dict_key_y, name="val_loader"):
                rows, labels = for_metrics(predict(x), y, likelihood, ignore_index_of(la))
                if len(labels):
                    update(i, rows, labels)
                n_data += len(y) if likelihood == "bernoulli" else len(labels)
    return counted(n_data)
