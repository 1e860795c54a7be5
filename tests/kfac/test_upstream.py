"""laplace-torch's backends in this package's conventions."""

import pytest
import torch
from laplace.curvature import AsdlEF, AsdlGGN, BackPackGGN, CurvlinopsGGN
from laplace.utils import FeatureExtractor
from torch import nn

from laplace_debias.kfac.backend import HookEF, HookGGN, choose_backend
from laplace_debias.kfac.upstream import BackendEngine, supported_types
from laplace_debias.network.features import LEFTOVERS, computing_model
from tests import oracles
from tests.cases import CNN, MLP, MLP_REGRESSION, ONE_ELEMENT, PARTLY_FROZEN, TOKENS

GGN = [AsdlGGN, CurvlinopsGGN, HookGGN]


def factors_of(backend, case, n=5, **options):
    model = case.model()
    X, y = case.data(n)
    with computing_model(model) as (net, cast):
        engine = BackendEngine(backend, net, case.likelihood, **options)
        return engine.factors(cast(X), y), engine, (model, X, y)


@pytest.mark.parametrize("backend", GGN)
@pytest.mark.parametrize(
    "case",
    [MLP, MLP_REGRESSION, CNN, TOKENS, PARTLY_FROZEN, ONE_ELEMENT],
    ids=lambda case: case.name,
)
def test_every_backend_gives_sums_for_b_and_means_for_a(backend, case):
    """The product counts, as some backends put a root of 1/2 on each factor of a regression."""
    found, engine, (model, X, y) = factors_of(backend, case)
    expected = oracles.kfac(model, X, y, case.likelihood)
    assert found.names == tuple(expected) and (found.n, found.n_outputs) == (5, 4)
    for block, exact in zip(found.blocks, expected.values(), strict=True):
        if exact[0].numel() == 1 and len(exact) == 2 and len(block) == 1:  # one-element weights
            exact = [exact[0] * exact[1]]
        got, want = (torch.kron(*b) if len(b) == 2 else b[0] for b in (block, exact))
        torch.testing.assert_close(got, want)
    n_vectors = found.n_outputs
    assert (found.forward, found.backward) == (5, 5 * n_vectors)
    assert (engine.cost.forward, engine.cost.backward) == (5, 5 * n_vectors)


@pytest.mark.parametrize("backend", [AsdlEF, HookEF])
def test_the_empirical_fisher_takes_one_backward_pass(backend):
    found, _, (model, X, y) = factors_of(backend, MLP)
    expected = oracles.kfac(model, X, y, "classification", "ef")
    for block, exact in zip(found.blocks, expected.values(), strict=True):
        for one, other in zip(block, exact, strict=True):
            torch.testing.assert_close(one, other)
    assert found.backward == 5


def test_the_last_layer_alone():
    model = MLP.model()
    X, y = MLP.data(6)
    expected = oracles.kfac(model, X, y, "classification")
    extractor = FeatureExtractor(model, last_layer_name="2")
    with computing_model(extractor, last_layer=True) as (net, _):
        found = BackendEngine(
            AsdlGGN, net, "classification", last_layer=True, backend_kwargs={"last_layer": True}
        ).factors(X, y)
    assert found.names == ("weight", "bias")
    for block, name in zip(found.blocks, ("2.weight", "2.bias"), strict=True):
        for one, other in zip(block, expected[name], strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", [AsdlGGN, BackPackGGN, CurvlinopsGGN])
def test_the_model_is_left_as_it_was(backend):
    model = PARTLY_FROZEN.model().train()
    before = {name: (p.requires_grad, p.clone()) for name, p in model.named_parameters()}
    attributes = [set(vars(module)) for module in model.modules()]
    X, y = PARTLY_FROZEN.data(4)
    with computing_model(model) as (net, _):
        assert not net.training
        BackendEngine(backend, net, "classification").factors(X, y)
    assert model.training and all(not m._forward_hooks for m in model.modules())
    for name, p in model.named_parameters():
        assert p.requires_grad == before[name][0] and torch.equal(p, before[name][1])
        assert p.grad is None
    for module, names in zip(model.modules(), attributes, strict=True):
        assert not LEFTOVERS & (set(vars(module)) - names)


def test_which_backend():
    assert choose_backend(None, nn.Linear(1, 1)) is HookGGN
    dilated = nn.Sequential(nn.Conv2d(1, 1, 3, dilation=2))
    assert choose_backend(CurvlinopsGGN, dilated) is CurvlinopsGGN
    for options in ({"dilation": 2}, {"groups": 2}, {"padding": "same"}):
        with pytest.raises(ValueError, match="Expected.*AsdlGGN, got '0'.*Remedy"):
            choose_backend(AsdlGGN, nn.Sequential(nn.Conv2d(2, 2, 3, **options)))
    assert nn.Conv1d in supported_types(BackPackGGN)
    assert supported_types(AsdlGGN) == (nn.Linear, nn.Conv2d)


def test_targets_and_silent_layers_are_named():
    X, y = MLP.data(4)
    with computing_model(MLP.model()) as (net, _):
        engine = BackendEngine(AsdlGGN, net, "classification")
        with pytest.raises(ValueError, match=r"\[0, 3\]"):
            engine.factors(X, y + 9)

    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 4), nn.Linear(3, 4)

        def forward(self, x):
            return self.used(x)

    with computing_model(Silent().double()) as (net, _):
        engine = BackendEngine(AsdlGGN, net, "classification")
        with pytest.raises(ValueError, match="call every trainable layer, got none for 'unused'"):
            engine.factors(X, y)
