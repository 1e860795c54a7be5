"""Many classes: cut over outputs, exact where the probability is, chosen by cost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace_debias import Laplace, sweep_prior_precision
from laplace_debias.predictive.linearized import linearized_predictive
from laplace_debias.predictive.output_gradients import (
    OutputGradients,
    grouped_moments,
    top_classes,
)
from laplace_debias.predictive.predictor import StructuredPredictor
from tests.cases_predictive import FALLBACK
from tests.fitted_predictive import (
    EXACT,
    build,
    double_precision,  # noqa: F401
    fitted_cnn,
)
from tests.oracles_predictive import dense_jacobian, dense_precision

pytestmark = pytest.mark.usefixtures("double_precision")


def many_classes(C=150, confident=True, scale=6):
    """A posterior over a network with many classes, and some inputs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, C))
    with torch.no_grad():
        net[2].weight *= scale if confident else 0.1
    la = Laplace(net, "classification", "all", "kron", debias="single", fisher="mc")
    la.fit((torch.randn(30, 4), torch.randint(C, (30,))), n_data=300)
    return la, torch.randn(5, 4)


@pytest.mark.parametrize("mode", ["variance", "covariance"])
@pytest.mark.parametrize("at_once", [1, 2, 4, 5])
def test_outputs_cut_into_parts_give_the_same(mode, at_once):
    la, x = many_classes(C=9)
    predictor = StructuredPredictor(la, [0.5, 5.0])
    predictor(x)  # looks at the model once
    layers, blocks = predictor._layers, [predictor.blocks, predictor.blocks]
    f, whole = layers.contract(x, mode, blocks)
    g, cut = layers.contract(x, mode, blocks, at_once)
    torch.testing.assert_close(f, g, **EXACT)
    for one, two in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, two, **EXACT)


@pytest.mark.parametrize("name", sorted(set(FALLBACK) - {"without gradients"}))
def test_parameters_without_rows_are_cut_as_well(name):
    la, x = build(FALLBACK[name]())
    whole = linearized_predictive(la, x, 0.5)
    tiny = linearized_predictive(la, x, 0.5, memory_budget=1)
    torch.testing.assert_close(whole.covariance, tiny.covariance, **EXACT)


def test_the_budget_bounds_the_gradients_of_one_datum():
    la, x = many_classes(C=120)
    held = []
    predictor = StructuredPredictor(la, memory_budget=9_000)
    reserve = predictor._layers._gradients._reserve

    def counted(shapes, like):
        held.append(sum(torch.Size(s).numel() for s in shapes) * like.element_size())
        return reserve(shapes, like)

    predictor._layers._gradients._reserve = counted
    got = predictor(x, diagonal_output=True)
    assert max(held) <= 9_000 < 120 * (6 + 120) * 8  # what all outputs of one datum would take
    exact = StructuredPredictor(la)(x, diagonal_output=True)
    torch.testing.assert_close(got.covariance, exact.covariance, **EXACT)


def test_the_classes_that_carry_the_probability():
    f = torch.tensor([[0.0, 5.0, 5.0, -20.0], [9.0, 0.0, 0.0, 0.0]])
    assert top_classes(f, 1e-4)[0].shape == (2, 4) and top_classes(f, 1e-2)[0].shape == (2, 2)
    assert top_classes(f, 1e-4, most=2)[0][:, 0].tolist()[1] == 0
    assert top_classes(torch.zeros(1, 30))[0].shape == (1, 20)  # at most, if nobody says more
    classes, needed = top_classes(f, 1e-2)
    p = (f.softmax(-1).gather(1, classes) * needed).sum(-1)
    assert bool((p >= 0.99).all()) and needed.tolist() == [[True, True], [True, False]]


def test_what_is_exact_for_a_datum_does_not_depend_on_its_company():
    la, x = many_classes(scale=40)
    _, needed = top_classes(la.model(x))
    assert len(set(needed.sum(-1).tolist())) > 1
    together = linearized_predictive(la, x, [0.5], method="top", diagonal_output=True)
    for i in range(len(x)):
        alone = linearized_predictive(la, x[i : i + 1], [0.5], method="top", diagonal_output=True)
        torch.testing.assert_close(together.covariance[:, i : i + 1], alone.covariance, **EXACT)


def test_data_are_cut_by_what_they_need_and_come_back_in_order(monkeypatch):
    la, _ = many_classes(scale=100)
    x = torch.randn(40, 4)
    needs = top_classes(la.model(x), least=5)[1].sum(-1)
    columns, call = [], OutputGradients.__call__

    def counted(self, capture, sources, classes, last=True):
        columns.append(tuple(classes.shape))
        return call(self, capture, sources, classes, last)

    monkeypatch.setattr(OutputGradients, "__call__", counted)
    together = linearized_predictive(la, x, [0.5], method="top", diagonal_output=True)
    fewest = int(needs.sort().values[:20].max())
    assert columns == [(20, fewest), (20, int(needs.max()))] and fewest < needs.max()
    torch.testing.assert_close(together.mean, la.model(x).detach(), **EXACT)
    for i in range(len(x)):
        alone = linearized_predictive(la, x[i : i + 1], [0.5], method="top", diagonal_output=True)
        torch.testing.assert_close(together.covariance[:, i : i + 1], alone.covariance, **EXACT)


