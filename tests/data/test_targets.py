"""Targets of a classification: indices of any integer type, soft labels, and what is refused."""

from __future__ import annotations

import pytest
import torch
from laplace.curvature import AsdlGGN, BackPackGGN, CurvlinopsGGN
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, evaluate, sweep_prior_precision
from laplace_debias.data.reading import MissingKeyError
from laplace_debias.data.targets import (
    WeightedTargets,
    apart,
    check_targets,
    check_unweighted,
    weighted,
)
from laplace_debias.evaluation.metrics import ECE, NLL, Accuracy, Brier
from laplace_debias.kfac import kfac_factors
from tests import cases, oracles
from tests.oracles_kfac import oracle

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


N = 60
PRECISE = {"rtol": 1e-10, "atol": 1e-10}
LOSSES = {
    "classification": lambda f, y: F.cross_entropy(f, y, reduction="none"),
    "regression": lambda f, y: 0.5 * (f - y).square().sum(1),
    "bernoulli": lambda f, y: F.binary_cross_entropy_with_logits(f, y, reduction="none").sum(1),
}


def case(likelihood):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    X, w = torch.randn(12, 3).double(), torch.rand(12).double() * 3
    w[2] = 0.0
    y = torch.randint(3, (12,)) if likelihood == "classification" else torch.rand(12, 3).double()
    return net, X, y, w


def dense(net, X, y, w, likelihood):
    """Blocks with each datum's Hessian times its weight; Bernoulli's Hessian is diagonal."""
    if likelihood != "bernoulli":
        blocks = oracle(net, X, y, likelihood, w)
    else:
        blocks = []
        for layer, A in ((net[0], X), (net[2], torch.tanh(net[0](X)).detach())):
            B = 0.0
            for x, w_n in zip(X, w, strict=True):
                s = net[0](x) if layer is net[0] else net[2](torch.tanh(net[0](x)))
                head = (lambda s: net[2](torch.tanh(s))) if layer is net[0] else (lambda s: s)
                J = torch.autograd.functional.jacobian(head, s.detach())
                p = torch.sigmoid(net(x)).detach()
                B = B + w_n * J.T @ torch.diag(p * (1 - p)) @ J
            blocks += [(B, A.T @ A / len(A)), (B,)]
    return {str(i): [M.detach().contiguous() for M in block] for i, block in enumerate(blocks)}


@pytest.mark.parametrize("likelihood", LOSSES)
@pytest.mark.parametrize("debias", ["single", True])
def test_curvature_and_loss_are_weighted_sums(likelihood, debias):
    net, X, y, w = case(likelihood)
    la = Laplace(net, likelihood, "all", "kron", debias=debias)
    halves = [slice(0, 6), slice(6, 12)]
    la.fit([(X[at], y[at], w[at]) for at in halves], n_data=N)
    if debias == "single":
        expected = oracles.dense(dense(net, X, y, w, likelihood), N / 12)
    else:
        one, two = (dense(net, X[at], y[at], w[at], likelihood) for at in halves)
        expected = oracles.debiased(one, two, N / 6)
    torch.testing.assert_close(la.H.to_matrix(), expected, **PRECISE)
    loss = (w * LOSSES[likelihood](net(X), y)).sum().detach() * N / 12
    torch.testing.assert_close(la.loss, loss, **PRECISE)
    plain = Laplace(net, likelihood, "all", "kron", debias=debias)
    plain.fit([(X[at], y[at]) for at in halves], n_data=N)
    assert not torch.allclose(plain.H.to_matrix(), expected, rtol=0.05)  # weights do matter


class Net(nn.Module):
    """Takes a mapping."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        """Outputs."""
        return self.net(x["input_ids"])


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_every_form_of_mini_batch_gives_the_same(subset):
    net, X, y, w = case("classification")
    found = []
    for loader in (
        (X, y, w),
        DataLoader(TensorDataset(X, y, w), batch_size=4),
        [[X[:5], y[:5], w[:5]], (X[5:], y[5:], w[5:].float().double())],
    ):
        la = Laplace(net, "classification", subset, "kron", debias="single")
        la.fit(loader, n_data=N)
        found.append(la.H.to_matrix())
    for key in ("sample_weight", "w"):
        la = Laplace(Net(net), "classification", subset, "kron", debias="single", dict_key_w=key)
        la.fit({"input_ids": X, "labels": y, key: w}, n_data=N)
        found.append(la.H.to_matrix())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_crossfit_and_whole_numbers_of_copies():
    """A weight of two is a datum that counts twice: folds of copies have the same curvature."""
    net, X, y, _ = case("classification")
    twice = torch.full((12,), 2.0)
    la = Laplace(net, "classification", "all", "kron", debias="crossfit", n_folds=2)
    la.fit([(X[:6], y[:6], twice[:6]), (X[6:], y[6:], twice[6:])], n_data=N)
    plain = Laplace(net, "classification", "all", "kron", debias="crossfit", n_folds=2)
    plain.fit([(X[:6], y[:6]), (X[6:], y[6:])], n_data=2 * N)
    torch.testing.assert_close(la.H.to_matrix(), plain.H.to_matrix())
    torch.testing.assert_close(la.loss, plain.loss)


@pytest.mark.parametrize(
    "options", [{"debias": "auto"}, {"debias": "crossfit", "sampling": "curvature"}]
)
def test_draws_by_curvature_refuse_weights_by_name(options):
    net, X, y, w = case("classification")
    la = Laplace(net, "classification", "all", "kron", **options)
    with pytest.raises(ValueError, match="without sample weights"):
        la.fit(DataLoader(TensorDataset(X, y, w), batch_size=4, shuffle=True))


def test_weights_that_are_none():
    y = torch.arange(3)
    for wrong in (torch.ones(2), torch.ones(3, 1), [1.0, 2.0, 3.0]):
        with pytest.raises(ValueError, match=r"shape \[3\], one for each datum"):
            weighted(y, wrong)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not negative"):
            weighted(y, torch.tensor([1.0, wrong, 1.0]))
    assert apart(y) == (y, None) and isinstance(weighted(y, torch.ones(3)), WeightedTargets)
    with pytest.raises(ValueError, match="Remedy: this"):
        check_unweighted(weighted(y, torch.ones(3)), "that", "this")
    net, X, y, w = case("classification")
    with pytest.raises(ValueError, match="are for fits"):
        evaluate(net, [(X, y, w)])
