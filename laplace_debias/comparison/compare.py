r"""Compare plain, single, two-batch and full-batch Laplace approximations at equal budget.

A budget of M data buys one mini-batch of M for the single-batch method, and two of M / 2 for the
two-batch one: M / 2 data for the directions, the other M / 2 for the curvatures. In each draw both
use the same M data. Draws with larger budgets contain those with smaller ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from laplace_debias.comparison.baselines import check_baselines
from laplace_debias.comparison.draws import check_budgets, whole_loader
from laplace_debias.comparison.fitting import Cost, Fitting
from laplace_debias.comparison.options import CustomMethod, Prediction, Reference, Work
from laplace_debias.comparison.result import ComparisonResult
from laplace_debias.comparison.rows import (
    AUTO,
    CROSSFIT,
    DIAGONAL,
    FULL,
    LARGE,
    LAST_LAYER,
    LINES,
    PLAIN,
    PRIOR_ONLY,
    SINGLE,
    TEMPERATURE,
    TWO_BATCH,
    ComparisonRow,
)
from laplace_debias.comparison.runs import evaluate_sets, named_sets
from laplace_debias.data.loaders import bar, is_main
from laplace_debias.data.processes import from_main, together
from laplace_debias.data.targets import IGNORED
from laplace_debias.network.loss import likelihood_name
from laplace_debias.posterior.kron import Laplace
from laplace_debias.predictive.eigenblocks import default_grid
from laplace_debias.storage.cells import CellStore
from laplace_debias.storage.fingerprints import plain_options

__all__ = ["compare"]

_BUILT_IN = (PLAIN, SINGLE, TWO_BATCH, AUTO, CROSSFIT, FULL, LARGE)


def compare(
    model: nn.Module,
    train_loader: DataLoader[Any],
    test_loader: Iterable[Any],
    *,
    ood_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
    methods: Sequence[str | bool | CustomMethod] = (PLAIN, SINGLE, TWO_BATCH, FULL),
    baselines: Sequence[str] = (),
    val_loader: Iterable[Any] | None = None,
    likelihood: str = "classification",
    budgets: Sequence[int] = (64, 256, 1024),
    n_draws: int = 5,
    prior_precisions: Sequence[float] | None = None,
    laplace: Mapping[str, Any] | None = None,
    prediction: Prediction | None = None,
    reference: Reference | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    data_id: str | None = None,
    work: Work | None = None,
    progress_bar: bool | None = None,
) -> ComparisonResult:
    """Evaluate every method over prior precisions and draws of mini-batches.

    Predictions are those of the linearised network; with ``link_approx="mc"`` all see the same
    random numbers. Several processes have the same ``train_loader``, whose draws are dealt out, and
    each its share of all other data.

    Args:
        model: Trained network. It is left as it was found.
        train_loader: Loader over all N training data with a map-style dataset; data are drawn from
            its dataset, and its batch size bounds how many are processed at a time.
        test_loader: In-distribution mini-batches, read in the same order every time, or one
            mini-batch ``(X, y)``.
        ood_loader: Out-of-distribution loader, whose metrics get the prefix ``ood_``, or several
            by name. Labelled ones, ``(X, y)``, give all metrics and the AUROC of telling them from
            the test data by entropy; unlabelled ones, ``X``, only the latter and mean entropy.
        methods: What to compare: ``"plain"`` (the network without a posterior), ``"single"``,
            ``"two-batch"`` (or ``True``), ``"full"``, ``"auto"`` (with as many backward passes as
            M data take), ``"crossfit"`` (with M data behind backward passes), and methods of one's
            own as :class:`~laplace_debias.comparison.options.CustomMethod`.
        baselines: What else to hold them against, each fitted once, on all data: ``"plain"``,
            ``"temperature"`` (the plain network, its logits divided by what is best on
            ``val_loader``), ``"last-layer"`` (a Kron posterior of the last layer), ``"prior-only"``
            (no curvature at all) and ``"diagonal"`` (the diagonal of the GGN).
        val_loader: Validation data; their metrics get the prefix ``val_``, and ``result.tuned()``
            chooses prior precisions by them.
        likelihood: ``"classification"`` or ``"regression"``; the noise of the latter is
            ``laplace={"sigma_noise": ...}``.
        budgets: Numbers M of data per draw, even.
        n_draws: Number of draws per budget.
        prior_precisions: Grid, in laplace-torch's units; by default the paper's,
            :func:`~laplace_debias.evaluation.sweep.default_grid`.
        laplace: Arguments of :func:`~laplace_debias.posterior.kron.Laplace`, such as
            ``kfac_approx``, ``fisher`` and ``sampler``, for the full batch, too (``"auto"`` draws
            vectors of its own). ``subset_of_weights`` is ``"all"`` unless it is among them. Those
            of :class:`~laplace_debias.debias.options.CrossfitOptions`, such as
            ``sampling``, and :class:`~laplace_debias.debias.options.AutoOptions` reach these only.
        prediction: Link function, its samples, and the bins of the ECE.
        reference: Another reference than all the data, and whether distances to it are measured.
        seed: Decides the draws and the random numbers of ``"mc"``.
        folder: Keeps each finished cell (method, budget, draw) as a small file there. The same
            call goes on where it was interrupted; budgets, draws, methods and reference may grow.
            Cells are made draw by draw, so that fewer draws are soon complete. A folder serves one
            model, one set of data (all of which are read, to make sure) and one set of options.
        data_id: Stands for all the data in ``folder``, which are then not read: for data that are
            augmented at random, or many. Change it when they change.
        work: Which of the draws to make in this call, and how many posteriors share a pass.
        progress_bar: Show a progress bar over cells; by default on a terminal.

    Returns:
        The rows, for ``plots.plot_comparison``; ``gap_ratio("nll")`` is the headline.

    Raises:
        ValueError: If budgets, data or the folder do not fit.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> _ = torch.manual_seed(0)
        >>> X = torch.randn(60, 2)
        >>> y = (X[:, 0] > 0).long()
        >>> net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2))
        >>> train = DataLoader(TensorDataset(X, y), batch_size=20)
        >>> result = compare(net, train, (X, y), budgets=(8,), n_draws=2)
        >>> result.methods, len(result.rows)  # 1 + 14 grid points * (2 + 2 + 1)
        (('plain', 'single', 'two-batch', 'full'), 71)
    """
    prediction, reference = prediction or Prediction(), reference or Reference()
    work = work or Work()
    laplace = {"subset_of_weights": "all", **(laplace or {})}
    custom = {method.name: method for method in methods if isinstance(method, CustomMethod)}
    kind = likelihood_name(likelihood)
    check_baselines(baselines, kind, val_loader)
    names = list(dict.fromkeys([*_names(methods), *baselines]))
    N = check_budgets(train_loader, budgets, n_draws)
    draws = work.of(n_draws)
    cells = _cells(names, budgets, draws, reference.cell(N), N)
    grid = list(map(float, default_grid(N) if prior_precisions is None else prior_precisions))
    sets = named_sets(test_loader, ood_loader, val_loader)
    config = {
        "n_data": N,
        "prior_precisions": grid,
        "link_approx": prediction.link_approx,
        "n_samples": prediction.n_samples if prediction.link_approx == "mc" else None,
        "n_bins": prediction.n_bins,
        "seed": seed,
        "laplace": plain_options(laplace),
    }
    if kind != "classification":
        config["likelihood"] = kind
    if reference.distance:
        config["distance"] = True
    data = {f"ood_loader {k}" if k else "test_loader": loader for k, loader in sets.items()}
    data["train_loader"] = whole_loader(train_loader)
    with together("opening its folder"):  # rank 0 keeps the cells, and says which there are
        store_at = folder if is_main() else None
        store = CellStore.for_run(store_at, model, data, options=config, data_id=data_id)

    fitting = Fitting(
        Laplace, model, train_loader, val_loader, kind, laplace, custom, reference, prediction,
        grid, seed,
    )  # fmt: skip

    def evaluated(cells: list[_Cell]) -> list[list[dict[str, Any]]]:
        """Rows of some cells, from shared passes over the data."""
        run, costs, predictors = fitting.run_of(cells)
        deltas: list[float | None] = [None] if cells[0].method in LINES else [*grid]
        noise = laplace.get("sigma_noise", 1.0)
        found = evaluate_sets(
            run,
            sets,
            len(cells) * len(deltas),
            prediction.n_bins,
            likelihood=kind,
            sigma_noise=noise,
            ignore_index=laplace.get("ignore_index", IGNORED),
        )
        if reference.distance:
            for one, far in zip(found, fitting.distances(predictors, sets[""]), strict=True):
                one["distance"] = far
        values = iter(found)
        return [
            [cell.row(delta, next(values), cost) for delta in deltas]
            for cell, cost in zip(cells, costs, strict=True)
        ]

    settings = {
        name: {"custom": dict(custom[cell.method].settings)}
        for name, cell in cells.items()
        if cell.method in custom
    }
    finished = {name: store.get(name, list, settings.get(name)) for name in cells if name in store}
    finished = from_main(finished)
    with (
        torch.random.fork_rng(devices=[]),  # reading a DataLoader draws from the global state
        bar(title="compare", total=len(cells), shown=progress_bar, unit="cell") as cell_bar,
    ):
        cell_bar.update(len(finished))
        missing = [name for name in cells if name not in finished]
        for group in _groups(missing, cells, work.n_shared):
            made = evaluated([cells[name] for name in group])
            for name, rows in zip(group, made, strict=True):
                rows = store.put(name, rows, settings.get(name)) if is_main() else rows
                finished[name] = from_main(rows)
            cell_bar.update(len(group))
    found = tuple(ComparisonRow(**row) for name in cells for row in finished[name])
    return ComparisonResult(found, N, config)


class _Cell(NamedTuple):
    """What one posterior is fitted on; draw -1 where there is only one."""

    method: str
    budget: int
    draw: int

    def row(
        self, delta: float | None, metrics: dict[str, float], cost: Cost | None
    ) -> dict[str, Any]:
        """A row of the result."""
        size = self.budget // 2 if self.method == TWO_BATCH else self.budget
        draw = max(self.draw, 0)
        return asdict(ComparisonRow(self.method, self.budget, size, draw, delta, metrics, cost))


def _cells(
    names: Sequence[str],
    budgets: Sequence[int],
    draws: Sequence[int],
    reference: tuple[str, str, int],
    N: int,
) -> dict[str, _Cell]:
    """What has to be fitted, by the name of its cell."""
    cells: dict[str, _Cell] = {}
    for method in names:
        if method in (PLAIN, TEMPERATURE, PRIOR_ONLY):
            cells[method] = _Cell(method, 0, -1)
        elif method in (LAST_LAYER, DIAGONAL):
            cells[method] = _Cell(method, N, -1)
        elif method in (FULL, LARGE):
            key, name, size = reference
            cells[key] = _Cell(name, size, -1)
        else:
            for budget, draw in itertools.product(budgets, draws):
                cells[f"{method}-{budget}-{draw}"] = _Cell(method, budget, draw)
    return cells


def _names(methods: Sequence[str | bool | CustomMethod]) -> list[str]:
    """Names of the methods, each once; raise if one is unknown."""
    names, unknown = [], []
    for method in methods:
        if isinstance(method, CustomMethod):
            names.append(method.name)
        elif method is True or method in _BUILT_IN:
            names.append(TWO_BATCH if method is True else method)
        else:
            unknown.append(method)
    if unknown:
        raise ValueError(
            "Expected methods among 'plain', 'single', 'two-batch' (or True), 'auto', 'crossfit' "
            f"and 'full', got {unknown}. Remedy: correct the name, or give a method of your own as "
            "`CustomMethod(name, fit)`."
        )
    return list(dict.fromkeys(names))


def _groups(names: list[str], cells: Mapping[str, _Cell], size: int) -> Iterator[list[str]]:
    """Names in the order of draws, in groups that share passes."""
    ordered = sorted(names, key=lambda name: cells[name].draw)  # stable
    apart = (PLAIN, TEMPERATURE, LAST_LAYER)  # no passes through all layers to share
    alone = [name for name in ordered if cells[name].method in apart]
    ordered = [name for name in ordered if cells[name].method not in apart]
    yield from ([name] for name in alone)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]
