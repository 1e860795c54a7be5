"""The class body: options of the curvature, costs, kept predictors, what a fit leaves behind."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from laplace_debias import HookEF, Laplace, evaluate, sweep_prior_precision
from laplace_debias.kfac.engine import kfac_factors
from laplace_debias.predictive.predictor import StructuredPredictor
from tests import cases
from tests.evaluation.test_tuning import TS, debiased, slow
from tests.fitted_predictive import double_precision  # noqa: F401


def fitted(case=cases.MLP, debias="single", model=None, **kwargs):
    """A posterior of 30 data, its model and the data."""
    model = case.model() if model is None else model
    la = Laplace(model, case.likelihood, "all", "kron", debias=debias, **kwargs)
    X, y = case.data(30)
    if debias == "single":
        la.fit((X, y), n_data=100)
    else:
        la.fit((X[:15], y[:15]), curvature_loader=(X[15:], y[15:]), n_data=100)
    return la, model, X, y


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce", "backpack"])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_the_posterior_has_the_chosen_factors(kfac_approx, fisher):
    la, model, X, y = fitted(cases.CNN, kfac_approx=kfac_approx, fisher=fisher)
    factors = kfac_factors(
        model, X, y, likelihood="classification", kfac_approx=kfac_approx, fisher=fisher
    )
    for block, expected in zip(la.H_facs.kfacs, factors.scaled_to(100), strict=True):
        for got, wanted in zip(block, expected, strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("sampler", ["trace", "label"])
def test_sampled_curvature_follows_its_generator_and_takes_one_pass(sampler):
    runs = [
        fitted(
            debias=True,
            fisher="mc",
            sampler=sampler,
            generator=torch.Generator().manual_seed(seed),
        )[0]
        for seed in (0, 0, 1)
    ]
    assert torch.equal(runs[0].H.to_matrix(), runs[1].H.to_matrix())
    assert not torch.equal(runs[0].H.to_matrix(), runs[2].H.to_matrix())
    assert (runs[0].fit_cost.forward, runs[0].fit_cost.backward) == (30, 30)


@pytest.mark.parametrize(
    ("debias", "options", "passes"),
    [
        ("single", {}, (30, 90)),
        (True, {}, (30, 90)),
        (True, {"backend": HookEF}, (30, 30)),
        ("single", {"fisher": "mc"}, (30, 30)),
    ],
)
def test_every_fit_tells_its_cost(debias, options, passes):
    """Four classes: three vectors per datum are exact."""
    la = fitted(debias=debias, **options)[0]
    assert (la.fit_cost.forward, la.fit_cost.backward) == passes
    assert set(la.fit_cost.seconds) == {"verification", "passes", "decompositions"}
    assert all(seconds > 0 for seconds in la.fit_cost.seconds.values())


def test_options_say_what_they_expect():
    from laplace.curvature import AsdlGGN

    net = cases.MLP.model()
    for options, message in (
        ({"kfac_approx": "sum"}, "`kfac_approx`.*'sum'.*Remedy"),
        ({"fisher": "ggn"}, "`fisher`.*'ggn'.*Remedy"),
        ({"sampler": "softmax"}, "`sampler`.*'softmax'.*Remedy"),
        ({"fisher": "mc", "backend": AsdlGGN}, "AsdlGGN.*Remedy"),
        ({"backend_kwargs": {"stochastic": True}}, "stochastic.*Remedy: fisher='mc'"),
    ):
        with pytest.raises(ValueError, match=message):
            Laplace(net, "classification", "all", "kron", debias=True, **options)


class Counting(nn.Module):
    """Counts the data that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.n_seen = nn.Linear(3, 4), 0

    def forward(self, batch):
        """Map ``{"x": [n, 3]}`` to ``[n, 4]``."""
        self.n_seen += len(batch["x"])
        return self.body(batch["x"])


