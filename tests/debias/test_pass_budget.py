"""A budget of backward passes: how many data it pays for, with one vector each and with all."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.debias.options import CrossfitOptions
from laplace_debias.debias.pass_budget import paid_for, passes_per_datum
from laplace_debias.kfac.engine import Engine

C = 4
NET = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C)).requires_grad_(True)


def data(likelihood="classification", n=60):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(n, 4, generator=generator)
    y = {
        "classification": torch.arange(n) % C,
        "regression": torch.randn(n, C, generator=generator),
        "bernoulli": (torch.rand(n, C, generator=generator) > 0.5).float(),
    }
    return X, y[likelihood]


def fitted(likelihood="classification", stream=False, net=NET, batch_size=12, **options):
    torch.manual_seed(0)  # the order of the loader
    X, y = data(likelihood)
    loader = DataLoader(TensorDataset(X, y), batch_size, shuffle=True)
    generator = torch.Generator().manual_seed(1)
    la = Laplace(
        net, likelihood, "all", "kron", debias="crossfit", generator=generator, **options
    )  # fmt: skip
    la.fit(iter(list(loader)) if stream else loader, n_data=60)
    return la


@pytest.mark.parametrize(
    ("likelihood", "fisher", "passes"),
    [
        ("classification", "exact", C - 1),
        ("regression", "exact", C),
        ("bernoulli", "exact", C),
        ("classification", "mc", 1),
        ("classification", "empirical", 1),
    ],
)
def test_passes_of_a_datum_are_those_that_the_engine_makes(likelihood, fisher, passes):
    engine = Engine(NET, likelihood, fisher)
    X, y = data(likelihood)
    assert passes_per_datum(engine, X[:1]) == passes
    assert engine.cost.forward == engine.cost.backward == 0
    engine.factors(X, y)
    assert engine.cost.backward == passes * len(X)


@pytest.mark.parametrize("sampling", ["uniform", "curvature"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("likelihood", "fisher", "passes"),
    [("classification", "exact", C - 1), ("regression", "exact", C), ("classification", "mc", 1)],
)
def test_a_budget_is_that_many_data_and_is_never_exceeded(
    sampling, stream, likelihood, fisher, passes
):
    common = {"sampling": sampling, "stream": stream, "fisher": fisher, "likelihood": likelihood}
    for budget in (8 * passes, 9 * passes - 1):
        la, by_data = fitted(n_passes=budget, **common), fitted(n_curvature=8, **common)
        assert passes <= la.fit_cost.backward <= budget
        if passes > 1 or budget == 8:
            assert la.fit_cost.backward == by_data.fit_cost.backward
            assert la.log_det_posterior_precision == by_data.log_det_posterior_precision
        if sampling == "uniform":
            assert la.fit_cost.backward > budget - passes  # no datum more would have been paid for


def test_one_vector_is_what_a_budget_takes_by_itself():
    assert fitted(n_passes=24).fisher == "mc" and fitted(n_curvature=8).fisher == "exact"


def test_many_outputs_are_sampled_and_then_take_one_pass():
    engine = Engine(NET, "classification", exact_up_to=2)
    with pytest.warns(UserWarning, match="sampled, one backward pass per datum instead of 3"):
        assert passes_per_datum(engine, torch.randn(1, 4)) == 1


def test_budgets_that_are_too_small_or_uncertain_are_refused():
    with pytest.raises(ValueError, match=r"at least 6, .*3 backward passes .* got 5.*Remedy.*'mc'"):
        fitted(n_passes=5, fisher="exact")
    options = CrossfitOptions(sampling="curvature", n_passes=20, n_pool=9)
    assert paid_for(options, 10).n_curvature == 2 and paid_for(options, 10).n_passes is None
    with pytest.raises(ValueError, match=r"pool of at least 20 data .*n_pool=9.*Remedy"):
        paid_for(options, 1)
    tokens = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 3))
    with pytest.raises(ValueError, match=r"\[n, C\].*\[1, 2, 3\].*Remedy.*n_curvature"):
        passes_per_datum(Engine(tokens, "classification"), torch.randn(1, 4))


def test_the_model_and_the_order_of_a_loader_are_left_as_they_were():
    net = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, C)).train()
    before = [p.clone() for p in net.parameters()]
    fitted(net=net, n_passes=30, fisher="exact", sampling="curvature")
    assert net.training and all(map(torch.equal, before, net.parameters()))


def test_an_empty_loader_is_named():
    X, y = data()
    for empty, sampling in itertools.product(
        (DataLoader(TensorDataset(X[:0], y[:0])), iter(())), ("uniform", "curvature")
    ):
        la = Laplace(
            NET, "classification", "all", "kron", debias="crossfit", n_passes=30, fisher="exact",
            sampling=sampling,
        )  # fmt: skip
        with pytest.raises(ValueError, match=r"Expected.*Remedy"):
            la.fit(empty, n_data=60)
