"""A tuned posterior: everything that predicts divides its logits by the temperature."""

from __future__ import annotations

import pytest
import torch

from laplace_debias import Laplace, evaluate, sweep_prior_precision
from tests.evaluation.test_tuning import TS, debiased, slow
from tests.fitted_predictive import double_precision  # noqa: F401

pytestmark = [
    pytest.mark.usefixtures("double_precision"),
    pytest.mark.filterwarnings("ignore:The best 'nll' lies"),
]


def test_the_method_takes_what_was_found_and_everything_honours_it():
    la, batch = debiased()
    result = la.tune(batch, prior_precisions=[0.5, 2.0, 8.0], logit_temperatures=TS)
    assert torch.allclose(la.prior_precision.double(), result.prior_precision.double())
    assert la.logit_temperature == result.logit_temperature
    la.logit_temperature, la.prior_precision = 2.0, 0.5
    X, y = batch
    expected = slow(la, [batch], 0.5, 2.0)
    assert float(-la(X).log()[range(len(y)), y].mean()) == pytest.approx(expected, rel=1e-10)
    assert float(-la.log_probabilities(X)[range(len(y)), y].mean()) == pytest.approx(expected)
    assert evaluate(la, batch).nll == pytest.approx(expected, rel=1e-10)
    assert sweep_prior_precision(la, batch, [0.5]).values["nll"] == pytest.approx([expected])


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_samples_are_divided_too(pred_type):
    la, (X, _) = debiased()

    def draws(function):
        return function(X, pred_type, 7, generator=torch.Generator().manual_seed(1))

    la.logit_temperature = 3.0
    outputs = draws(la.functional_samples)
    assert torch.allclose(draws(la.predictive_samples), torch.softmax(outputs / 3.0, -1))
    options = {"pred_type": pred_type, "link_approx": "mc", "n_samples": 7}
    la.predictive_method = "samples"
    seeded = [torch.Generator().manual_seed(2) for _ in range(2)]
    if pred_type == "nn":
        outputs = la.network_samples(X, 7, seeded[0])
    else:
        outputs = la.predictor().samples(X, 7, seeded[0])[1].squeeze(0)
    expected = torch.softmax(outputs / 3.0, -1).mean(0)
    assert torch.allclose(la(X, generator=seeded[1], **options), expected)


def test_the_temperature_survives_saving():
    la, batch = debiased()
    la.logit_temperature = 2.5
    state = la.state_dict()
    other = Laplace(la.model, "classification", "all", "kron", debias="single")
    other.load_state_dict(state)
    assert other.logit_temperature == 2.5
    assert torch.equal(other(batch[0]), la(batch[0]))
    older = {k: v for k, v in state.items() if k != "logit_temperature"} | {"format": 2}
    other.load_state_dict(older)
    assert other.logit_temperature == 1.0


@pytest.mark.parametrize("T", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_none_is_refused(T):
    la, batch = debiased()
    with pytest.raises(ValueError, match="positive, finite `logit_temperature`"):
        la.logit_temperature = T
    with pytest.raises(ValueError, match="positive, finite `logit_temperature`"):
        la.tune(batch, logit_temperatures=[T])
    assert la.logit_temperature == 1.0