@pytest.mark.parametrize("debias", ["single", True, "crossfit"])
def test_mappings_pass_once_and_the_models_own_counter_stays(debias):
    model = Counting()
    batches = [{"x": torch.randn(8, 3), "y": torch.arange(8) % 4} for _ in range(2)]
    options = {"dict_key_x": "x", "dict_key_y": "y", "verify": False}
    la = Laplace(model, "classification", "all", "kron", debias=debias, **options)
    la.fit(batches, n_data=100)
    assert model.n_seen == 16 == la.fit_cost.forward


@pytest.mark.parametrize("debias", ["single", True])
def test_fits_add_up_in_single_precision(debias):
    """Two fits with override=False are one fit of all data, in float32 as in float64."""
    X, y = cases.MLP.data(60)
    X = X.float()
    both = Laplace(cases.MLP.model().float(), "classification", "all", "kron", debias=debias)
    whole = Laplace(cases.MLP.model().float(), "classification", "all", "kron", debias=debias)

    def fit(la, rows, n_data, **kwargs):
        half = slice(rows.start, (rows.start + rows.stop) // 2)
        other = slice(half.stop, rows.stop)
        if debias == "single":
            la.fit((X[rows], y[rows]), n_data=n_data, **kwargs)
        else:
            second = (X[other], y[other])
            la.fit((X[half], y[half]), curvature_loader=second, n_data=n_data, **kwargs)

    fit(both, slice(0, 30), 50, override=False)
    fit(both, slice(30, 60), 50, override=False)
    if debias == "single":
        fit(whole, slice(0, 60), 100)
        torch.testing.assert_close(both.H.to_matrix(), whole.H.to_matrix(), rtol=1e-3, atol=1e-3)
    assert both.n_data == 100 and both.H.eigenvectors[0][0].dtype == torch.float32


# What a kept predictor must notice.
def changes():
    """Ways to change a posterior or its model, by name."""
    X, y = cases.MLP.data(30, seed=5)

    def in_place(la, model):
        la.prior_precision.mul_(3.0)

    def data_edit(la, model):
        model[0].weight.data.mul_(1.5)

    def replaced(la, model):
        model[2].weight.data = model[2].weight.data * 0.5

    def loaded(la, model):
        model.load_state_dict({k: 0.7 * v for k, v in model.state_dict().items()})

    return {
        "fit": lambda la, model: la.fit((X, y), n_data=100),
        "prior": lambda la, model: setattr(la, "prior_precision", 7.0),
        "prior in place": in_place,
        "temperature": lambda la, model: setattr(la, "temperature", 0.5),
        "p.data edited": data_edit,
        "p.data replaced": replaced,
        "load_state_dict": loaded,
        "state_dict of a posterior": lambda la, model: la.load_state_dict(
            fitted(prior_precision=5.0)[0].state_dict()
        ),
    }


@pytest.mark.parametrize("name", changes())
@pytest.mark.filterwarnings("ignore:The model's weights differ")
def test_kept_predictors_notice_changes(name):
    la, model, X, _ = fitted()
    before = la(X)
    assert la.predictor() is la.predictor()
    changes()[name](la, model)
    got = la(X)
    fresh = StructuredPredictor(la)(X, True)
    expected = torch.softmax(fresh.mean / torch.sqrt(1 + torch.pi / 8 * fresh.covariance), dim=-1)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(got, before)


def test_kept_predictors_follow_the_models_type():
    la, model, X, _ = fitted()
    la(X)
    model.float()
    assert la(X.float()).dtype == torch.float32


def test_copies_and_pickles_drop_the_kept_predictor():
    la, _, X, _ = fitted()
    expected = la(X)
    for other in (copy.deepcopy(la), pickle.loads(pickle.dumps(la))):
        assert "_kept" not in vars(other)
        torch.testing.assert_close(other(X), expected)
        other.prior_precision = 100.0
        assert not torch.allclose(other(X), expected)
    torch.testing.assert_close(la(X), expected)


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
