"""The way that a posterior names is the one taken, wherever predictions are made."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import (
    CustomMethod,
    Laplace,
    compare,
    evaluate,
    sweep_prior_precision,
    uncertainty,
)
from laplace_debias.predictive.predictor import SharedPredictor, StructuredPredictor

C = 6
METHODS = ["exact", "top", "samples"]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def problem():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C))
    return net, (torch.randn(40, 4), torch.arange(40) % C)


def fitted(method, **options):
    net, (X, y) = problem()
    la = Laplace(net, "classification", "all", "kron", debias="single", **options)
    la.fit((X, y), n_data=40)
    la.predictive_method = method
    return la, (X, y)


@pytest.fixture
def taken(monkeypatch):
    """The ways that were taken."""
    ways = set()

    def noted(made, way):
        def call(*args, **options):
            ways.add(way)
            return made(*args, **options)

        return call

    for cls, name, way in [
        (StructuredPredictor, "__call__", "exact"),
        (SharedPredictor, "__call__", "exact"),
        (StructuredPredictor, "top", "top"),
        (StructuredPredictor, "sampled", "samples"),
        (StructuredPredictor, "samples", "samples"),
    ]:
        monkeypatch.setattr(cls, name, noted(getattr(cls, name), way))
    return ways


CALLS = {
    "la(x)": lambda la, data: la(data[0]),
    "log_probabilities": lambda la, data: la.log_probabilities(data[0]),
    "sweep": lambda la, data: sweep_prior_precision(la, data, [0.1, 1.0, 10.0, 100.0]),
    "gridsearch": lambda la, data: la.optimize_prior_precision(
        pred_type="glm", method="gridsearch", val_loader=[data], grid_size=4
    ),
    "evaluate": lambda la, data: evaluate(la, data),
    "tune": lambda la, data: la.tune(data, layerwise=False),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CALLS)
def test_every_call_takes_the_posterior_s_way(name, method, taken):
    la, data = fitted(method)
    CALLS[name](la, data)
    assert taken == {method}


@pytest.mark.parametrize("method", ["exact", "samples"])  # covariances: there is no top
def test_uncertainty_takes_the_posterior_s_way(method, taken):
    la, data = fitted(method)
    uncertainty(la, data, n_samples=10)
    assert taken == {method}


@pytest.mark.parametrize("method", METHODS)
def test_a_comparison_takes_the_way_of_its_posteriors(method, taken):
    net, (X, y) = problem()
    loader = DataLoader(TensorDataset(X, y), 8)

    def fit(budget, draw):
        la = Laplace(net, "classification", "all", "kron", debias="single")
        la.fit((X[:budget], y[:budget]), n_data=40)
        la.predictive_method = method
        return la

    compare(
        net, loader, [(X, y)], methods=[CustomMethod("own", fit)], budgets=[8], n_draws=1,
        prior_precisions=[1.0, 10.0],
    )  # fmt: skip
    assert taken == {method}


def test_auto_is_the_default_of_a_comparison_and_answers_for_many_classes(taken):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 300))
    data = TensorDataset(torch.randn(16, 4), torch.randint(300, (16,)))
    compare(net, DataLoader(data, 8), DataLoader(data, 8), methods=["single"], budgets=[8],
            n_draws=1, prior_precisions=[1.0, 10.0])  # fmt: skip
    assert taken == {"top"}
