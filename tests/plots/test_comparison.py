"""Comparisons: bands, lines and bars where they belong."""

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from laplace_debias.comparison import ComparisonResult, ComparisonRow  # noqa: E402
from laplace_debias.debias import CurvatureBias, ExpectedBias, FactorBias, LayerBias  # noqa: E402
from laplace_debias.plots.comparison import (  # noqa: E402
    plot_bias,
    plot_calibration_budget,
    plot_comparison,
    plot_gap_cost,
)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def result_with(*methods, reference="full"):
    grid, rows = (1.0, 10.0, 100.0), []
    for method in methods:
        if method == "plain":
            rows.append(
                ComparisonRow(method, 0, 0, 0, None, {"nll": 0.7, "ece": 0.1, "val_nll": 0.5})
            )
            continue
        single = method == reference
        for budget in (100,) if single else (8, 16, 32):
            for draw in range(1 if single else 3):
                for delta in grid:
                    value = 1 / delta + (0 if single else 0.1 * draw + 1 / budget)
                    size = budget // 2 if method == "two-batch" else budget
                    metrics = {"nll": value, "ece": value / 2, "val_nll": abs(np.log10(delta) - 1)}
                    cost = {"backward": 9 * budget, "seconds": budget / 100}
                    row = ComparisonRow(method, budget, size, draw, delta, metrics, cost)
                    rows.append(row)
    return ComparisonResult(tuple(rows), 100, {})


def test_a_panel_per_budget_with_bands_and_lines():
    result = result_with("plain", "single", "two-batch", "full")
    axes = plot_comparison(result, ("nll", "ece"))
    assert axes.shape == (2, 3)
    assert [ax.get_ylabel() for ax in axes[:, 0]] == ["NLL", "ECE"]
    assert [ax.get_title() for ax in axes[0]] == ["8 data", "16 data", "32 data"]
    assert all(ax.get_xscale() == "log" for ax in axes.flat)
    for budget, ax in zip((8, 16, 32), axes[0], strict=True):
        lines = {line.get_label(): line for line in ax.get_lines()}
        assert set(lines) == {"plain", "single", "two-batch", "full"}
        np.testing.assert_allclose(lines["full"].get_xdata(), [0.01, 0.1, 1.0])  # beta
        np.testing.assert_allclose(lines["full"].get_ydata(), [1.0, 0.1, 0.01])
        np.testing.assert_allclose(lines["single"].get_ydata()[0], 1 + 0.1 + 1 / budget)
        looks = {(line.get_linestyle(), line.get_marker()) for line in lines.values()}
        assert len(looks) == 4  # told apart without colour
        assert len(ax.collections) == 2  # a band for each method that takes draws
        band = ax.collections[0].get_paths()[0].vertices
        first = band[np.isclose(band[:, 0], 0.01)][:, 1]
        assert np.ptp(first) == pytest.approx(0.2)  # from the smallest draw to the largest
    (legend,) = axes[0, 0].figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["plain", "single", "two-batch", "full"]


def test_other_methods_baselines_and_given_axes():
    figure, given = plt.subplots(1, 3)
    result = result_with("single", "mine", "large-batch", reference="large-batch")
    axes = plot_comparison(result, ("nll",), given)
    assert list(axes[0]) == list(given)
    labels = [line.get_label() for line in axes[0, 0].get_lines()]
    assert "mine" in labels and "large-batch (100 data)" in labels
    with pytest.raises(ValueError, match="Expected 2 x 3 axes"):
        plot_comparison(result, ("nll", "ece"), given)
    result = result_with("single", "diagonal", reference="diagonal")
    assert len(plot_comparison(result, ("nll",))[0, 0].get_lines()) == 1
    assert len(plot_comparison(result, ("nll",), baselines=True)[0, 0].get_lines()) == 2


def test_calibration_against_the_budget():
    ax = plot_calibration_budget(result_with("plain", "single", "full"), "ece")
    (bars,) = ax.containers
    np.testing.assert_allclose(bars[0].get_xdata().astype(float), [8, 16, 32])
    # at the validated prior precision 10, the mean over three draws
    expected = [(0.1 + 0.1 + 1 / b) / 2 for b in (8, 16, 32)]
    np.testing.assert_allclose(bars[0].get_ydata().astype(float), expected)
    heights = {line.get_label(): line.get_ydata()[0] for line in ax.get_lines()}
    assert heights["plain"] == 0.1 and heights["full"] == pytest.approx(0.05)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["8", "16", "32"]


@pytest.mark.parametrize(("cost", "first"), [("backward", 72), ("seconds", 0.08)])
def test_gap_against_cost(cost, first):
    result = result_with("single", "two-batch", "full")
    ax = plot_gap_cost(result, "nll", cost)
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert lines["single"].get_xdata()[0] == pytest.approx(first)
    gaps = [result.gap("nll", "single", b).gap for b in (8, 16, 32)]
    np.testing.assert_allclose(lines["single"].get_ydata(), gaps)
    assert lines["reference"].get_xdata()[0] == pytest.approx(first * 100 / 8)
    bare = tuple(ComparisonRow(**(vars(row) | {"cost": None})) for row in result.rows)
    with pytest.raises(ValueError, match="Expected rows with costs"):
        plot_gap_cost(ComparisonResult(bare, 100, {}))


def test_bias_bars():
    layers = (
        LayerBias("0.weight", 9, 1, 3.0, 2.0, 1.0, 1.5),
        LayerBias("0.bias", 9, 1, 8.0, 1.0, 1, 1),
    )
    ax = plot_bias(CurvatureBias(layers, 0.1))
    assert [bar.get_x() + bar.get_width() for bar in ax.patches] == pytest.approx([1.5, 8.0])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0.weight", "0.bias"]
    assert ax.get_xscale() == "log"
    factors = [FactorBias("w", f, 8, 4, 6.0, 3.0, 1.5 + (f == "A")) for f in "BA"]
    ax = plot_bias(ExpectedBias(tuple(factors), 8))
    assert [bar.get_hatch() for bar in ax.patches] == [None, "////"]
    assert ax.get_xscale() == "linear"
    few = FactorBias("w", "B", 8, 4, 2.0, 1.9, 40.0)
    ax = plot_bias(ExpectedBias((few, *factors), 8))
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([0.0, 0.5, 1.5])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["w B (too few rows)", "w B", "w A"]
