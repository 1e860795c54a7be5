"""Cross-fitting on the data of several processes: fold by fold, summed over all of them."""

from __future__ import annotations

import torch

from laplace_debias.data.loaders import bar
from laplace_debias.data.processes import processes, together, total
from laplace_debias.data.roles import TrainingData
from laplace_debias.debias.few_rows import crossfit_kron
from laplace_debias.debias.options import CrossfitOptions
from laplace_debias.debias.spectrum import FitResult
from laplace_debias.kfac.factors import Factors
from laplace_debias.kfac.interface import EngineInterface
from laplace_debias.kfac.sums import factors_of_all

__all__ = ["fit_shared_folds"]


def fit_shared_folds(
    engine: EngineInterface,
    data: TrainingData,
    options: CrossfitOptions,
    *,
    progress_bar: bool | None = None,
) -> FitResult:
    """Cross-fit folds whose data lie with several processes.

    The k-th mini-batches of all processes together are the k-th fold. All processes end with the
    result of rank 0.

    Args:
        engine: Makes factors and counts its passes.
        data: This process's loader, and N.
        options: The number of folds; nothing else can be chosen here.
        progress_bar: Whether to show one, in rank 0.

    Returns:
        The fit, the same in every process.

    Raises:
        ValueError: For options that need all data in one place, too few data for the folds, or
            more than N.

    Example:
        >>> from torch import nn
        >>> from laplace_debias.kfac.engine import Engine
        >>> engine = Engine(nn.Linear(3, 2), "classification")
        >>> batches = [(torch.randn(8, 3), torch.arange(8) % 2) for _ in range(2)]
        >>> data = TrainingData(batches, None, 100, torch.device("cpu"))
        >>> fit_shared_folds(engine, data, CrossfitOptions()).n_data
        100
    """
    if options.sampling != "uniform" or any(
        value is not None for value in (options.n_curvature, options.n_input)
    ):
        raise ValueError(
            "Expected sampling='uniform' without `n_curvature` and `n_input` for a fit by several "
            f"processes, got sampling={options.sampling!r}, n_curvature={options.n_curvature}, "
            f"n_input={options.n_input}. Remedy: choose the numbers by the batch size of the "
            "loaders, or fit in one process."
        )
    folds: list[Factors | None] = [None] * options.n_folds
    with (
        bar(total=options.n_folds, shown=progress_bar, unit="batch") as shown,
        together("its passes for the folds"),
    ):
        shown.set_description("[K-FAC: folds]")
        batches = data.read()
        for k in range(options.n_folds):
            batch = next(batches, None)
            if batch is None:
                break
            folds[k] = engine.factors(*batch)
            shown.update()
    seen = total(sum(fold.n for fold in folds if fold is not None))
    summed = [fold for fold in (factors_of_all(f, data.device) for f in folds) if fold is not None]
    if len(summed) < options.n_folds:
        raise ValueError(
            f"Expected data for {options.n_folds} folds, one mini-batch each, got {len(summed)} "
            "mini-batches in the process that has most. Remedy: a smaller batch size, or fewer "
            "folds."
        )
    data.check_seen({"folds": seen}, disjoint=True)
    losses = [fold.summed_loss for fold in summed]
    with engine.cost.stage("decompositions"):
        fitted = crossfit_kron(summed, n_data=data.n_data, loss=sum(losses[1:], losses[0]) / seen)
    return _of_rank_0(fitted)


def _of_rank_0(fitted: FitResult) -> FitResult:
    """The fit of rank 0 in every process, bit by bit."""
    group = processes()
    if group is None:
        return fitted
    known: dict[int, torch.Tensor] = {}  # blocks may share a tensor

    def same(blocks: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        for tensor in (tensor for block in blocks for tensor in block):
            if id(tensor) not in known:
                known[id(tensor)] = group.broadcast_(tensor.contiguous(), 0)
        return [[known[id(tensor)] for tensor in block] for block in blocks]

    return FitResult(
        same(fitted.Q),
        same(fitted.lam),
        same(fitted.lam_tilde),
        [],
        group.broadcast_(fitted.loss.contiguous(), 0),
        fitted.n_data,
        fitted.n_outputs,
    )
