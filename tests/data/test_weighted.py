"""Sample weights: fits against explicit sums, in every form of mini-batch, refused elsewhere."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, evaluate
from laplace_debias.data.weighted import WeightedTargets, apart, check_unweighted, weighted
from tests import oracles
from tests.oracles_kfac import oracle

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
