"""Figures of the quadratics: the numbers of a study are where the figure says."""

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from laplace_debias.plots import quadratics as plots  # noqa: E402
from laplace_debias.quadratics import (  # noqa: E402
    Quadratic,
    TrajectoryMetrics,
    directional_bias,
    overlap_study,
    partition,
    top_eigenvectors,
)
from tests.quadratics.test_quadratic import make_classifier  # noqa: E402


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def problem():
    model, loss, X, y = make_classifier()
    return model, loss, partition((X, y), 8)


def drawn(axis):
    """Heights of everything drawn with markers or lines, flat."""
    lines = [np.atleast_1d(line.get_ydata()) for line in axis.lines]
    dots = [c.get_offsets()[:, 1] for c in axis.collections if hasattr(c, "get_offsets")]
    return np.concatenate([np.asarray(part, dtype=float).ravel() for part in (*lines, *dots)])


def assert_shown(values, axis):
    heights = drawn(axis)
    for value in np.asarray(values).ravel():
        assert np.isclose(heights, value, rtol=1e-6).any(), value


def test_values_on_the_same_and_on_all_data(problem):
    bias = directional_bias(*problem, k=3, chosen=(0, 2), l2=0.1)
    figure = plots.plot_directional_bias(bias, kinds=("curvatures",), title="a title")
    assert len(figure.axes) == 2
    for column, axis in enumerate(figure.axes):
        assert_shown(bias.same("curvatures")[column], axis)
        assert_shown(bias.full("curvatures")[column], axis)


def test_overlaps_are_drawn_in_decades(problem):
    result = overlap_study(*problem, k=3, l2=0.1)
    figure = plots.plot_overlaps(result)
    images = [axis.images[0] for axis in figure.axes if axis.images]
    assert len(images) == 9
    expected = result.overlaps[0, 1].clamp(min=1e-8).log10()
    np.testing.assert_allclose(images[1].get_array(), expected)
    assert images[0].get_clim() == (-8, 0)


def test_planes_share_their_heights(problem):
    model, loss, batches = problem
    full = Quadratic(model, loss, batches, l2=0.1)
    own, all_data = [], []
    for batch in batches[:2]:
        q = Quadratic(model, loss, batch, l2=0.1)
        D = top_eigenvectors(q, 2).vectors
        own.append(q.restrict(D))
        all_data.append(full.restrict(D))
    figure = plots.plot_planes(own, all_data, levels=4)
    assert len(figure.axes) == 2
    for axis in figure.axes:
        levels = [c.levels for c in axis.collections if hasattr(c, "levels")]
        assert len(levels) == 2 and np.array_equal(levels[0], levels[1]) and len(levels[0]) == 4


def test_runs_are_marked_where_they_are_best():
    losses, accuracies = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0.1, 0.4, 0.7])
    metrics = TrajectoryMetrics(losses, accuracies)
    whole = plt.figure()
    top, _ = whole.subfigures(2, 1)
    axes = top.subplots(1, 4)
    figure = plots.plot_cg_runs({"cg": [(metrics, metrics)]}, title="digits", axes=axes)
    assert figure is whole
    for axis, best, value in zip(axes, [1, 2, 1, 2], [1.0, 0.7, 1.0, 0.7], strict=True):
        (mark,) = [line for line in axis.lines if len(line.get_xdata()) == 1]
        assert mark.get_xdata()[0] == best and np.isclose(mark.get_ydata()[0], value)
    assert len(plots.plot_cg_runs({"cg": [(metrics, metrics)]}).axes) == 4
