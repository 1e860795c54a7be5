"""One page for your own model: what it is, how biased a mini-batch is, and what to do about it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from laplace.baselaplace import KronLaplace
from torch import nn
from torch.utils.data import DataLoader

from laplace_debias.comparison.baselines import best_temperature
from laplace_debias.comparison.compare import compare
from laplace_debias.comparison.draws import draw_generator, draw_loaders
from laplace_debias.comparison.fitting import Fitting
from laplace_debias.comparison.options import CustomMethod, Prediction, Reference
from laplace_debias.comparison.result import ComparisonResult
from laplace_debias.comparison.rows import (
    AUTO,
    DIAGONAL,
    FITTED_ONCE,
    FULL,
    LAST_LAYER,
    PLAIN,
    PRIOR_ONLY,
    SINGLE,
    TEMPERATURE,
    TWO_BATCH,
)
from laplace_debias.data.loaders import as_batches
from laplace_debias.data.reading import unpack
from laplace_debias.debias.bias import CurvatureBias
from laplace_debias.debias.expected_bias import ExpectedBias
from laplace_debias.evaluation.tuning import tune
from laplace_debias.network.loss import likelihood_name
from laplace_debias.network.model_check import check_model
from laplace_debias.posterior.debiased import DebiasedPosterior
from laplace_debias.posterior.kron import Laplace
from laplace_debias.predictive.eigenblocks import default_grid
from laplace_debias.predictive.predictor import StructuredPredictor
from laplace_debias.reporting.predictions import halves, predict
from laplace_debias.reporting.recommend import Recommendation, candidates, recommend
from laplace_debias.reporting.sections import Report, written
from laplace_debias.storage.atomic import write_atomically

__all__ = ["Report", "report"]


def report(
    model: nn.Module,
    train_loader: DataLoader[Any],
    test_loader: Iterable[Any],
    *,
    ood_loader: Iterable[Any] | None = None,
    val_loader: Iterable[Any] | None = None,
    methods: Sequence[str | bool | CustomMethod] | None = None,
    baselines: Sequence[str] | None = None,
    budgets: Sequence[int] | None = None,
    n_draws: int = 3,
    likelihood: str = "classification",
    laplace: Mapping[str, Any] | None = None,
    seed: int = 0,
    path: str | Path = "report.html",
    progress_bar: bool | None = None,
) -> Report:
    """Write a self-contained HTML page about a model and its posteriors.

    It tells what share of the model is Bayesian, how biased its mini-batches are, how methods
    compare and what they cost, shows the sweep over the prior precision, calibration, selective
    risk and histograms out of distribution, and recommends one method with a line of code.

    Args:
        model: Trained network; it is left as it was.
        train_loader: Loader over all N training data with a map-style dataset.
        test_loader: Test data. Without a ``val_loader`` every other datum chooses prior
            precisions, and only the rest is measured on.
        ood_loader: Data out of distribution; for a regression with targets.
        val_loader: Validation data.
        methods: See :func:`~laplace_debias.comparison.compare.compare`; by default ``"single"``,
            ``"two-batch"``, ``"auto"`` (if it takes this model) and ``"full"``.
        baselines: See there; by default all that fit the likelihood.
        budgets: See there; by default twice and eight times the loader's batch size.
        n_draws: Number of draws of mini-batches.
        likelihood: ``"classification"`` or ``"regression"``.
        laplace: Arguments of the Laplace approximation, such as ``{"sigma_noise": 0.3}``.
        seed: Decides the draws.
        path: Where to write the page.
        progress_bar: Show progress bars; by default on a terminal, if it takes some seconds.

    Returns:
        Everything on the page, as results.

    Raises:
        ValueError: If the model is one that K-FAC cannot represent, or the data do not fit.

    Example:
        >>> import tempfile, torch
        >>> from torch.utils.data import TensorDataset
        >>> _ = torch.manual_seed(0)
        >>> X = torch.randn(60, 2)
        >>> data = TensorDataset(X, (X[:, 0] > 0).long())
        >>> net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2))
        >>> file = tempfile.mkdtemp() + "/report.html"
        >>> found = report(net, DataLoader(data, 8), DataLoader(data, 20), n_draws=1, path=file)
        >>> found.path.exists(), found.check.share
        (True, 1.0)
    """
    kind = likelihood_name(likelihood)
    options = {"subset_of_weights": "all", **(laplace or {})}
    key_y = str(options.get("dict_key_y", "labels"))
    device = next(model.parameters()).device
    N = len(train_loader.dataset)  # type: ignore[arg-type]
    size = train_loader.batch_size or 32
    first = next(iter(draw_loaders(train_loader, min(size, N), 1, draw_generator(seed, 0))))
    X, _ = unpack(next(iter(as_batches(first))), device, key_y)
    check = check_model(model, X, kind)
    if not check.supported:
        bad = [layer.name for layer in check.layers if layer.status == "not supported"]
        raise ValueError(
            f"Expected a model that K-FAC can represent, got one with {bad or check.data}. Remedy: "
            "`print(check_model(model, x, likelihood))` says what to freeze or change."
        )
    test = test_loader
    if val_loader is None:
        val_loader, test = halves(test_loader, device, key_y)
    if budgets is None:
        wanted = [min(k * size, N) // 2 * 2 for k in (2, 8)]
        budgets = tuple(dict.fromkeys(b for b in wanted if b >= 2))
    if baselines is None:
        every = (TEMPERATURE, LAST_LAYER, PRIOR_ONLY, DIAGONAL)
        baselines = [b for b in every if kind == "classification" or b != TEMPERATURE]
    grid, note = list(map(float, default_grid(N))), ""
    if methods is None:
        probe = Fitting(
            Laplace,
            model,
            train_loader,
            val_loader,
            kind,
            options,
            {},
            Reference(),
            Prediction(),
            grid,
            seed,
        )
        methods = (SINGLE, TWO_BATCH, AUTO, FULL)
        try:
            probe.posterior(AUTO, 1, 0)
        except ValueError as error:  # what its pairs cannot represent
            methods, note = (SINGLE, TWO_BATCH, FULL), f'"auto" is left out: {error}'
    expected, measured = _biases(model, kind, options, train_loader, size, N, seed)
    result = compare(
        model,
        train_loader,
        test,
        ood_loader=ood_loader,
        methods=(PLAIN, *methods),
        baselines=baselines,
        val_loader=val_loader,
        likelihood=kind,
        budgets=budgets,
        n_draws=n_draws,
        laplace=options,
        seed=seed,
        progress_bar=progress_bar,
    )
    T = best_temperature(model, val_loader, key_y) if TEMPERATURE in baselines else None
    noise = float(options.get("sigma_noise", 1.0))
    advice = recommend(result, kind, T, noise if kind == "regression" else None)
    fitting = Fitting(
        Laplace, model, train_loader, val_loader, kind, options,
        {m.name: m for m in methods if isinstance(m, CustomMethod)}, Reference(), Prediction(),
        grid, seed,
    )  # fmt: skip
    shown = _shown(result, advice)
    la = fitting.posterior(*shown)
    with warnings.catch_warnings():  # the page says it
        warnings.simplefilter("ignore")
        tuning = tune(
            la, val_loader, predictor_of=StructuredPredictor, layerwise=False, noise=False,
            progress_bar=progress_bar,
        )  # fmt: skip
    prior = next(c for c in candidates(result) if (c.method, c.budget) == shown[:2])
    if prior.prior_precision is not None:
        la.prior_precision = prior.prior_precision
    predictors: dict[str, nn.Module | KronLaplace] = {PLAIN: model, shown[0]: la}
    predicted, shifted = (
        {} if data is None else {
            name: predict(p, data, kind, noise, key_y) for name, p in predictors.items()
        }
        for data in (test, ood_loader)
    )  # fmt: skip
    found = Report(
        Path(path), advice, check, expected, measured, result, tuning, predicted, shifted, note
    )
    text = written(found, model, kind, N, n_draws, val_given=test is test_loader)
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))
    return found


def _biases(
    model: nn.Module,
    kind: str,
    options: Mapping[str, Any],
    train_loader: DataLoader[Any],
    size: int,
    N: int,
    seed: int,
) -> tuple[ExpectedBias, CurvatureBias]:
    """Bias that one mini-batch expects of itself, and that a second one measured."""
    kwargs = {k: v for k, v in options.items() if k != "hessian_structure"}
    la = Laplace(model, kind, hessian_structure="kron", debias=True, **kwargs)
    assert isinstance(la, DebiasedPosterior)
    pair = draw_loaders(train_loader, min(2 * size, N) // 2 * 2, 2, draw_generator(seed, 0))
    expected = la.expected_bias(pair[0])
    la.fit(pair[0], curvature_loader=pair[1], n_data=N)
    return expected, la.curvature_bias()


def _shown(result: ComparisonResult, advice: Recommendation) -> tuple[str, int, int]:
    """The posterior to draw: the recommended one, or the best on validation data that has draws."""
    found = [c for c in candidates(result) if c.method not in FITTED_ONCE or c.method == FULL]
    own = [c for c in found if (c.method, c.budget) == (advice.method, advice.budget)]
    best = own[0] if own else min(found, key=lambda c: c.validation)
    return best.method, best.budget, -1 if best.method == FULL else 0
