"""Runtime bars."""

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402
import pytest  # noqa: E402

from laplace_debias.plots.runtimes import plot_runtimes  # noqa: E402


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


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
