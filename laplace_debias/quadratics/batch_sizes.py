"""How the biases depend on the batch size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laplace_debias.data.chunks import Chunk, partition
from laplace_debias.quadratics.bias import DirectionalBias, directional_bias
from laplace_debias.storage.results import SavedResult


@dataclass(frozen=True)
class BatchSizeBias(SavedResult):
    """Directional biases at several batch sizes.

    Attributes:
        batch_sizes: The batch sizes.
        results: One :class:`DirectionalBias` for each.
    """

    batch_sizes: tuple[int, ...]
    results: tuple[DirectionalBias, ...]

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """Return names of columns, and the rows of every batch size."""
        names: list[str] = []
        rows: list[list[Any]] = []
        for size, result in zip(self.batch_sizes, self.results, strict=True):
            names, part = result.rows()
            rows += [[size, *row] for row in part]
        return ["batch_size", *names], rows


def bias_by_batch_size(
    model: nn.Module,
    loss: nn.Module,
    data: Chunk | Iterable[Chunk],
    *,
    batch_sizes: Sequence[int] = (8, 32, 128, 512),
    directions: str = "eigenvectors",
    k: int = 100,
    chosen: Sequence[int] = (0,),
    max_batches: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    data_id: str | None = None,
    progress_bar: bool | None = None,
    **quadratic_options: Any,
) -> BatchSizeBias:
    """Measure directional slopes and curvatures at several batch sizes.

    With ``curvature="kfac"`` this is the paper's study of K-FAC.

    Args:
        model: The network.
        loss: Loss with ``reduction="mean"``.
        data: The training data, a pair ``(X, y)`` or a re-iterable of pairs.
        batch_sizes: The batch sizes.
        directions: ``"eigenvectors"`` or ``"cg"``.
        k: Number of directions.
        chosen: Which mini-batches choose directions.
        max_batches: Measure on the first mini-batches only; the "whole set" is then theirs.
        seed: Seed of the shuffle that makes the mini-batches.
        folder: Keeps finished mini-batches, a folder in it for every batch size, and the same call
            resumes from there.
        data_id: Stands for the data in the folder, which are then not compared. Change it when
            they change.
        progress_bar: Show a progress bar; by default on a terminal, if it takes some seconds.
        **quadratic_options: ``curvature``, ``l2``, ``regularize_biases``, ``chunk_size`` and
            ``max_columns`` of :class:`Quadratic`.

    Returns:
        The biases, in the order of ``batch_sizes``.

    Example:
        >>> X = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
        >>> study = bias_by_batch_size(
        ...     nn.Linear(2, 1), nn.MSELoss(), (X, X[:, :1]), batch_sizes=(2, 4), k=2,
        ...     curvature="kfac")
        >>> [result.curvatures.shape for result in study.results]
        [torch.Size([1, 4, 2]), torch.Size([1, 2, 2])]
    """
    results = []
    for size in batch_sizes:
        generator = torch.Generator().manual_seed(seed)
        batches = partition(data, size, generator=generator, n_batches=max_batches)
        results.append(
            directional_bias(
                model,
                loss,
                batches,
                directions=directions,
                k=k,
                chosen=chosen,
                folder=None if folder is None else Path(folder) / str(size),
                data_id=None if data_id is None else f"{data_id}, shuffled with seed {seed}",
                progress_bar=progress_bar,
                **quadratic_options,
            )
        )
    return BatchSizeBias(tuple(batch_sizes), tuple(results))
