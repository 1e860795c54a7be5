"""Targets of a classification: indices of any integer type, soft labels, and what is refused."""

from __future__ import annotations

import pytest
import torch
from laplace.curvature import AsdlGGN, BackPackGGN, CurvlinopsGGN
from torch import nn

from laplace_debias import Laplace, evaluate, sweep_prior_precision
from laplace_debias.data.reading import MissingKeyError
from laplace_debias.data.targets import check_targets
from laplace_debias.evaluation.metrics import ECE, NLL, Accuracy, Brier
from laplace_debias.kfac import kfac_factors
from tests import cases

X, INDICES = cases.MLP.data(12, 3)
ONE_HOT = nn.functional.one_hot(INDICES, 4).double()


def fitted(y: torch.Tensor, **options):
    la = Laplace(cases.MLP.model(), "classification", "all", "kron", debias="single", **options)
    la.fit((X, y), n_data=12)
    return la


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("backend", [None, CurvlinopsGGN, AsdlGGN])
def test_labels_of_other_integer_types(dtype, backend):
    expected, la = fitted(INDICES, backend=backend), fitted(INDICES.to(dtype), backend=backend)
    assert torch.equal(la(X), expected(X))
    assert torch.equal(la.log_marginal_likelihood(), expected.log_marginal_likelihood())
    assert evaluate(la, (X, INDICES.to(dtype))) == evaluate(expected, (X, INDICES))


def test_boolean_labels():
    net, y = cases.seeded(lambda: nn.Linear(3, 2)).double(), INDICES > 1
    losses = []
    for labels in (y, y.long()):
        la = Laplace(net, "classification", "all", "kron", debias="single", fisher="empirical")
        la.fit((X, labels), n_data=12)
        losses.append((la(X), la.log_marginal_likelihood()))
    assert torch.equal(losses[0][0], losses[1][0]) and torch.equal(losses[0][1], losses[1][1])
    one, two = (
        kfac_factors(net, X, labels, likelihood="classification") for labels in (y, y.int())
    )
    assert torch.equal(one.loss, two.loss)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_one_hot_probabilities_are_the_indices(fisher):
    hard, soft = fitted(INDICES, fisher=fisher), fitted(ONE_HOT.float(), fisher=fisher)
    torch.testing.assert_close(soft(X), hard(X), rtol=1e-12, atol=0)
    torch.testing.assert_close(soft.loss, hard.loss, rtol=1e-12, atol=0)
    grid = [0.1, 1.0]
    metrics = ("nll", "accuracy", "ece", "brier")
    expected = sweep_prior_precision(hard, (X, INDICES), grid, metrics=metrics).values
    values = sweep_prior_precision(soft, (X, ONE_HOT), grid, metrics=metrics).values
    for name in metrics:
        assert values[name] == pytest.approx(expected[name], rel=1e-12)
    report, wanted = evaluate(soft, (X, ONE_HOT)), evaluate(hard, (X, INDICES))
    assert (report.nll, report.brier) == pytest.approx((wanted.nll, wanted.brier), rel=1e-12)
    assert report.accuracy == wanted.accuracy


def test_soft_labels_against_the_definition():
    y = torch.rand(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = y / y.sum(-1, keepdim=True)
    model = cases.MLP.model()
    log_p = model(X).detach().log_softmax(-1)
    la = fitted(y)
    torch.testing.assert_close(la.loss, -(y * log_p).sum(), rtol=1e-12, atol=0)
    assert torch.equal(la(X), fitted(INDICES)(X)), "the GGN does not depend on the labels"
    la.optimize_prior_precision(
        method="gridsearch", val_loader=[(X, y)], grid_size=3, log_prior_prec_min=-1
    )
    factors = kfac_factors(model, X, y, likelihood="classification", fisher="empirical")
    g = log_p.exp() - y
    torch.testing.assert_close(factors.B[-1], g.T @ g, rtol=1e-10, atol=0)
    for metric, expected in (
        (NLL(), -(y * log_p).sum(-1).mean()),
        (Brier(), (log_p.exp() - y).square().sum(-1).mean()),
        (Accuracy(), (log_p.argmax(-1) == y.argmax(-1)).double().mean()),
    ):
        metric.update(log_p, y)
        torch.testing.assert_close(metric.compute(), expected, rtol=1e-12, atol=0)
    one, two = ECE(), ECE()
    one.update(log_p, y)
    two.update(log_p, y.argmax(-1))
    assert one.compute() == two.compute()


def test_a_class_without_weight_may_be_impossible():
    metric = NLL()
    metric.update(torch.tensor([[0.0, -torch.inf]]), torch.tensor([[1.0, 0.0]]))
    assert metric.compute() == 0


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (2 * ONE_HOT, "sum off by 1"),
        (ONE_HOT - 0.5, "smallest entry of -0.5"),
        (ONE_HOT * torch.nan, "Expected class probabilities"),
        (ONE_HOT[:, :3], "Expected class indices of an integer dtype"),
        (ONE_HOT.long(), r"one-hot integers pass `y\.argmax\(-1\)`"),
        (INDICES.double(), r"indices as floats `y\.long\(\)`"),
    ],
)
def test_other_targets_are_refused(y, message):
    with pytest.raises(ValueError, match=message):
        fitted(y)


@pytest.mark.parametrize("y", [torch.ones(5, 1), torch.zeros(5, 1).long(), torch.zeros(5).long()])
def test_a_single_logit_is_refused_with_the_right_remedy(y):
    with pytest.raises(ValueError, match=r"got one output\. Remedy: .*'bernoulli'") as caught:
        check_targets(y, torch.Size([5, 1]), "classification")
    assert "argmax" not in str(caught.value)


def test_bernoulli_targets_have_the_outputs_shape_and_lie_between_zero_and_one():
    for y in (torch.ones(5, 1), torch.zeros(5, 1).long(), torch.rand(5, 1)):
        check_targets(y, torch.Size([5, 1]), "bernoulli")
    for y, message in (
        (torch.ones(5), "unsqueeze"),
        (2 * torch.ones(5, 1), r"in \[0, 1\], got"),
        (torch.full((5, 1), float("nan")), r"in \[0, 1\], got"),
    ):
        with pytest.raises(ValueError, match=message):
            check_targets(y, torch.Size([5, 1]), "bernoulli")


def test_a_missing_key_is_a_key_error_and_a_value_error():
    la = Laplace(cases.Dict().double(), "classification", "all", "kron", debias="single")
    for kind in (KeyError, ValueError, MissingKeyError):
        with pytest.raises(kind) as caught:
            la.fit({"x": X, "targets": INDICES}, n_data=12)
        assert str(caught.value).startswith("Expected the targets under the key 'labels'")


def test_backpack_refuses_mappings():
    la = Laplace(
        cases.Dict().double(), "classification", "all", "kron", debias="single", backend=BackPackGGN
    )
    with pytest.raises(ValueError, match="BackPackGGN, .*got a mapping. Remedy: leave `backend`"):
        la.fit({"x": X, "labels": INDICES}, n_data=12)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("value", ["x", None, object()])
def test_a_prior_precision_that_is_no_number(subset, value):
    with pytest.raises(ValueError, match="Expected a prior precision as a number or a tensor"):
        Laplace(
            cases.MLP.model(), "classification", subset, "kron", debias=True, prior_precision=value
        )
