"""How large the curvature bias of a model is, which batch size is enough, what debiasing buys."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from laplace_debias.data.chunks import Chunk, gather, partition
from laplace_debias.data.loaders import DELAY
from laplace_debias.debias.expected_bias import ExpectedBias
from laplace_debias.quadratics.directions import top_eigenvectors
from laplace_debias.quadratics.expected import expected_by_size
from laplace_debias.quadratics.quadratic import Quadratic
from laplace_debias.storage.cells import CellStore
from laplace_debias.storage.export import tidy
from laplace_debias.storage.results import SavedResult


@dataclass(frozen=True)
class CurvatureBiasReport(SavedResult):
    r"""Curvatures along the top eigenvectors of single mini-batches, by batch size.

    Each draw takes the top-k eigenvectors of one mini-batch and measures the curvature along them
    three times: on the same mini-batch (the usual estimate), on another one of the same size (the
    debiased estimate) and on all data (the truth).

    Attributes:
        curvature: ``"ggn"``, ``"hessian"`` or ``"kfac"``.
        n_data: Number N of data that stand for the truth.
        n_params: Number P of parameters.
        batch_sizes: The S batch sizes.
        tolerance: Relative over-estimation that counts as none.
        same: Curvatures on the mini-batch that chose the directions, shape ``[S, draws, k]``.
        other: Curvatures on another mini-batch, shape ``[S, draws, k]``.
        full: Curvatures on all data, shape ``[S, draws, k]``.
        expected: What one mini-batch of each size foretells, layer by layer; empty if not asked.
    """

    curvature: str
    n_data: int
    n_params: int
    batch_sizes: tuple[int, ...]
    tolerance: float
    same: Tensor
    other: Tensor
    full: Tensor
    expected: tuple[ExpectedBias, ...] = ()

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """Return names of columns, and one row per batch size, draw and direction."""
        _, draws, k = self.same.shape
        labels = {"batch_size": self.batch_sizes, "draw": range(draws), "direction": range(k)}
        return tidy(labels, {"same": self.same, "other": self.other, "full": self.full})

    def overestimation(self, estimate: str = "same", top: int | None = None) -> Tensor:
        """Return estimated over true curvature, summed over draws and directions, shape ``[S]``.

        Args:
            estimate: ``"same"`` (one mini-batch) or ``"other"`` (debiased).
            top: How many of the k directions count; ``None``: all.
        """
        return self._estimate(estimate)[..., :top].sum((1, 2)) / self.full[..., :top].sum((1, 2))

    def relative_error(self, estimate: str = "same") -> Tensor:
        """Return the median of ``|estimate - full| / |full|``, shape ``[S]``."""
        errors = (self._estimate(estimate) - self.full).abs() / self.full.abs()
        medians: Tensor = errors.flatten(1).median(1).values
        return medians

    def _estimate(self, name: str) -> Tensor:
        """The measured curvatures by name."""
        if name not in ("same", "other"):
            raise ValueError(
                f"Expected estimate 'same' or 'other', got {name!r}. Remedy: pass one of them."
            )
        return self.same if name == "same" else self.other

    @property
    def sufficient_batch_size(self) -> int | None:
        """Smallest measured batch size from which on the top curvature is within tolerance.

        Judged by the direction of largest curvature, the most biased one. ``None``: no measured
        size suffices.
        """
        enough = None
        for size, factor in sorted(
            zip(self.batch_sizes, self.overestimation(top=1).tolist(), strict=True), reverse=True
        ):
            if not abs(factor - 1) <= self.tolerance:
                break
            enough = size
        return enough

    @property
    def extrapolated_batch_size(self) -> int | None:
        """Where a power law through ``factor - 1`` over the batch size meets the tolerance.

        An extrapolation, cut at ``n_data``; ``None`` if there are fewer than two batch sizes with
        an over-estimation, or it does not fall.
        """
        excess = self.overestimation(top=1).double() - 1
        size = torch.tensor(self.batch_sizes, dtype=torch.float64)
        use = excess > 0
        if int(use.sum()) < 2:
            return None
        x, y = size[use].log(), excess[use].log()
        slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
        if not slope < 0:
            return None
        log_size = float(x.mean()) + (math.log(self.tolerance) - float(y.mean())) / slope
        return min(math.ceil(math.exp(min(log_size, 60.0))), self.n_data)

    def __str__(self) -> str:
        """Return :meth:`table`."""
        return self.table()

    def table(self) -> str:
        """Return a table with one row per batch size, what to conclude, and what was expected."""
        k = self.same.shape[-1]
        head = ("batch", "top-1", f"top-{k}", "error", "top-1", f"top-{k}", "error")
        lines = [
            f"{self.curvature} of {self.n_params} parameters, N = {self.n_data}, top {k} "
            f"directions, {self.same.shape[1]} draws",
            f"{'':>7} | {'one mini-batch':^26} | {'debiased, two mini-batches':^26}",
            "{:>7} | {:>8} {:>8} {:>8} | {:>8} {:>8} {:>8}".format(*head),
        ]
        columns = [
            value.tolist()
            for estimate in ("same", "other")
            for value in (
                self.overestimation(estimate, top=1),
                self.overestimation(estimate),
                self.relative_error(estimate),
            )
        ]
        for size, *row in zip(self.batch_sizes, *columns, strict=True):
            cells = [f"{row[i]:.2f}x" if i % 3 < 2 else f"{row[i]:.0%}" for i in range(6)]
            lines.append("{:>7} | {:>8} {:>8} {:>8} | {:>8} {:>8} {:>8}".format(size, *cells))
        return "\n".join([*lines, self.conclusion(), *map(str, self.expected)])

    def conclusion(self) -> str:
        """Return one sentence: which batch size is enough, and what debiasing buys."""
        worst = max(self.overestimation(top=1).tolist())
        if self.sufficient_batch_size is not None:
            enough = f"a mini-batch of {self.sufficient_batch_size} is enough"
        elif self.extrapolated_batch_size is not None:
            enough = (
                f"none of these sizes is enough; extrapolated, about "
                f"{self.extrapolated_batch_size} would be"
            )
        else:
            enough = "none of these sizes is enough"
        debiased = self.overestimation("other", top=1)
        low, high = f"{debiased.min():.2f}x", f"{debiased.max():.2f}x"
        buys = low if low == high else f"{low} to {high}"
        return (
            f"Top curvature is over-estimated up to {worst:.2f}x. For a factor within "
            f"{self.tolerance:.0%} of 1, {enough}. Debiased with a second mini-batch it is {buys}."
        )


def curvature_bias_report(
    model: nn.Module,
    loss: nn.Module,
    loader: Chunk | Iterable[Chunk],
    *,
    batch_sizes: Sequence[int] = (32, 128, 512),
    k: int = 20,
    draws: int = 5,
    tolerance: float = 0.2,
    seed: int = 0,
    per_layer: bool = False,
    folder: str | Path | None = None,
    data_id: str | None = None,
    progress_bar: bool | None = None,
    **quadratic_options: Any,
) -> CurvatureBiasReport:
    """Diagnose the curvature bias of a model in one call.

    Args:
        model: The trained network.
        loss: Loss with ``reduction="mean"``.
        loader: The training data: a ``DataLoader``, a list of pairs or one pair ``(X, y)``. All of
            it is held in memory, and stands for the truth.
        batch_sizes: The batch sizes to judge; each draw needs twice as many data.
        k: Number of eigenvectors.
        draws: Number of draws of two disjoint mini-batches; draws may overlap each other.
        tolerance: Relative over-estimation of the largest curvature that counts as none.
        seed: Seed of the draws.
        per_layer: Add what one mini-batch of each size foretells before any second one: for each
            Kronecker factor its rows, dimension, effective rows and expected over-estimation
            (:func:`~laplace_debias.quadratics.expected.expected_by_size`).
        folder: Keeps finished draws, and the same call resumes from there.
        data_id: Stands for the data in the folder, which are then not compared. Change it when
            they change.
        progress_bar: Show a progress bar; by default on a terminal, if it takes some seconds.
        **quadratic_options: ``curvature``, ``l2``, ``regularize_biases``, ``chunk_size`` (default
            512) and ``max_columns`` of :class:`Quadratic`.

    Returns:
        The report; ``print(report.table())`` shows it.

    Raises:
        ValueError: If two mini-batches of the largest size do not fit into the data, or ``draws``
            or ``tolerance`` is not positive; with ``per_layer`` also for losses and layers that
            K-FAC does not know.

    Example:
        >>> X = torch.randn(32, 2, generator=torch.Generator().manual_seed(0))
        >>> report = curvature_bias_report(
        ...     nn.Linear(2, 1), nn.MSELoss(), (X, X[:, :1]), batch_sizes=(2, 16), k=2)
        >>> report.overestimation(top=1).tolist() > [1.0, 1.0]
        True
    """
    X, y = gather(loader)
    if not batch_sizes or min(batch_sizes) < 1 or 2 * max(batch_sizes) > len(y):
        raise ValueError(
            f"Expected batch sizes from 1 to {len(y) // 2} (half of the {len(y)} data: the second "
            f"mini-batch is disjoint), got {tuple(batch_sizes)}. Remedy: pass sizes in this range, "
            "or more data."
        )
    if draws < 1 or not tolerance > 0:
        raise ValueError(
            f"Expected draws >= 1 and tolerance > 0, got {draws} and {tolerance}. "
            "Remedy: pass e.g. draws=5, tolerance=0.2."
        )
    options = {"chunk_size": 512, **quadratic_options}
    settings = {"k": k, "seed": seed, **options}
    study = CellStore.for_run(
        folder, model, {"data": [(X, y)]}, loss=loss, options=settings, data_id=data_id
    )
    everything = Quadratic(model, loss, (X, y), **options)
    names = ("same", "other", "full")

    def measure(size: int, draw: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed + 7919 * size + draw)
        batches = partition((X, y), size, generator=generator, n_batches=2)
        one, two = (Quadratic(model, loss, batch, **options) for batch in batches)
        D = top_eigenvectors(one, k).vectors
        return {
            name: quadratic.curvatures(D)
            for name, quadratic in zip(names, (one, two, everything), strict=True)
        }

    curvatures: dict[str, list[Tensor]] = {name: [] for name in names}
    hidden = None if progress_bar is None else not progress_bar  # None: not on a terminal
    delay = DELAY if progress_bar is None else 0
    n_cells = len(batch_sizes) * draws
    with tqdm(total=n_cells, desc="bias", disable=hidden, delay=delay) as shown:
        for size, draw in itertools.product(batch_sizes, range(draws)):
            measured = study.get(f"size {size} draw {draw}", partial(measure, size, draw))
            for name in names:
                curvatures[name].append(measured[name])
            shown.update()
    shape = (len(batch_sizes), draws, -1)
    return CurvatureBiasReport(
        curvature=options.get("curvature", "ggn"),
        n_data=len(y),
        n_params=everything.shape[0],
        batch_sizes=tuple(batch_sizes),
        tolerance=tolerance,
        expected=expected_by_size(model, loss, (X, y), batch_sizes, seed) if per_layer else (),
        **{name: torch.stack(values).reshape(shape) for name, values in curvatures.items()},
    )
