"""How the biases depend on the progress of training and on the model's size."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.data.chunks import Chunk, gather, partition
from laplace_debias.data.loaders import bar
from laplace_debias.quadratics.directions import top_eigenvectors
from laplace_debias.quadratics.quadratic import Quadratic
from laplace_debias.storage.cells import CellStore
from laplace_debias.storage.export import tidy
from laplace_debias.storage.results import SavedResult


@dataclass(frozen=True)
class BiasSeries(SavedResult):
    """Relative biases of a series of parameters or models, with several draws of a mini-batch each.

    Attributes:
        name: What the series runs over, e.g. ``"epoch"`` or ``"number of parameters"``.
        labels: A label for each member.
        positions: Where each belongs on a horizontal axis, shape ``[S]``.
        batch_size: Number of data per mini-batch.
        slope_errors: ``|same - full| / |full|`` of the slopes, shape ``[S, draws, K]``.
        curvature_errors: The same for the curvatures, shape ``[S, draws, K]``.
    """

    name: str
    labels: tuple[str, ...]
    positions: Tensor
    batch_size: int
    slope_errors: Tensor
    curvature_errors: Tensor

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """Return names of columns, and one row per member, draw and direction."""
        _, draws, K = self.slope_errors.shape
        labels = {"label": self.labels, "draw": range(draws), "direction": range(K)}
        errors = {"slope_error": self.slope_errors, "curvature_error": self.curvature_errors}
        return tidy(labels, errors)

    def percentiles(
        self, kind: str = "curvatures", percent: Sequence[float] = (25, 50, 75)
    ) -> Tensor:
        """Return percentiles over directions, shape ``[S, draws, len(percent)]``."""
        errors = self.errors(kind)
        levels = torch.tensor(percent, dtype=errors.dtype) / 100
        return errors.quantile(levels, dim=-1).movedim(0, -1)

    def errors(self, kind: str = "curvatures") -> Tensor:
        """Return the relative errors of ``"slopes"`` or ``"curvatures"``, ``[S, draws, K]``."""
        if kind not in ("slopes", "curvatures"):
            raise ValueError(
                f"Expected kind 'slopes' or 'curvatures', got {kind!r}. Remedy: pass one of them."
            )
        return self.slope_errors if kind == "slopes" else self.curvature_errors


def relative_biases(
    model: nn.Module,
    loss: nn.Module,
    data: Chunk,
    *,
    batch_size: int,
    k: int,
    draws: int,
    seed: int = 0,
    **quadratic_options: Any,
) -> dict[str, Tensor]:
    """Measure ``|same - full| / |full|`` along the top-k eigenvectors of several mini-batches.

    Args:
        model: The network.
        loss: Loss with ``reduction="mean"``.
        data: All training data ``(X, y)``: the ground truth.
        batch_size: Number of data per mini-batch.
        k: Number of eigenvectors.
        draws: Number of disjoint mini-batches.
        seed: Seed of the draws.
        **quadratic_options: As for :class:`Quadratic`; ``chunk_size`` defaults to ``batch_size``.

    Returns:
        ``"slopes"`` and ``"curvatures"``, each of shape ``[draws, k]``.

    Raises:
        ValueError: If there are not enough data for that many disjoint mini-batches.

    Example:
        >>> X = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
        >>> errors = relative_biases(
        ...     nn.Linear(2, 1), nn.MSELoss(), (X, X[:, :1]), batch_size=4, k=2, draws=2)
        >>> errors["curvatures"].shape
        torch.Size([2, 2])
    """
    generator = torch.Generator().manual_seed(seed)
    batches = partition(data, batch_size, generator=generator, n_batches=draws)
    if len(batches) < draws:
        raise ValueError(
            f"Expected data for {draws} disjoint mini-batches of {batch_size}, got {len(data[1])} "
            "data. Remedy: draw fewer or smaller mini-batches."
        )
    options = {"chunk_size": batch_size, **quadratic_options}
    everything = Quadratic(model, loss, data, **options)
    errors: dict[str, list[Tensor]] = {"slopes": [], "curvatures": []}
    for batch in batches:
        quadratic = Quadratic(model, loss, batch, **options)
        D = top_eigenvectors(quadratic, k).vectors
        same, full = quadratic.restrict(D), everything.restrict(D)
        for name, values in errors.items():
            measured, truth = getattr(same, name)(), getattr(full, name)()
            values.append((measured - truth).abs() / truth.abs())
    return {name: torch.stack(values) for name, values in errors.items()}


def bias_over_training(
    model: nn.Module,
    checkpoints: Mapping[int, Mapping[str, Tensor]],
    loss: nn.Module,
    data: Chunk | Iterable[Chunk],
    *,
    batch_size: int = 512,
    k: int = 100,
    draws: int = 5,
    seed: int = 0,
    folder: str | Path | None = None,
    data_id: str | None = None,
    progress_bar: bool | None = None,
    **quadratic_options: Any,
) -> BiasSeries:
    """Measure the relative biases at checkpoints of the training.

    Args:
        model: The network; a copy of it takes the parameters of the checkpoints.
        checkpoints: State dict of every checkpoint, by its epoch.
        loss: Loss with ``reduction="mean"``.
        data: The training data, a pair ``(X, y)`` or a re-iterable of pairs.
        batch_size: Number of data per mini-batch.
        k: Number of eigenvectors.
        draws: Number of mini-batches per checkpoint.
        seed: Seed of the draws.
        folder: Keeps finished checkpoints, and the same call resumes from there.
        data_id: Stands for the data in the folder, which are then not compared. Change it when
            they change.
        progress_bar: Show a progress bar; by default on a terminal, if it takes some seconds.
        **quadratic_options: As for :class:`Quadratic`.

    Returns:
        The series over epochs.

    Example:
        >>> X = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
        >>> states = {epoch: nn.Linear(2, 1).state_dict() for epoch in (1, 10)}
        >>> series = bias_over_training(
        ...     nn.Linear(2, 1), states, nn.MSELoss(), (X, X[:, :1]), batch_size=4, k=2, draws=2)
        >>> series.labels, series.curvature_errors.shape
        (('1', '10'), torch.Size([2, 2, 2]))
    """
    models = {}
    for epoch, state in checkpoints.items():
        models[str(epoch)] = copy.deepcopy(model)
        models[str(epoch)].load_state_dict(state)
    return _series(
        "epoch",
        models,
        [float(epoch) for epoch in checkpoints],
        loss,
        data,
        folder,
        data_id,
        progress_bar,
        {"batch_size": batch_size, "k": k, "draws": draws, "seed": seed, **quadratic_options},
    )


def bias_by_model_size(
    models: Mapping[str, nn.Module],
    loss: nn.Module,
    data: Chunk | Iterable[Chunk],
    *,
    batch_size: int = 128,
    k: int = 100,
    draws: int = 5,
    seed: int = 0,
    folder: str | Path | None = None,
    data_id: str | None = None,
    progress_bar: bool | None = None,
    **quadratic_options: Any,
) -> BiasSeries:
    """Measure the relative biases of trained models of different sizes.

    Args:
        models: The networks by name, e.g. the ConvNet family ``"1-32"`` to ``"7-128"``.
        loss: Loss with ``reduction="mean"``.
        data: The training data, a pair ``(X, y)`` or a re-iterable of pairs.
        batch_size: Number of data per mini-batch.
        k: Number of eigenvectors.
        draws: Number of mini-batches per model.
        seed: Seed of the draws.
        folder: Keeps finished models, and the same call resumes from there.
        data_id: Stands for the data in the folder, which are then not compared. Change it when
            they change.
        progress_bar: Show a progress bar; by default on a terminal, if it takes some seconds.
        **quadratic_options: As for :class:`Quadratic`.

    Returns:
        The series over numbers of parameters.

    Example:
        >>> X = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
        >>> models = {"small": nn.Linear(2, 1), "large": nn.Linear(2, 1, bias=False)}
        >>> bias_by_model_size(
        ...     models, nn.MSELoss(), (X, X[:, :1]), batch_size=4, k=2, draws=2).positions
        tensor([3., 2.])
    """
    sizes = [
        float(sum(p.numel() for p in model.parameters() if p.requires_grad))
        for model in models.values()
    ]
    return _series(
        "number of parameters",
        dict(models),
        sizes,
        loss,
        data,
        folder,
        data_id,
        progress_bar,
        {"batch_size": batch_size, "k": k, "draws": draws, "seed": seed, **quadratic_options},
    )


def _series(
    name: str,
    models: dict[str, nn.Module],
    positions: list[float],
    loss: nn.Module,
    data: Chunk | Iterable[Chunk],
    folder: str | Path | None,
    data_id: str | None,
    progress_bar: bool | None,
    options: dict[str, Any],
) -> BiasSeries:
    """Measure every model, or take it from the file."""
    if not models:
        raise ValueError("Expected at least one model or checkpoint, got none. Remedy: pass some.")
    data = gather(data)
    study = CellStore.for_run(
        folder, models, {"data": [data]}, loss=loss, options=options, data_id=data_id
    )
    parts = [
        study.get(label, partial(relative_biases, model, loss, data, **options))
        for label, model in bar(models.items(), name, shown=progress_bar)
    ]
    return BiasSeries(
        name=name,
        labels=tuple(models),
        positions=torch.tensor(positions),
        batch_size=options["batch_size"],
        slope_errors=torch.stack([part["slopes"] for part in parts]),
        curvature_errors=torch.stack([part["curvatures"] for part in parts]),
    )
