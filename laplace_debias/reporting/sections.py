"""The sections of the page, each from results that are there already."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from torch import nn

from laplace_debias.comparison.result import ComparisonResult
from laplace_debias.comparison.rows import FITTED_ONCE, FULL, LARGE, PLAIN, PRIOR_ONLY
from laplace_debias.debias.bias import CurvatureBias
from laplace_debias.debias.expected_bias import ExpectedBias
from laplace_debias.evaluation.tuning_result import TuningResult
from laplace_debias.network.model_check import ModelCheck
from laplace_debias.plots.comparison import plot_bias, plot_comparison, plot_gap_cost
from laplace_debias.plots.evaluation import (
    plot_ood,
    plot_reliability,
    plot_risk_coverage,
    plot_sweep,
)
from laplace_debias.plots.style import COLUMN, style_of
from laplace_debias.reporting.page import figure, page, section, table
from laplace_debias.reporting.predictions import Predicted
from laplace_debias.reporting.recommend import Recommendation, candidates

__all__ = ["Report", "written"]

GLOSSARY = {
    "ece": "expected calibration error",
    "aurc": "mean error rate when only the most certain data are answered",
    "ood_auroc": "how well entropy tells shifted data from test data, 1 at best",
    "ood_fpr95": "share of shifted data that pass a threshold that 95 % of the test data pass",
    "crps": "continuous ranked probability score",
    "sharpness": "mean predictive standard deviation",
    PRIOR_ONLY: "a posterior without any curvature",
}
LEVELS = tuple(i / 20 for i in range(1, 20))


@dataclass(frozen=True)
class Report:
    """What a page was made of.

    Attributes:
        path: The page.
        recommendation: What to do.
        check: What the model is, and what share of it is Bayesian.
        expected_bias: Over-estimation to expect from one mini-batch.
        measured_bias: Over-estimation that two mini-batches measured.
        comparison: The methods, baselines and costs.
        tuning: The sweep behind the chosen prior precision.
        predicted: Predictions of the test data, by name: ``"plain"`` and the shown posterior.
        shifted: Predictions out of distribution, by name; empty without an ``ood_loader``.
        note: What was left out, and why; empty if nothing was.
    """

    path: Path
    recommendation: Recommendation
    check: ModelCheck
    expected_bias: ExpectedBias
    measured_bias: CurvatureBias
    comparison: ComparisonResult
    tuning: TuningResult
    predicted: dict[str, Predicted]
    shifted: dict[str, Predicted]
    note: str = ""


def written(
    found: Report, model: nn.Module, kind: str, N: int, n_draws: int, *, val_given: bool
) -> str:
    """The page as text.

    Args:
        found: Everything on it.
        model: The network.
        kind: ``"classification"`` or ``"regression"``.
        N: Number of training data.
        n_draws: Number of draws.
        val_given: Whether there were validation data, or half the test data stood in for them.
    """
    advice = found.recommendation
    parts = [
        _model(found, model, kind, N),
        _bias(found),
        _methods(found, n_draws, val_given),
        _sweep(found),
        _calibration(found, kind),
        _risk(found, kind),
    ]
    if found.shifted:
        parts.append(_shifted(found, kind))
    title = f"{type(model).__name__}: Laplace approximations from mini-batches"
    return page(title, advice.sentence, advice.code, parts)


def _model(found: Report, model: nn.Module, kind: str, N: int) -> str:
    """What the model is, and what share of it is Bayesian."""
    check = found.check
    total = sum(p.numel() for p in model.parameters())
    text = (
        f"A {type(model).__name__} with {total:,} parameters for {kind}, trained on {N:,} data. "
        f"{check.share:.1%} of its parameters are Bayesian: they belong to layers that K-FAC can "
        f"represent and require a gradient. A fit on {check.n_data} data needs about "
        f"{check.fit_bytes / 2**20:,.1f} MiB, a prediction {check.predict_bytes / 2**20:,.1f} MiB."
    )
    rows = [[x.name, x.kind, f"{x.n_parameters:,}", x.status] for x in check.layers]
    return section("The model", text, table(["parameter", "layer", "entries", "status"], rows))


def _bias(found: Report) -> str:
    """How biased a mini-batch is."""
    expected, measured = found.expected_bias, found.measured_bias
    trusted = [factor for factor in expected.factors if factor.trusted]
    foretold = "These data alone are too few to foretell by how much."
    if trusted:
        worst = max(trusted, key=lambda factor: factor.overestimation)
        foretold = (
            "From these data alone the strongest over-estimation to expect is "
            f"{worst.overestimation:.2f} times ({worst.name}, factor {worst.factor})."
        )
    text = (
        f"A mini-batch of {expected.n_data} data finds its own top curvature too large, because it "
        f"chose the directions. {foretold} That counts the shape of the spectrum alone. A second "
        "mini-batch measured what the second figure shows, tensor by tensor, and there the scale "
        "counts too: where one of the two carries more curvature as a whole, all ratios move up, "
        "or down, together. One pair is noisy."
    )
    left = figure(
        plot_bias(expected).figure.figure,
        "Expected over-estimation, from one mini-batch, of each layer's input factor A (hatched) "
        "and output factor B.",
    )
    right = figure(
        plot_bias(measured).figure.figure, "Measured on a second mini-batch of the same size."
    )
    return section("How biased is a mini-batch?", text, left, right)


def _methods(found: Report, n_draws: int, val_given: bool) -> str:
    """The methods, at validated prior precisions, with costs."""
    result, advice = found.comparison, found.recommendation
    entries = candidates(result)
    wanted = ("nll", "accuracy", "ece", "aurc", "crps", "rmse", "coverage_90", "sharpness")
    columns = [name for name in wanted if name in result.metrics]
    columns += [name for name in ("ood_nll", "ood_auroc", "ood_fpr95") if name in result.metrics]
    rows, names = [], []
    for entry in entries:
        costs = [entry.cost(part) for part in ("backward", "seconds")]
        passes = None if costs[0] is None else f"{costs[0]:,.0f}"
        seconds = None if costs[1] is None else f"{costs[1]:.3f}"
        name = entry.method if entry.method in FITTED_ONCE else f"{entry.method}, {entry.budget}"
        names.append(entry.method)
        rows.append(
            [name, entry.prior_precision, *(entry.mean(c) for c in columns), passes, seconds]
        )
    chosen = [(e.method, e.budget) for e in entries].index((advice.method, advice.budget))
    source = "validation data" if val_given else "every other datum of the test set"
    text = (
        f"Means over {n_draws} draws of mini-batches; the prior precision of each was chosen by "
        f"the NLL on {source}, the table is measured on data that chose nothing. "
        "Baselines are fitted on all training data. The recommended row is marked; costs are "
        "backward passes and seconds of a fit."
    )
    words = [f"{name}: {said}" for name, said in GLOSSARY.items() if name in (*columns, *names)]
    head = ["method", "prior", *columns, "backward", "seconds"]
    parts = [text, found.note, table(head, rows, chosen), ". ".join([*words, ""]).strip()]
    drawn = any(m not in FITTED_ONCE for m in result.methods)
    if drawn:
        shown = [name for name in ("nll", "ece", "crps") if name in result.metrics][:2]
        axes = plot_comparison(result, shown)
        caption = (
            "Reference as a line, methods as bands over draws. The axis is the prior precision "
            f"divided by the number of training data, {result.n_data:,}."
        )
        parts.append(figure(axes[0, 0].figure.figure, caption))
    if drawn and {FULL, LARGE} & set(result.methods):
        ax = plot_gap_cost(result)
        parts.append(
            figure(ax.figure.figure, "Distance from the full-batch posterior against its cost.")
        )
    return section("Methods compared", *parts)


def _sweep(found: Report) -> str:
    """The sweep, and what it says about the plain network."""
    tuning = found.tuning
    i, j = tuning.best_index
    T = tuning.logit_temperatures[j]
    with_T, scaled = "", ""
    if len(tuning.logit_temperatures) > 1:
        with_T, scaled = f" and logits divided by {T:.3g}", " at its best temperature"
    name = next((name for name in found.predicted if name != PLAIN), "")
    own = name == found.recommendation.method
    why = "the recommended one" if own else "the best posterior on the data that choose"
    text = (
        f"From here on: the {name} posterior, {why}. "
        f"On the data that choose, the {name} posterior is best at prior precision "
        f"{tuning.prior_precisions[i]:.4g}{with_T}: {tuning.objective.upper()} {tuning.best:.4f}, "
        f"against {min(tuning.plain):.4f} for the plain network{scaled}."
    )
    ax = plot_sweep(tuning)
    return section(
        "The prior precision",
        text,
        *tuning.warnings(),
        figure(ax.figure.figure, "The sweep, with the chosen point."),
    )


def _calibration(found: Report, kind: str) -> str:
    """Reliability diagrams, or coverage of intervals."""
    if kind == "classification":
        figures = []
        for name, predicted in found.predicted.items():
            ax = plot_reliability(predicted.reliability())
            ax.set_title(f"{name}, {ax.get_title()}", fontsize=9)
            figures.append(figure(ax.figure.figure, f"Accuracy by confidence: {name}."))
        return section(
            "Calibration",
            "Bars above the diagonal are too modest, bars below it too sure; dark bars hold most "
            "of the data.",
            *figures,
        )
    ax = plt.subplots(figsize=(COLUMN, COLUMN), layout="constrained")[1]
    for number, (name, predicted) in enumerate(found.predicted.items()):
        color, _, line = style_of(name, number)
        ax.plot(LEVELS, predicted.coverage(LEVELS), line, color=color, label=name)
    ax.plot([0, 1], [0, 1], "--", color="0.7", linewidth=1)
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="promised", ylabel="covered")
    ax.legend(frameon=False, fontsize=8)
    return section(
        "Calibration",
        "Share of targets inside central intervals, against what the intervals promise.",
        figure(ax.figure.figure, "Coverage of central intervals."),
    )


def _risk(found: Report, kind: str) -> str:
    """Risk against coverage."""
    curves = {name: predicted.risk_coverage() for name, predicted in found.predicted.items()}
    risk = "error rate" if kind == "classification" else "mean squared error"
    ax = plot_risk_coverage(curves, risk=risk)
    lines = "; ".join(f"{name} {c.at(0.8):.3g}" for name, c in curves.items())
    return section(
        "Answering only where it is sure",
        f"The {risk} among the most certain 80 % of the test data: {lines}.",
        figure(ax.figure.figure, "Risk against the share of data answered."),
    )


def _shifted(found: Report, kind: str) -> str:
    """Histograms in and out of distribution."""
    figures = []
    for name, inside in found.predicted.items():
        outside: Predicted = found.shifted[name]
        ax = plot_ood(inside.uncertainty, outside.uncertainty, title=name)
        if kind == "regression":
            ax.set_xlabel("predictive standard deviation")
        figures.append(figure(ax.figure.figure, f"Uncertainty in and out of distribution: {name}."))
    what = "entropy" if kind == "classification" else "standard deviation"
    text = f"The further apart the histograms of predictive {what}, the better."
    return section("Out of distribution", text, *figures)
