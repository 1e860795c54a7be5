"""What methods ask of an engine: vectors that belong to their data, Hessians, reached layers."""

import pytest
import torch
from torch import nn

from laplace_debias.kfac.engine import Engine
from laplace_debias.kfac.interface import EngineInterface, datum_keys
from laplace_debias.network.objective import objective_of
from laplace_debias.network.recorder import Recorder


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def test_keys_depend_on_the_datum_and_the_seed_alone():
    X = torch.randn(5, 2)
    keys = datum_keys(X, 5, seed=3)
    assert datum_keys(X.flip(0), 5, seed=3) == keys[::-1] and len(set(keys)) == 5
    assert not set(keys) & set(datum_keys(X, 5, seed=4))


def test_keyed_draws_do_not_depend_on_the_mini_batch(network):
    X = torch.randn(6, 3).double()
    engine = EngineInterface(network, "classification", "mc", draw_seed=1)
    whole = torch.stack(list(engine.backward_vectors_of(X, network(X).detach(), None, None)[1]))
    part = X[[4, 1]]
    few = torch.stack(list(engine.backward_vectors_of(part, network(part).detach(), None, None)[1]))
    torch.testing.assert_close(few, whole[:, [4, 1]])
    other = EngineInterface(network, "classification", "mc", draw_seed=2)
    drawn = torch.stack(list(other.backward_vectors_of(X, network(X).detach(), None, None)[1]))
    assert not torch.allclose(drawn, whole)


def test_the_mean_hessian_is_that_of_the_loss(network):
    f = torch.randn(4, 3).double()
    found = EngineInterface(network, "classification").mean_hessian(f)
    labels = torch.zeros(1).long()
    dense = [
        torch.autograd.functional.hessian(
            lambda row: nn.functional.cross_entropy(row[None], labels), row
        )
        for row in f
    ]
    torch.testing.assert_close(found, torch.stack(dense).mean(0))


def test_noises_of_the_outputs_whiten_the_hessian(network):
    noise = torch.tensor([1.0, 2.0, 4.0]).double()
    objective = objective_of("regression", None, 0.0, noise, -100)
    engine = EngineInterface(network, "regression", objective=objective)
    expected = torch.diag(1 / noise.square())
    torch.testing.assert_close(engine.mean_hessian(torch.zeros(2, 3).double()), expected)


def test_class_weights_are_weights_of_data(network):
    objective = objective_of("classification", [1.0, 2.0, 5.0], 0.0, None, -100)
    engine = EngineInterface(network, "classification", objective=objective)
    weights = engine.datum_weights(torch.tensor([2, 0, 1]), 3)
    ratios = weights / weights[1]
    torch.testing.assert_close(ratios, torch.tensor([5.0, 1.0, 2.0]).to(ratios))
    assert EngineInterface(network, "regression").datum_weights(torch.zeros(2, 3), 3) is None


def test_a_layer_that_no_datum_reaches_is_named_once_it_should_have_been(network):
    engine = EngineInterface(network, "classification")
    recorder = Recorder(engine.layers)
    with pytest.raises(ValueError, match="Remedy: take a larger mini-batch, or freeze it"):
        engine.check_called(recorder, outputs=True)
    with recorder.recording():
        network(torch.zeros(2, 3).double())
    engine.check_called(recorder, outputs=True)
    assert engine.reached == set(engine.names)
    engine.check_called(Recorder(engine.layers), outputs=True)  # others have reached it before


def test_many_outputs_are_sampled_and_a_warning_says_so(network):
    engine = EngineInterface(network, "classification", exact_up_to=2)
    with pytest.warns(UserWarning, match="output Hessians of 3 outputs are sampled"):
        engine.choose_fisher(torch.zeros(2, 3))
    assert engine.fisher == "mc" and engine.knows_hessian
    few = EngineInterface(network, "classification", exact_up_to=3)
    few.choose_fisher(torch.zeros(2, 3))
    assert few.fisher == "exact"


def test_the_engine_is_one(network):
    assert isinstance(Engine(network, "classification"), EngineInterface)
    with pytest.raises(NotImplementedError):
        EngineInterface(network, "classification").factors(torch.zeros(1, 3).double())
