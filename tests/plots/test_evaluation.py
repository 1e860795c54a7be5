"""Figures: what is drawn where, from hand-made results."""

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from laplace_debias.evaluation import SweepResult, TuningResult, risk_coverage  # noqa: E402
from laplace_debias.evaluation.reports import ReliabilityBins  # noqa: E402
from laplace_debias.plots.evaluation import (  # noqa: E402
    plot_band,
    plot_ood,
    plot_reliability,
    plot_risk_coverage,
    plot_sweep,
)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def test_reliability_diagram():
    lower, upper = (0.0, 0.5, 1.0), (0.5, 1.0, 1.0)
    bins = ReliabilityBins(lower, upper, (0.0, 0.8, 1.0), (0.0, 0.5, 1.0), (0, 4, 4))
    ax = plot_reliability(bins)
    assert [patch.get_height() for patch in ax.patches] == [0.5, 1]  # no bar for the empty bin
    assert ax.get_title() == "ECE 0.150"


def _lines(ax):
    return {line.get_label(): line for line in ax.get_lines()}


def test_sweep_marks_the_chosen_point():
    grid = torch.tensor([0.1, 1.0, 10.0])
    sweep = SweepResult(grid, {"nll": (5.0, 0.3, 0.4)}, {"nll": False}, 8, "probit")
    ax = plot_sweep(sweep)
    lines = _lines(ax)
    assert lines["chosen"].get_xydata().tolist() == [[1.0, 0.3]]
    np.testing.assert_allclose(lines["NLL"].get_ydata(), [5.0, 0.3, 0.4])
    assert ax.get_xscale() == "log" and ax.get_yscale() == "log"


def test_tuning_shows_two_temperatures_and_the_plain_network():
    values = ((0.5, 0.6, 0.7), (0.45, 0.4, 0.3), (0.35, 0.5, 0.6))
    result = TuningResult(
        "nll", False, (0.1, 1.0, 10.0), (0.5, 1.0, 2.0), values, (0.8, 0.7, 0.6), 8, "probit"
    )
    ax = plot_sweep(result)
    lines = _lines(ax)
    assert set(lines) == {"$T$ = 1", "$T$ = 2", "plain, $T$ = 2", "chosen"}
    assert lines["chosen"].get_xydata().tolist() == [[1.0, 0.3]]
    assert lines["plain, $T$ = 2"].get_ydata()[0] == 0.6
    np.testing.assert_allclose(lines["$T$ = 2"].get_ydata(), [0.7, 0.3, 0.6])
    assert lines["$T$ = 1"].get_linestyle() != lines["$T$ = 2"].get_linestyle()


def test_risk_coverage_curves():
    curve = risk_coverage(torch.tensor([0.9, 0.6, 0.3]), torch.tensor([0.0, 1.0, 1.0]))
    ax = plot_risk_coverage({"plain": curve, "two-batch": curve})
    first, second = ax.get_lines()
    np.testing.assert_allclose(first.get_ydata(), [0, 1 / 2, 2 / 3])
    np.testing.assert_allclose(first.get_xdata(), [1 / 3, 2 / 3, 1])
    assert first.get_linestyle() != second.get_linestyle()
    assert "AURC 0.389" in first.get_label()


def test_histograms_are_shares():
    ax = plot_ood(torch.tensor([0.0, 0.1, 0.1, 1.0]), torch.tensor([1.0, 2.0]), n_bins=2, title="t")
    filled, outline = ax.containers[0], ax.patches[-1]
    assert [bar.get_height() for bar in filled] == pytest.approx([0.75, 0.25])
    assert outline.get_hatch() == "////" and ax.get_title() == "t"
    assert [t.get_text() for t in ax.get_legend().get_texts()] == [
        "in distribution", "out of distribution",
    ]  # fmt: skip


def test_band():
    x = torch.tensor([[1.0], [0.0]])
    ax = plot_band(x, 2 * x, torch.tensor([[[4.0]], [[1.0]]]), noise=1.0, data=(x, x))
    lines = _lines(ax)
    assert lines["mean"].get_xydata().tolist() == [[0.0, 0.0], [1.0, 2.0]]  # sorted
    outer, inner = (band.get_paths()[0].vertices for band in ax.collections)
    assert inner[:, 1].min() == pytest.approx(-2.0) and inner[:, 1].max() == pytest.approx(6.0)
    assert outer[:, 1].max() == pytest.approx(2 + 2 * 5**0.5)
    assert len(lines["data"].get_xdata()) == 2
    assert len(plot_band(x, x, x).collections) == 1
