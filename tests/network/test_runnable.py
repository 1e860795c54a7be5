"""Models that no fit can look into are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from laplace_debias import Laplace, linearized_predictive, sweep_prior_precision
from laplace_debias.network.runnable import check_runnable
from tests.oracles_predictive import dense_covariance, marginal

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3
BATCHES = [(X[:3], Y[:3]), (X[3:], Y[3:])]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.Linear(5, 3))


def complex_valued() -> nn.Module:
    net = network()
    net[0].weight = nn.Parameter(torch.zeros(5, 4, dtype=torch.complex64))
    return net


def inferred() -> nn.Module:
    with torch.inference_mode():
        return network()


REFUSED = {
    "scripted": (lambda: torch.jit.script(network()), "TorchScript.*torch.jit.script"),
    "traced": (lambda: torch.jit.trace(network(), X), "TorchScript.*torch.jit.trace"),
    "lazy": (lazy, "'0.weight' of a lazy layer.*call the model once"),
    "inference": (inferred, "'0.weight'.*made under `torch.inference_mode`"),
    "complex": (complex_valued, "'0.weight' of type torch.complex64.*requires_grad_"),
}


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize(("make", "why"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_models_that_cannot_be_looked_into_are_refused(make, why, subset):
    with pytest.raises(ValueError, match=f"Expected.*{why}"):
        Laplace(make(), "classification", subset, "kron", debias=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_what_is_complex_or_scripted_but_certain_is_fine():
    check_runnable(complex_valued().requires_grad_(False))
    body = torch.jit.script(nn.Sequential(nn.Linear(4, 5), nn.Tanh()))
    net = nn.Sequential(body, network()[2])
    la = Laplace(net, "classification", "last_layer", "kron", debias=True)
    la.fit(BATCHES, n_data=9)
    phi = net[0](X).detach()
    ordinary = nn.Sequential(nn.Identity(), net[1])
    other = Laplace(ordinary, "classification", "last_layer", "kron", debias=True)
    other.fit([(phi[:3], Y[:3]), (phi[3:], Y[3:])], n_data=9)
    torch.testing.assert_close(la(X), other(phi))


class Autocast(nn.Module):
    """A network that runs in half precision, with weights in single."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, 4]`` to ``[n, 3]``."""
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(x).float()


@pytest.mark.filterwarnings("ignore:The Jacobian of.*one datum and output at a time")
def test_autocast_belongs_into_the_forward_pass():
    la = Laplace(network(), "classification", "all", "kron", debias=True)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match="outside of `torch.autocast`.*into its `forward`"):
            la.fit(BATCHES, n_data=9)
    la.fit(BATCHES, n_data=9)
    half = Laplace(Autocast(), "classification", "all", "kron", debias=True)
    half.fit(BATCHES, n_data=9)
    expected = marginal(dense_covariance(la, X, la.prior_precision))
    found = half.output_moments(X)[1]
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()
    assert not torch.equal(found, expected)


PREDICTIONS = {
    **{
        link: lambda la, link=link: la(X, link_approx=link, generator=generator())
        for link in ("probit", "mc", "bridge", "bridge_norm")
    },
    "nn": lambda la: la(X, pred_type="nn", link_approx="mc", generator=generator()),
    "moments": lambda la: la.output_moments(X)[1],
    "joint": lambda la: la.output_moments(X, joint=True)[1],
    "functional samples": lambda la: la.functional_samples(X, generator=generator()),
    "weight samples": lambda la: la.sample(5, generator()),
    "marginal likelihood": lambda la: la.log_marginal_likelihood(),
    "sampled moments": lambda la: la.predictor().sampled(X, 20, generator()).covariance,
    "many priors": lambda la: linearized_predictive(la, X, PRIORS).covariance,
    "sweep": lambda la: torch.tensor(sweep_prior_precision(la, BATCHES, PRIORS).values["nll"]),
}
PRIORS = torch.logspace(-2, 2, 20)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("kind", PREDICTIONS)
def test_predictions_inside_autocast_are_those_outside_to_the_bit(subset, kind):
    """Nothing that was made inside or outside is kept for the other."""
    found = []
    for inside in (True, False):
        la = Laplace(network(), "classification", subset, "kron", debias=True)
        la.fit(BATCHES, n_data=9)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            found.append(PREDICTIONS[kind](la))
            assert torch.is_autocast_enabled("cpu") == inside
    assert torch.equal(*found) and found[0].dtype != torch.bfloat16


def test_old_weight_norms_are_named_with_their_successors():
    net = network()
    nn.utils.weight_norm(net[0])
    with pytest.raises(ValueError, match="'0'.*computes its weight from weight_g and weight_v"
                       ".*parametrizations"):  # fmt: skip
        Laplace(net, "classification", "all", "kron", debias=True)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_last_layer_needs_a_model_that_can_be_copied():
    net = network()
    net[0] = nn.utils.weight_norm(net[0])
    with pytest.raises(ValueError, match=r"'0' with a computed tensor, 'weight'.*parametrizations"):
        Laplace(net, "classification", "last_layer", "kron", debias=True)
    nn.utils.remove_weight_norm(net[0])
    check_runnable(net, copied=True)


def wholly_compiled(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend="eager")


def compiled_in_place(net: nn.Module) -> nn.Module:
    net.compile(backend="eager")
    return net


def one_layer_compiled(net: nn.Sequential) -> nn.Module:
    net[2].compile(backend="eager")
    return net


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("how", [wholly_compiled, compiled_in_place, one_layer_compiled])
def test_compiled_models_have_the_posterior_of_what_was_compiled(how, subset):
    def moments(model):
        la = Laplace(model, "classification", subset, "kron", debias=True)
        la.fit(BATCHES, n_data=6)
        return la.output_moments(X)

    compiled = how(network())
    before = compiled(X)  # what is compiled already does not call later hooks
    for got, expected in zip(moments(compiled), moments(network()), strict=True):
        torch.testing.assert_close(got, expected)
    assert torch.equal(compiled(X), before)
    traced = []
    torch.compile(network(), backend=lambda graph, _: traced.append(graph) or graph.forward)(X)
    assert traced  # what is compiled afterwards is
