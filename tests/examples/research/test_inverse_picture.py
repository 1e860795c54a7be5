"""The picture of distance and seconds."""

import pytest
from matplotlib import pyplot as plt

from examples.research.inverse_picture import draw_seconds


def cell(method, P, draw, seconds):
    distances = {"test": 0.1 / P + 0.01 * draw, "far": 0.2 / P}
    return {"method": method, "P": P, "seconds": seconds, **distances}


def test_every_method_is_a_line_of_means(tmp_path):
    names = ("single", "two-batch", "auto", "pairs", "geometric mean")
    rows = [cell(name, P, d, P / 9) for name in names for P in (36, 2304) for d in (0, 1)]
    figure = draw_seconds("made", rows, tmp_path / "seconds.png")
    assert (tmp_path / "seconds.png").stat().st_size > 10_000
    test, far = figure.axes
    lines = {line.get_label(): line for line in test.lines}
    assert {"single", "two-batch", "auto", "not in the library"} <= set(lines)
    assert lines["auto"].get_ydata()[0] == pytest.approx(0.1 / 36 + 0.005)
    assert list(lines["auto"].get_xdata()) == [4.0, 256.0]
    assert list(test.lines[-1].get_xdata()) == [256.0, 256.0]  # what a two-batch fit takes
    assert far.get_title() == "made, far inputs"
    no_bar = draw_seconds("made", [r for r in rows if r["method"] == "auto"])
    assert len(no_bar.axes[0].lines) == 1
    plt.close("all")
