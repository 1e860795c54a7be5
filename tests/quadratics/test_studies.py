"""Studies that keep what is finished: for one model, one loss and one set of data only."""

import pytest

from laplace_debias.quadratics import (
    bias_by_batch_size,
    bias_by_model_size,
    bias_over_training,
    curvature_bias_report,
    directional_bias,
    overlap_study,
    partition,
)
from tests.quadratics.test_bias import equal_results
from tests.quadratics.test_quadratic import make_classifier


def by_direction(model, loss, X, y, **kept):
    return directional_bias(model, loss, partition((X, y), 8), k=2, chosen=(0,), **kept)


def by_overlap(model, loss, X, y, **kept):
    return overlap_study(model, loss, partition((X, y), 8), k=2, **kept)


def by_batch_size(model, loss, X, y, **kept):
    return bias_by_batch_size(model, loss, (X, y), batch_sizes=(8,), k=2, **kept)


def over_training(model, loss, X, y, **kept):
    states, sizes = {1: model.state_dict()}, dict(batch_size=8, k=2, draws=2)
    return bias_over_training(model, states, loss, (X, y), **sizes, **kept)


def by_model_size(model, loss, X, y, **kept):
    sizes = dict(batch_size=8, k=2, draws=2)
    return bias_by_model_size({"a": model}, loss, (X, y), **sizes, **kept)


def report(model, loss, X, y, **kept):
    return curvature_bias_report(model, loss, (X, y), batch_sizes=(8,), k=2, draws=2, **kept)


STUDIES = (by_direction, by_overlap, by_batch_size, over_training, by_model_size, report)


@pytest.mark.parametrize("study", STUDIES)
def test_studies_refuse_another_loss_other_parameters_and_other_data(study, tmp_path):
    model, loss, X, y = make_classifier()
    before = study(model, loss, X, y, folder=tmp_path)
    equal_results(study(model, loss, X, y, folder=tmp_path), before)
    smoothed = type(loss)(label_smoothing=0.1)
    with pytest.raises(ValueError, match="loss: "):
        study(model, smoothed, X, y, folder=tmp_path)
    last = y.clone()
    last[-1] = (last[-1] + 1) % (int(y.max()) + 1)
    with pytest.raises(ValueError, match="data.data: .*`data_id=`"):
        study(model, loss, X, last, folder=tmp_path)
    model[0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match="model"):
        study(model, loss, X, y, folder=tmp_path)


@pytest.mark.parametrize("study", STUDIES)
def test_a_name_can_stand_for_the_data_of_a_study(study, tmp_path):
    model, loss, X, y = make_classifier()
    before = study(model, loss, X, y, folder=tmp_path, data_id="noisy")
    again = study(model, loss, X + 1e-3, y, folder=tmp_path, data_id="noisy")
    equal_results(again, before)  # from the folder
    with pytest.raises(ValueError, match="data.id: 'noisy.*' there, 'other.*' now"):
        study(model, loss, X, y, folder=tmp_path, data_id="other")


def test_a_name_stands_for_one_shuffle(tmp_path):
    model, loss, X, y = make_classifier()
    options = dict(batch_sizes=(8,), k=2, folder=tmp_path, data_id="noisy")
    bias_by_batch_size(model, loss, (X, y), **options)
    with pytest.raises(ValueError, match="seed 0' there, .*seed 1' now"):
        bias_by_batch_size(model, loss, (X, y), seed=1, **options)
    with pytest.raises(ValueError, match="options.n_batches"):
        bias_by_batch_size(model, loss, (X, y), max_batches=2, **options)
