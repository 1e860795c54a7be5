"""Class weights, label smoothing and one noise per output, against plain formulations."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from laplace_debias import Laplace, evaluate, linearized_predictive, sweep_prior_precision
from laplace_debias.kfac.engine import Engine
from laplace_debias.network.objective import Objective, objective_of

NOISE = torch.tensor([0.5, 2.0]).double()


def network(C, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, C)).double()


def data(C, likelihood, n=20):
    torch.manual_seed(1)
    x = torch.randn(n, 3).double()
    y = torch.randint(C, (n,)) if likelihood == "classification" else torch.randn(n, C).double()
    return x, y


def fitted(model, likelihood, x, y, debias=True, subset="all", **options):
    la = Laplace(model, likelihood, subset, "kron", debias=debias, **options)
    if debias == "crossfit":
        la.fit([(x[:10], y[:10]), (x[10:], y[10:])], n_data=100)
    else:
        la.fit((x[:10], y[:10]), curvature_loader=(x[10:], y[10:]), n_data=100)
    return la


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_losses_and_hessians_are_those_of_cross_entropy(soft, weighted, smoothing):
    x, y = data(3, "classification", 6)
    y = torch.rand(6, 3).double().softmax(-1) if soft else y
    w = torch.tensor([0.1, 1.0, 0.7], dtype=torch.float64) if weighted else None
    model = network(3)
    engine = Engine(
        model, "classification", objective=objective_of("classification", w, smoothing, None)
    )
    factors = engine.factors(x, y)
    loss = nn.CrossEntropyLoss(
        None if w is None else w.double(), reduction="sum", label_smoothing=smoothing
    )
    f = model(x).detach()
    torch.testing.assert_close(factors.loss, loss(f, y), rtol=1e-12, atol=0.0)
    H = sum(
        torch.autograd.functional.hessian(lambda o, i=i: loss(o[None], y[i : i + 1]), f[i])
        for i in range(6)
    )
    torch.testing.assert_close(factors.B[3], H, rtol=1e-11, atol=1e-13)
    if smoothing and w is None:  # smoothing alone changes no curvature
        torch.testing.assert_close(factors.B[3], Engine(model, "classification").factors(x, y).B[3])


@pytest.mark.parametrize("debias", [True, "crossfit"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_one_noise_per_output_is_a_regression_of_whitened_outputs(subset, debias):
    class White(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x) / NOISE

    model, (x, y) = network(2), data(2, "regression")
    la = fitted(model, "regression", x, y, debias, subset, sigma_noise=NOISE)
    assert float(la.sigma_noise) == 1.0
    torch.testing.assert_close(la.observation_noise.double(), NOISE)
    if subset == "last_layer":  # B of the last layer is N / sigma^2 on its diagonal
        lam = la.H.eigenvalues[1][0].sort().values
        torch.testing.assert_close(lam, (100 / NOISE.square()).sort().values)
        return
    white = fitted(White(model), "regression", x, y / NOISE, debias)
    ours, theirs = (linearized_predictive(each, x).covariance for each in (la, white))
    torch.testing.assert_close(ours, theirs * NOISE * NOISE[:, None])
    shift = 100 * float(NOISE.log().sum())
    for factor in (1.0, 1.7):  # what stays tunable
        la.sigma_noise = white.sigma_noise = factor
        difference = white.log_marginal_likelihood() - la.log_marginal_likelihood()
        assert float(difference) == pytest.approx(shift)
        torch.testing.assert_close(la.observation_noise.double(), factor * NOISE)
    report, other = evaluate(la, [(x, y)]), evaluate(white, [(x, y / NOISE)])
    assert report.nll == pytest.approx(other.nll + float(NOISE.log().sum()))
    sweep = sweep_prior_precision(la, [(x, y)], [1.0], metrics=["nll"])
    assert sweep.values["nll"][0] == pytest.approx(report.nll)


def test_equal_noises_are_one_noise():
    model, (x, y) = network(2), data(2, "regression")
    la = fitted(model, "regression", x, y, sigma_noise=[0.3, 0.3])
    one = fitted(model, "regression", x, y, sigma_noise=0.3)
    for ours, theirs in zip(la(x), one(x), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(la.log_marginal_likelihood(), one.log_marginal_likelihood())


def test_the_empirical_fisher_of_a_noise_per_output():
    model, (x, y) = network(2), data(2, "regression", 6)
    objective = Objective(output_noise=NOISE)
    B = Engine(model, "regression", "empirical", objective=objective).factors(x, y).B[3]
    r = (model(x).detach() - y) / NOISE.square()
    torch.testing.assert_close(B, 2 * r.T @ r)


def test_a_state_keeps_the_noise_of_each_output():
    model, (x, y) = network(2), data(2, "regression")
    la = fitted(model, "regression", x, y, sigma_noise=NOISE)
    twin = Laplace(model, "regression", "all", "kron", debias=True, sigma_noise=NOISE)
    twin.load_state_dict(la.state_dict())
    torch.testing.assert_close(twin(x)[1], la(x)[1])
    other = Laplace(model, "regression", "all", "kron", debias=True)
    with pytest.raises(ValueError, match="noise None of each output.*Remedy"):
        other.load_state_dict(la.state_dict())


@pytest.mark.parametrize(
    ("likelihood", "options", "message"),
    [
        ("regression", {"class_weights": [1.0, 2.0]}, "'classification' only"),
        ("classification", {"label_smoothing": 1.0}, r"label_smoothing` in \[0, 1\)"),
        ("classification", {"class_weights": [1.0, -1.0]}, "positive, finite"),
        ("classification", {"class_weights": [1.0, 2.0, 3.0]}, "2 numbers in `class_weights`"),
        ("regression", {"sigma_noise": torch.ones(3)}, "2 numbers in `sigma_noise`"),
        ("classification", {"sigma_noise": torch.ones(2)}, "'regression' only"),
        ("classification", {"class_weights": [1.0, 2.0], "debias": "crossfit"}, "crossfit"),
    ],
)
def test_what_does_not_fit_is_refused(likelihood, options, message):
    x, y = data(2, likelihood)
    with pytest.raises(ValueError, match=message):
        fitted(network(2), likelihood, x, y, **options)


def test_smoothed_targets_sum_to_one():
    t, weight = Objective(label_smoothing=0.3).targets(torch.tensor([1]), 3)
    assert weight is None and float(t.sum()) == pytest.approx(1.0)
    expected = F.one_hot(torch.tensor([1]), 3) * 0.7 + 0.1
    torch.testing.assert_close(t, expected)
    assert math.isclose(float(t[0, 1]), 0.8, rel_tol=1e-6)