def test_top_variances_are_exact_where_the_probability_is_and_too_small_elsewhere():
    la, x = many_classes()
    top = linearized_predictive(la, x, [0.5, 5.0], method="top", diagonal_output=True)
    assert top.method == "top"
    precision = [dense_precision(la, la.params, delta) for delta in (0.5, 5.0)]
    J = dense_jacobian(la.model, x, la.params)
    chosen = torch.zeros_like(top.mean, dtype=torch.bool).scatter_(1, *top_classes(la.model(x)))
    for P, got in zip(precision, top.covariance, strict=True):
        exact = torch.einsum("ncp,pq,ncq->nc", J, P.inverse(), J)
        torch.testing.assert_close(got[chosen], exact[chosen], **EXACT)
        assert bool((got[~chosen] <= exact[~chosen]).all())
        tail = J[:, :, -la.model[2].weight.numel() - la.model[2].bias.numel() :]
        last = P[-tail.shape[2] :, -tail.shape[2] :].inverse()  # blocks do not interact
        own = torch.einsum("ncp,pq,ncq->nc", tail, last, tail)
        torch.testing.assert_close(got[~chosen], own[~chosen], **EXACT)


def test_probabilities_by_the_top_way_are_those_of_the_exact_way():
    la, x = many_classes()
    la.predictive_method = "exact"
    exact = la(x)
    la.predictive_method = "top"
    close = la(x)
    assert (exact - close).abs().max() < 0.01 < exact.max()
    la.predictive_method = "auto"
    assert torch.equal(la(x), close)


def test_auto_is_exact_unless_that_is_dear():
    few, x = fitted_cnn()
    assert linearized_predictive(few, x, method="auto", n_samples=1).method == "exact"
    many, x = many_classes(C=600)
    auto = StructuredPredictor(many)
    with pytest.warns(UserWarning, match=r"600 outputs take method='top'.*'exact'"):
        assert auto.chosen_method(x, 100, True) == "top"
    assert auto.chosen_method(x, 100, False) == "samples"
    headless = nn.Sequential(*many.model, nn.Identity(), nn.Tanh())
    other = Laplace(headless, "classification", "all", "kron", debias="single", fisher="mc")
    other.fit((torch.randn(30, 4), torch.randint(600, (30,))), n_data=300)
    assert StructuredPredictor(other).chosen_method(x, 100, True) == "samples"
    with pytest.raises(ValueError, match=r"ends in an nn.Linear.*Remedy"):
        StructuredPredictor(other).top(x)
    with pytest.raises(ValueError, match=r"covariances.*Remedy"):
        auto.top(x, diagonal_output=False)


def test_the_sweep_takes_the_posterior_s_way():
    la, x = many_classes(C=300)
    y = torch.randint(300, (5,))
    auto = sweep_prior_precision(la, [(x, y)], [0.1, 1.0, 10.0])
    assert la.predictive_method == "auto"
    top = sweep_prior_precision(la, [(x, y)], [0.1, 1.0, 10.0], method="top")
    exact = sweep_prior_precision(la, [(x, y)], [0.1, 1.0, 10.0], method="exact")
    assert auto.values["nll"] == top.values["nll"] != exact.values["nll"]


def test_a_single_block_by_the_top_way():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 40, bias=False))
    la = Laplace(net, "classification", "all", "kron", debias="single")
    la.fit((torch.randn(30, 4), torch.arange(30) % 40), n_data=60)
    x = torch.randn(3, 4)
    top, exact = (
        linearized_predictive(la, x, 0.5, method=way, diagonal_output=True).covariance
        for way in ("top", "exact")
    )
    torch.testing.assert_close(top, exact, **EXACT)


def test_parts_by_layer_and_joint_covariances_are_never_cut():
    la, x = many_classes(C=9)
    whole, tiny = (StructuredPredictor(la, 0.5, memory_budget=b) for b in (10**9, 1))
    joint = tiny(x[:1], joint=True).covariance
    torch.testing.assert_close(joint, whole(x[:1], joint=True).covariance, **EXACT)
    for diagonal in (True, False):
        one, two = (p.apart(x, diagonal)[1] for p in (whole, tiny))
        torch.testing.assert_close(one, two, **EXACT)


@pytest.fixture
def contraction():
    """Covariances ``J J^T`` of chosen outputs, with a note of what was asked for."""
    J = torch.randn(2, 12, 7, generator=torch.Generator().manual_seed(0)).double()
    asked = []

    def moments(classes, last=True, mode="covariance"):
        asked.append((classes.shape[1], last))
        rows = J.gather(1, classes.unsqueeze(-1).expand(-1, -1, 7))
        if mode == "variance":
            return [rows.square().sum(-1, keepdim=True)]
        return [(rows @ rows.mT).unsqueeze(-1)]

    return J, moments, asked


@pytest.mark.parametrize("at_once", [None, 1, 2, 3, 4, 100])
def test_covariances_of_each_position(contraction, at_once):
    J, moments, asked = contraction
    classes = torch.arange(12).expand(2, 12)
    (found,) = grouped_moments(moments, classes, "covariance", 4, at_once)
    P = J.unflatten(1, (3, 4))
    torch.testing.assert_close(found.squeeze(-1), P @ P.mT)
    assert [last for _, last in asked] == [False] * (len(asked) - 1) + [True] or at_once in (
        1,
        2,
        3,
    )
    assert asked[-1][1] and max(m for m, _ in asked) <= max(2, min(4, at_once or 4))


@pytest.mark.parametrize("at_once", [None, 1, 5, 12])
def test_variances_of_all_outputs(contraction, at_once):
    J, moments, asked = contraction
    classes = torch.arange(12).expand(2, 12)

    def variances(classes, last=True):
        return moments(classes, last, "variance")

    (found,) = grouped_moments(variances, classes, "variance", 4, at_once)
    torch.testing.assert_close(found.squeeze(-1), J.square().sum(-1))
    assert [last for _, last in asked] == [False] * (len(asked) - 1) + [True]
