r"""Compare vanilla, single-batch, debiased and full-batch Laplace approximations at equal budget.

A budget of M data buys one mini-batch of M for the single-batch method, and two of M / 2 for the
debiased one: M / 2 data for the directions, the other M / 2 for the curvatures. In each draw both
use the same M data. Draws with larger budgets contain those with smaller ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from laplace.baselaplace import KronLaplace
from torch import nn
from torch.utils.data import DataLoader, Subset
from tqdm import tqdm

from laplace_debias.comparison.result import (
    DEBIASED,
    FULL,
    LARGE,
    SINGLE,
    VANILLA,
    ComparisonResult,
    ComparisonRow,
)
from laplace_debias.comparison.runs import evaluate_sets, laplace_run, vanilla_run
from laplace_debias.debias.options import CrossfitOptions
from laplace_debias.evaluation.sweep import default_grid
from laplace_debias.posterior.debiased import CROSSFIT
from laplace_debias.posterior.factory import Laplace
from laplace_debias.predictive.links import check_link
from laplace_debias.storage.cells import CellStore
from laplace_debias.storage.fingerprints import data_hash, model_hash, posterior_hash

__all__ = ["compare"]

Fit = Callable[[int, int], KronLaplace]


def compare(
    model: nn.Module,
    train_loader: DataLoader,
    test_loader: Iterable[Any],
    *,
    ood_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
    budgets: Sequence[int] = (64, 256, 1024),
    n_draws: int = 5,
    prior_precisions: Sequence[float] | None = None,
    methods: Sequence[str] = (VANILLA, SINGLE, DEBIASED, FULL),
    subset_of_weights: str = "all",
    link_approx: str = "probit",
    n_samples: int = 40,
    reference: KronLaplace | None = None,
    reference_size: int | None = None,
    fits: Mapping[str, Fit] | None = None,
    settings: Mapping[str, Any] | None = None,
    n_shared: int = 1,
    draws: Iterable[int] | None = None,
    seed: int = 0,
    n_bins: int = 15,
    folder: str | Path | None = None,
    progress_bar: bool = False,
    **laplace_kwargs: Any,
) -> ComparisonResult:
    """Evaluate every method over prior precisions and draws of mini-batches.

    Predictions are those of the linearised network. With ``link_approx="mc"`` every method, draw
    and prior precision sees the same random numbers.

    Args:
        model: Trained classifier. It is left as it was found.
        train_loader: Loader over all N training data with a map-style dataset; data are drawn from
            its dataset, and its batch size bounds how many are processed at a time.
        test_loader: In-distribution mini-batches, read in the same order every time.
        ood_loader: Out-of-distribution loader, whose metrics get the prefix ``ood_``, or several
            by name. Labelled ones, ``(X, y)``, give all metrics and the AUROC of telling them from
            the test data by entropy; unlabelled ones, ``X``, only the latter and mean entropy.
        budgets: Numbers M of data per draw, even.
        n_draws: Number of draws per budget.
        prior_precisions: Grid, in laplace-torch's units; by default the paper's,
            `laplace_debias.evaluation.sweep.default_grid`.
        methods: Which to run: ``"vanilla"``, ``"single"``, ``"debiased"``, ``"full"``, and
            ``"crossfit"``, with M data behind backward passes.
        subset_of_weights: ``"all"`` or ``"last_layer"``.
        link_approx: ``"probit"``, ``"mc"`` (the paper's), ``"bridge"`` or ``"bridge_norm"``.
        n_samples: Number of samples for ``"mc"``.
        reference: A fitted approximation to use as the reference, e.g. one loaded from a file;
            it says ``"full"`` unless ``reference_size`` tells otherwise.
        reference_size: Fit the reference on that many random data instead of all; it is then
            called ``"large-batch"``.
        fits: Further methods by name: ``fit(budget, draw)`` returns a fitted approximation around
            ``model``. Names of built-in methods may be used for ways of one's own to fit them.
        settings: Whatever decides the numbers of ``fits``; kept with the finished cells, which are
            not mixed with others.
        n_shared: Number of posteriors that share each pass over the evaluation data: less time
            for more memory, and more to repeat after an interruption.
        draws: Make these of the ``n_draws`` draws only, for instance one half in each of two
            processes that share a folder; a last call without it then collects all of them.
        seed: Decides the draws and the random numbers of ``"mc"``.
        n_bins: Number of bins of the ECE.
        folder: Keeps each finished cell (method, budget, draw) as a small file there. The same
            call goes on where it was interrupted; budgets, draws, methods and reference may grow.
            Cells are made draw by draw, so that fewer draws are soon complete.
        progress_bar: Show a progress bar over cells.
        **laplace_kwargs: Handed to `Laplace`; the options of
            :class:`~laplace_debias.debias.options.CrossfitOptions`, such as
            ``sampling="curvature"``, to ``"crossfit"`` only.

    Returns:
        The rows, for `plots.plot_comparison`; ``gap_ratio("nll")`` is the headline.

    Raises:
        ValueError: If budgets, data or the folder do not fit.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> _ = torch.manual_seed(0)
        >>> X = torch.randn(60, 2)
        >>> y = (X[:, 0] > 0).long()
        >>> net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2))
        >>> train = DataLoader(TensorDataset(X, y), batch_size=20)
        >>> result = compare(net, train, [(X, y)], budgets=(8,), n_draws=2)
        >>> result.methods, len(result.rows)  # 1 + 14 grid points * (2 + 2 + 1)
        (('vanilla', 'single', 'debiased', 'full'), 71)
    """
    check_link(link_approx)
    extra = dict(fits or {})
    unknown = set(methods) - {VANILLA, SINGLE, DEBIASED, FULL, LARGE, CROSSFIT, *extra}
    if unknown:
        raise ValueError(
            "Expected methods among 'vanilla', 'single', 'debiased', 'crossfit' and 'full', got "
            f"{sorted(unknown)}. Remedy: correct the name, or give a method of your own in `fits`."
        )
    N = _check(train_loader, budgets, n_draws, reference_size, n_shared)
    wanted = list(range(n_draws)) if draws is None else _checked_draws(draws, n_draws)
    grid = list(map(float, default_grid(N) if prior_precisions is None else prior_precisions))
    sets = _named_sets(test_loader, ood_loader)
    config = {
        "model": model_hash(model),
        "n_data": N,
        "data": {name or "test": data_hash(loader) for name, loader in sets.items()},
        "prior_precisions": grid,
        "subset_of_weights": subset_of_weights,
        "link_approx": link_approx,
        "n_samples": n_samples if link_approx == "mc" else None,
        "n_bins": n_bins,
        "seed": seed,
        "laplace_kwargs": {key: str(value) for key, value in sorted(laplace_kwargs.items())},
    }
    if settings is not None:
        config["settings"] = dict(settings)
    store = CellStore(folder, config)

    def posterior(method: str, budget: int, draw: int) -> KronLaplace:
        if method in (FULL, LARGE) and reference is not None:
            return reference
        if method in extra:
            return extra[method](budget, draw)
        debias = {DEBIASED: True, FULL: SINGLE, LARGE: SINGLE}.get(method, method)
        kwargs = {k: v for k, v in laplace_kwargs.items() if k not in CrossfitOptions.names()}
        if method == CROSSFIT:  # draws for itself, from all data
            generator = torch.Generator().manual_seed(seed * 1_000_003 + draw + 1)
            kwargs = {"n_curvature": budget, "generator": generator, **laplace_kwargs}
            first, second = _shuffled(train_loader, generator), []
        else:
            roles = 2 if method == DEBIASED else 1
            first, *second = _draw_loaders(train_loader, N, budget, roles, seed, draw)
        la = Laplace(model, "classification", subset_of_weights, "kron", debias=debias, **kwargs)
        la.fit(first, curvature_loader=second[0] if second else None, n_data=N)
        return la

    def evaluated(cells: list[_Cell]) -> list[list[dict]]:
        """Rows of some cells, from shared passes over the data."""
        if cells[0].method == VANILLA:
            run = vanilla_run(model, laplace_kwargs.get("dict_key_y", "labels"))
            deltas: list[float | None] = [None]
        else:
            las = [posterior(*cell) for cell in cells]
            run, deltas = laplace_run(las, grid, link_approx, n_samples, seed), grid
        values = iter(evaluate_sets(run, sets, len(cells) * len(deltas), n_bins))
        return [[cell.row(delta, next(values)) for delta in deltas] for cell in cells]

    cells: dict[str, _Cell] = {}
    for method in dict.fromkeys((*methods, *extra)):
        if method == VANILLA:
            cells[VANILLA] = _Cell(VANILLA, 0, -1)
        elif method in (FULL, LARGE):
            size, name = (N, FULL) if reference_size is None else (reference_size, LARGE)
            key = name if size == N else f"{name}-{size}"
            key += "" if reference is None else f"-{posterior_hash(reference)}"
            cells[key] = _Cell(name, size, -1)
        else:
            for budget, draw in itertools.product(budgets, wanted):
                cells[f"{method}-{budget}-{draw}"] = _Cell(method, budget, draw)
    with (
        torch.random.fork_rng(devices=[]),  # reading a DataLoader draws from the global state
        tqdm(total=len(cells), desc="compare", disable=not progress_bar) as bar,
    ):
        missing = [name for name in cells if name not in store]
        bar.update(len(cells) - len(missing))
        for group in _groups(missing, cells, n_shared):
            made = evaluated([cells[name] for name in group])
            for name, rows in zip(group, made, strict=True):
                store.get(name, lambda rows=rows: rows)
            bar.update(len(group))
    rows = [row for name in cells for row in store.get(name, list)]
    return ComparisonResult(tuple(ComparisonRow(**row) for row in rows), N, config)


class _Cell(NamedTuple):
    """What one posterior is fitted on; draw -1 where there is only one."""

    method: str
    budget: int
    draw: int

    def row(self, delta: float | None, metrics: dict[str, float]) -> dict:
        """A row of the result."""
        size = self.budget // 2 if self.method == DEBIASED else self.budget
        draw = max(self.draw, 0)
        return asdict(ComparisonRow(self.method, self.budget, size, draw, delta, metrics))


def _groups(names: list[str], cells: Mapping[str, _Cell], size: int) -> Iterator[list[str]]:
    """Names in the order of draws, cut into groups that share passes; vanilla stands alone."""
    ordered = sorted(names, key=lambda name: cells[name].draw)  # stable
    alone = [name for name in ordered if cells[name].method == VANILLA]
    ordered = [name for name in ordered if cells[name].method != VANILLA]
    yield from ([name] for name in alone)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def _check(
    train_loader: DataLoader,
    budgets: Sequence[int],
    n_draws: int,
    reference_size: int | None,
    n_shared: int,
) -> int:
    """Return N; raise if the arguments do not fit together."""
    dataset = getattr(train_loader, "dataset", None)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ValueError(
            "Expected a DataLoader with a map-style dataset, to draw mini-batches from, got "
            f"{type(train_loader).__name__}. Remedy: `DataLoader(TensorDataset(X, y), ...)`."
        )
    N = len(dataset)
    for budget in budgets:
        if budget % 2 or not 2 <= budget <= N:
            raise ValueError(
                f"Expected even budgets between 2 and N = {N}, got {budget}. Remedy: the debiased "
                "method uses half of it for directions and half for curvatures."
            )
    if reference_size is not None and not 1 <= reference_size < N:
        raise ValueError(
            f"Expected reference_size between 1 and N - 1 = {N - 1}, got {reference_size}. "
            "Remedy: leave it out to use all data."
        )
    for name, value, remedy in (
        ("n_draws", n_draws, "the paper's is 5"),
        ("n_shared", n_shared, "1 shares nothing"),
    ):
        if value < 1:
            raise ValueError(f"Expected {name} >= 1, got {value}. Remedy: {remedy}.")
    return N


def _checked_draws(draws: Iterable[int], n_draws: int) -> list[int]:
    """Return the wanted draws; raise if one of them does not exist."""
    wanted = list(draws)
    if not wanted or not set(wanted) <= set(range(n_draws)):
        raise ValueError(
            f"Expected draws among 0 to {n_draws - 1}, got {wanted}. Remedy: correct the numbers, "
            "or raise n_draws."
        )
    return wanted


def _named_sets(
    test_loader: Iterable[Any], ood_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None
) -> dict[str, Iterable[Any]]:
    """Evaluation sets by prefix of their metrics; the test set has none."""
    if ood_loader is None:
        return {"": test_loader}
    named = ood_loader if isinstance(ood_loader, Mapping) else {"ood": ood_loader}
    return {"": test_loader, **named}


def _shuffled(train_loader: DataLoader, generator: torch.Generator) -> DataLoader:
    """All training data in a random order."""
    return DataLoader(
        train_loader.dataset,
        batch_size=train_loader.batch_size or len(train_loader.dataset),
        shuffle=True,
        generator=generator,
        collate_fn=train_loader.collate_fn,
    )


def _draw_loaders(
    train_loader: DataLoader, N: int, budget: int, roles: int, seed: int, draw: int
) -> list[DataLoader]:
    """One loader per role, over equal shares of ``budget`` random data."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + draw + 1)
    order = torch.randperm(N, generator=generator)[:budget]
    return [
        DataLoader(
            Subset(train_loader.dataset, part.tolist()),
            batch_size=train_loader.batch_size or len(part),
            collate_fn=train_loader.collate_fn,
        )
        for part in order.split(budget // roles)
    ]
