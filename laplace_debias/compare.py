r"""Compare vanilla, single-batch, debiased and full-batch Laplace approximations at equal budget.

A budget of M data buys one mini-batch of M for the single-batch method, and two of M / 2 for the
debiased one: M / 2 data for the directions, the other M / 2 for the curvatures. In each draw both
use the same M data. Draws with larger budgets contain those with smaller ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from laplace.baselaplace import KronLaplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from tqdm import tqdm

from laplace_debias.batches import unpack
from laplace_debias.cell_store import CellStore
from laplace_debias.comparison import (
    DEBIASED,
    FULL,
    LARGE,
    SINGLE,
    VANILLA,
    ComparisonResult,
    ComparisonRow,
)
from laplace_debias.factory import Laplace
from laplace_debias.fingerprints import data_hash, model_hash, posterior_hash
from laplace_debias.links import check_link
from laplace_debias.metrics import CalibrationMetrics, entropy_auroc
from laplace_debias.model_state import evaluation_mode
from laplace_debias.predictive import StructuredPredictor
from laplace_debias.sweep import default_grid, run_sweep

__all__ = ["compare"]

_METRICS = ("accuracy", "nll", "ece", "brier", "mean_entropy")
# reads a loader and hands over (i, probabilities [n, C], labels [n]) for each prior precision i
_Update = Callable[[int, Tensor, Tensor], None]
_Run = Callable[[Iterable[Any], _Update], None]


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
            `laplace_debias.sweep.default_grid`.
        methods: Which to run. Any other ``debias`` mode of `Laplace` (say ``"crossfit"``) runs on
            all M data under that name.
        subset_of_weights: ``"all"`` or ``"last_layer"``.
        link_approx: ``"probit"``, ``"mc"`` (the paper's), ``"bridge"`` or ``"bridge_norm"``.
        n_samples: Number of samples for ``"mc"``.
        reference: A fitted approximation to use as the reference, e.g. one loaded from a file;
            it says ``"full"`` unless ``reference_size`` tells otherwise.
        reference_size: Fit the reference on that many random data instead of all; it is then
            called ``"large-batch"``.
        seed: Decides the draws and the random numbers of ``"mc"``.
        n_bins: Number of bins of the ECE.
        folder: Keeps each finished cell (method, budget, draw) as a small file there. The same
            call goes on where it was interrupted; budgets, draws, methods and reference may grow.
        progress_bar: Show a progress bar over cells.
        **laplace_kwargs: Handed to `Laplace`.

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
    N = _check(train_loader, budgets, n_draws, reference_size)
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
    store = CellStore(folder, config)

    def evaluated(run: _Run, deltas: list[float | None], **row: Any) -> list[dict]:
        values = _evaluate_sets(run, sets, len(deltas), n_bins)
        pairs = zip(deltas, values, strict=True)
        return [asdict(ComparisonRow(**row, prior_precision=d, metrics=v)) for d, v in pairs]

    def laplace_cell(method: str, budget: int, draw: int) -> list[dict]:
        if method in (FULL, LARGE) and reference is not None:
            la, size = reference, budget
        else:
            debias, roles = {DEBIASED: (True, 2)}.get(method, (method, 1))
            debias = "single" if method in (FULL, LARGE) else debias
            size = budget // roles
            first, *second = _draw_loaders(train_loader, N, budget, roles, seed, draw)
            la = Laplace(
                model, "classification", subset_of_weights, "kron", debias=debias, **laplace_kwargs
            )
            la.fit(first, curvature_loader=second[0] if second else None, n_data=N)
        run = _laplace_run(la, grid, link_approx, n_samples, seed)
        row = dict(method=method, budget=budget, batch_size=size, draw=max(draw, 0))
        return evaluated(run, grid, **row)

    cells: dict[str, Callable[[], list[dict]]] = {}
    for method in methods:
        if method == VANILLA:
            row = dict(method=VANILLA, budget=0, batch_size=0, draw=0)
            run = _vanilla_run(model, laplace_kwargs.get("dict_key_y", "labels"))
            cells[VANILLA] = lambda run=run, row=row: evaluated(run, [None], **row)
        elif method in (FULL, LARGE):
            size, name = (N, FULL) if reference_size is None else (reference_size, LARGE)
            key = name if size == N else f"{name}-{size}"
            key += "" if reference is None else f"-{posterior_hash(reference)}"
            cells[key] = lambda name=name, size=size: laplace_cell(name, size, -1)
        else:
            for budget, draw in itertools.product(budgets, range(n_draws)):
                cells[f"{method}-{budget}-{draw}"] = lambda m=method, b=budget, d=draw: (
                    laplace_cell(m, b, d)
                )
    rows = []
    with torch.random.fork_rng(devices=[]):  # reading a DataLoader draws from the global state
        for name, make in tqdm(cells.items(), "compare", disable=not progress_bar):
            rows += [ComparisonRow(**row) for row in store.get(name, make)]
    return ComparisonResult(tuple(rows), N, config)


def _check(
    train_loader: DataLoader,
    budgets: Sequence[int],
    n_draws: int,
    reference_size: int | None,
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
    if n_draws < 1:
        raise ValueError(f"Expected n_draws >= 1, got {n_draws}. Remedy: the paper's is 5.")
    return N


def _named_sets(
    test_loader: Iterable[Any], ood_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None
) -> dict[str, Iterable[Any]]:
    """Evaluation sets by prefix of their metrics; the test set has none."""
    if ood_loader is None:
        return {"": test_loader}
    named = ood_loader if isinstance(ood_loader, Mapping) else {"ood": ood_loader}
    return {"": test_loader, **named}


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


def _vanilla_run(model: nn.Module, key_y: str) -> _Run:
    """Predictions of the plain model."""

    @torch.no_grad()
    def run(loader: Iterable[Any], update: _Update) -> None:
        device = next(model.parameters()).device
        with evaluation_mode(model):
            for batch in loader:
                X, y = unpack(batch, device, key_y)
                update(0, model(X).softmax(-1), y)

    return run


def _laplace_run(
    la: KronLaplace, grid: list[float], link_approx: str, n_samples: int, seed: int
) -> _Run:
    """Predictions of the linearised network for every prior precision.

    Every set starts from the same random numbers, whatever the method or draw.
    """
    predictor = StructuredPredictor(la, grid, keep_graph=False)

    def run(loader: Iterable[Any], update: _Update) -> None:
        generator = torch.Generator(la._device).manual_seed(seed)
        run_sweep(
            predictor,
            loader,
            lambda i, prediction, y: update(i, prediction[0], y),
            link_approx=link_approx,
            n_samples=n_samples,
            generator=generator,
        )

    return run


def _evaluate_sets(
    run: _Run, sets: dict[str, Iterable[Any]], k: int, n_bins: int
) -> list[dict[str, float]]:
    """Metrics of k predictions on every set."""
    values: list[dict[str, float]] = [{} for _ in range(k)]
    id_entropies: list[Tensor] = []
    for prefix, loader in sets.items():
        metrics = [CalibrationMetrics(n_bins) for _ in range(k)]
        # a bare tensor has no labels: an array of shape [n, 0] stands for them
        pairs = ((b, torch.empty(len(b), 0)) if isinstance(b, Tensor) else b for b in loader)

        def update(i: int, probs: Tensor, y: Tensor, metrics: list = metrics) -> None:
            if y.shape[1:] == (0,):
                metrics[i].update_ood(probs)
            else:
                metrics[i].update(probs, y)

        run(pairs, update)
        for i, metric in enumerate(metrics):
            values[i] |= _set_values(metric, prefix, id_entropies[i] if prefix else None)
        id_entropies = id_entropies or [metric.entropies for metric in metrics]
    return values


def _set_values(
    metric: CalibrationMetrics, prefix: str, id_entropies: Tensor | None
) -> dict[str, float]:
    """Numbers of one set, named with its prefix."""
    if metric.n_data + (metric.n_ood if prefix else 0) == 0:
        name = f"the OOD loader '{prefix}'" if prefix else "`test_loader`"
        expected = "datum" if prefix else "labelled datum"
        raise ValueError(f"Expected at least one {expected} in {name}, got none.")
    values: dict[str, float] = {}
    if metric.n_data:
        report = metric.compute()
        values = {name: getattr(report, name) for name in _METRICS}
    if id_entropies is not None:
        ood_entropies = metric.entropies if metric.n_data else metric.ood_entropies
        values["mean_entropy"] = ood_entropies.double().mean().item()
        values["auroc"] = entropy_auroc(id_entropies, ood_entropies)
    return {f"{prefix}_{name}" if prefix else name: value for name, value in values.items()}
