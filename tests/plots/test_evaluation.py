"""Figures: what is drawn where, from hand-made results."""

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from laplace_debias.comparison.result import ComparisonResult, ComparisonRow  # noqa: E402
from laplace_debias.evaluation.reports import ReliabilityBins  # noqa: E402
from laplace_debias.plots.evaluation import plot_comparison, plot_reliability, plot_runtimes  # noqa: E402


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def result_with(*methods, reference="full"):
    grid, rows = (1.0, 10.0, 100.0), []
    for method in methods:
        if method == "plain":
            rows.append(ComparisonRow(method, 0, 0, 0, None, {"nll": 0.7, "ece": 0.1}))
            continue
        single = method == reference
        for budget in (100,) if single else (8, 16, 32):
            for draw in range(1 if single else 3):
                for delta in grid:
                    value = 1 / delta + (0 if single else 0.1 * draw + 1 / budget)
                    size = budget // 2 if method == "two-batch" else budget
                    metrics = {"nll": value, "ece": value / 2}
                    rows.append(ComparisonRow(method, budget, size, draw, delta, metrics))
    return ComparisonResult(tuple(rows), 100, {})


def test_comparison_draws_every_curve():
    result = result_with("plain", "single", "two-batch", "full")
    axes = plot_comparison(result, ("nll", "ece"))
    assert [ax.get_ylabel() for ax in axes] == ["NLL", "ECE"]
    assert all(ax.get_xscale() == "log" for ax in axes)
    lines = {line.get_label(): line for line in axes[0].get_lines()}
    assert set(lines) == {
        "plain", "full", "single, 8", "single, 16", "single, 32",
        "two-batch, 2 x 4", "two-batch, 2 x 8", "two-batch, 2 x 16",
    }  # fmt: skip
    full = lines["full"]
    np.testing.assert_allclose(full.get_xdata(), [0.01, 0.1, 1.0])  # beta = prior precision / N
    np.testing.assert_allclose(full.get_ydata(), [1.0, 0.1, 0.01])
    # the mean over the three draws
    np.testing.assert_allclose(lines["single, 8"].get_ydata()[0], 1 + 0.1 + 1 / 8)
    bars = axes[0].collections[0].get_segments()
    assert bars[0][1][1] - bars[0][0][1] == pytest.approx(0.2)  # from smallest to largest draw
    markers = {label: line.get_marker() for label, line in lines.items()}
    assert len({markers["full"], markers["single, 8"], markers["two-batch, 2 x 4"]}) == 3


def test_lighter_means_fewer_data():
    axes = plot_comparison(result_with("single", "two-batch", "full"), ("nll",))
    lines = {line.get_label(): line for line in axes[0].get_lines()}
    lightness = [np.mean(lines[f"single, {size}"].get_color()) for size in (8, 16, 32)]
    assert lightness == sorted(lightness, reverse=True)


def test_other_methods_and_given_axes():
    figure, given = plt.subplots(1, 1)
    (ax,) = plot_comparison(
        result_with("single", "crossfit", "large-batch", reference="large-batch"), ("nll",), [given]
    )
    assert ax is given
    labels = [line.get_label() for line in ax.get_lines()]
    assert "crossfit, 8" in labels
    assert "large-batch (100 data)" in labels
    with pytest.raises(ValueError, match="Expected 2 axes"):
        plot_comparison(result_with("full"), ("nll", "ece"), [given])


def test_reliability_diagram():
    lower, upper = (0.0, 0.5, 1.0), (0.5, 1.0, 1.0)
    bins = ReliabilityBins(lower, upper, (0.0, 0.8, 1.0), (0.0, 0.5, 1.0), (0, 4, 4))
    ax = plot_reliability(bins)
    assert [patch.get_height() for patch in ax.patches] == [0.5, 1]  # no bar for the empty bin
    assert ax.get_title() == "ECE 0.150"


def test_runtime_bars():
    runtimes = {
        "single": {"construct": [1.0, 3.0], "sample": [0.5, 0.5]},
        "two-batch": {"construct": [1.0, 3.0], "debias": [0.1, 0.1], "sample": [0.5, 0.5]},
    }
    ax = plot_runtimes(runtimes)
    heights = {bar.get_label(): [patch.get_height() for patch in bar] for bar in ax.containers
               if hasattr(bar, "patches")}  # fmt: skip
    assert heights["construct"] == [2.0, 2.0]
    assert heights["debias"] == [0.1]
    assert heights["total"] == pytest.approx([2.5, 2.6])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["single", "two-batch"]
    with pytest.raises(ValueError, match="at least one method"):
        plot_runtimes({})
