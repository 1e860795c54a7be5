"""Figures of how the biases depend on batch size and training: the numbers of the studies."""

import matplotlib

matplotlib.use("agg")

import torch  # noqa: E402

from laplace_debias.plots import series as plots  # noqa: E402
from laplace_debias.quadratics import (  # noqa: E402
    bias_by_batch_size,
    bias_over_training,
    curvature_bias_report,
)
from tests.plots.test_quadratics import (  # noqa: E402, F401
    assert_shown,
    close_figures,
    problem,
)


def test_a_panel_per_batch_size(problem):  # noqa: F811
    model, loss, batches = problem
    data = tuple(torch.cat(part) for part in zip(*batches, strict=True))
    study = bias_by_batch_size(model, loss, data, batch_sizes=(4, 8), k=2, l2=0.1)
    figure = plots.plot_batch_sizes(study)
    assert [axis.get_title() for axis in figure.axes] == ["batch size 4", "batch size 8"]
    assert_shown(study.results[1].same("curvatures")[0], figure.axes[1])


def test_a_series_shows_medians(problem):  # noqa: F811
    model, loss, batches = problem
    data = tuple(torch.cat(part) for part in zip(*batches, strict=True))
    states = {epoch: model.state_dict() for epoch in (1, 10)}
    series = bias_over_training(model, states, loss, data, batch_size=8, k=2, draws=2, l2=0.1)
    figure = plots.plot_series(series, kinds=("curvatures",))
    assert_shown(series.percentiles("curvatures")[..., 1], figure.axes[0])
    assert figure.axes[0].get_xscale() == figure.axes[0].get_yscale() == "log"


def test_the_report_shows_both_estimates(problem):  # noqa: F811
    model, loss, batches = problem
    data = tuple(torch.cat(part) for part in zip(*batches, strict=True))
    report = curvature_bias_report(model, loss, data, batch_sizes=(4, 8), k=2, l2=0.1)
    (axis,) = plots.plot_report(report).axes
    for estimate in ("same", "other"):
        assert_shown(report.overestimation(estimate), axis)
        assert_shown(report.overestimation(estimate, top=1), axis)
