"""Prior-precision sweeps: every prior precision in one pass over the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from laplace.baselaplace import KronLaplace
from torch import Tensor

from laplace_debias.evaluation.predictors import run_sweep
from laplace_debias.evaluation.sweep_result import SweepResult
from laplace_debias.evaluation.table import Metrics, fresh_metrics
from laplace_debias.network.loss import likelihood_name
from laplace_debias.network.upstream import noise_of
from laplace_debias.predictive.eigenblocks import PriorPrecisions, check_fitted, default_grid
from laplace_debias.predictive.predictions import DEFAULT_MEMORY_BUDGET, Prediction
from laplace_debias.predictive.predictor import StructuredPredictor

__all__ = ["sweep_prior_precision"]


def sweep_prior_precision(
    la: KronLaplace,
    loader: Iterable[Any],
    prior_precisions: PriorPrecisions | None = None,
    *,
    link_approx: str = "probit",
    n_samples: int = 100,
    metrics: Metrics = ("nll",),
    method: str | None = None,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    generator: torch.Generator | None = None,
    progress_bar: bool | None = None,
) -> SweepResult:
    """Evaluate the linearised predictive for many prior precisions in one pass over the data.

    ``la`` is left as it is, its prior precision included. A grid point with a NaN among its
    predictions has the value NaN in every metric.

    Args:
        la: A fitted ``KronLaplace`` or ``KronLLLaplace``.
        loader: Mini-batches ``(x, y)``, or mappings with the keys that ``la`` knows; or one such
            mini-batch.
        prior_precisions: k numbers, or ``[k, n_blocks]`` for layer-wise ones; by default the
            paper's grid, :func:`default_grid`.
        link_approx: ``"probit"``, ``"mc"``, ``"bridge"`` or ``"bridge_norm"`` (classification).
        n_samples: Number of samples for ``"mc"`` and for ``method="samples"``.
        metrics: Names (see :func:`~laplace_debias.evaluation.table.metric_table`; classification:
            ``"nll"``, ``"accuracy"``, ``"ece"``, ``"brier"``, ``"mean_entropy"``; regression:
            ``"nll"``, ``"rmse"``, ``"mse"``, ``"coverage_90"`` and others), or a mapping of names
            to ``torchmetrics.Metric``, of which every grid point gets a fresh copy.
        method: ``"exact"``, ``"top"``, ``"samples"`` or ``"auto"``, see
            :func:`laplace_debias.linearized_predictive`; by default ``la.predictive_method``.
        memory_budget: Bytes to stay within.
        generator: Random number generator for samples; all grid points share the same numbers.
        progress_bar: Show a progress bar; by default on a terminal, if it takes some seconds.

    Returns:
        A :class:`SweepResult`.

    Raises:
        ValueError: For a bad prior precision, link, metric or method, an empty loader, or data
            that are NaN or do not fit the model.

    Example:
        >>> from laplace import Laplace
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> data = TensorDataset(torch.randn(8, 3), torch.randint(2, (8,)))
        >>> la = Laplace(model, "classification", "all", "kron")
        >>> la.fit(DataLoader(data, batch_size=8))
        >>> loader = DataLoader(data, batch_size=4)
        >>> result = sweep_prior_precision(la, loader, metrics=["nll", "ece"])
        >>> len(result.values["ece"]), result.n_data
        (14, 8)
    """
    check_fitted(la)
    likelihood = likelihood_name(la.likelihood)
    if prior_precisions is None:
        prior_precisions = default_grid(la.n_data)
    predictor = StructuredPredictor(la, prior_precisions, memory_budget, keep_graph=False)
    k = len(predictor.deltas)
    fresh = fresh_metrics(
        metrics, k, likelihood, sigma_noise=noise_of(la), device=predictor.deltas.device
    )

    def update(i: int, prediction: Prediction, y: Tensor) -> None:
        for copies in fresh.values():
            copies[i].update(*prediction, y)

    n_data = run_sweep(
        la,
        predictor,
        loader,
        update,
        link_approx=link_approx,
        n_samples=n_samples,
        method=method,
        generator=generator,
        progress_bar=progress_bar,
    )
    values = {
        name: tuple(float(metric.compute().sum()) for metric in copies)
        for name, copies in fresh.items()
    }
    better = {name: copies[0].higher_is_better for name, copies in fresh.items()}
    deltas = predictor.deltas
    scalar = bool((deltas == deltas[:, :1]).all())
    link = str(getattr(link_approx, "value", link_approx))
    return SweepResult(
        deltas[:, 0] if scalar else deltas,
        values,
        better,
        n_data,
        None if likelihood == "regression" else link,
    )
