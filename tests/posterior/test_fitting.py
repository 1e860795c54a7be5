"""What a fit computes with: the engine of its backend, its data, and what it leaves behind."""

import pytest
import torch
from laplace.curvature import CurvlinopsGGN
from torch import nn

from laplace_debias import Laplace
from laplace_debias.debias.two_batch import fit_factors
from laplace_debias.kfac.engine import Engine, kfac_factors
from laplace_debias.kfac.upstream import BackendEngine
from laplace_debias.posterior.fitting import check_fit, engine_of, posterior_of, training_data

N = 50


def made(subset="all", debias="single", **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return Laplace(net, "classification", subset, "kron", debias=debias, **options)


def batch(n=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 2, generator=generator, dtype=torch.float64), torch.arange(n) % 3


def test_the_engine_knows_what_the_posterior_was_told():
    generator = torch.Generator()
    la = made(fisher="mc", sampler="label", generator=generator)
    with engine_of(la, ours=True) as (engine, _, _):
        assert isinstance(engine, Engine)
        assert (engine.fisher, engine.sampler, engine.kfac_approx) == ("mc", "label", "expand")
        assert engine.generator is generator and engine.exact_up_to == float("inf")
    with engine_of(made(), ours=True) as (engine, _, _):
        assert engine.exact_up_to == 100


def test_its_factors_are_those_of_the_model():
    la, (X, y) = made(), batch()
    with engine_of(la, ours=True) as (engine, cast, _):
        found = engine.factors(cast(X), cast(y))
    expected = kfac_factors(la.model, X, y, likelihood="classification")
    for one, two in zip(found.blocks, expected.blocks, strict=True):
        torch.testing.assert_close(list(one), list(two))


def test_a_last_layer_is_fed_with_features():
    la, (X, y) = made("last_layer", last_layer_name="2"), batch()
    with engine_of(la, ours=True) as (engine, cast, check):
        check(X)
        B, A = engine.factors(cast(X), cast(y)).blocks[0]
    phi = torch.tanh(X @ la.model.model[0].weight.T + la.model.model[0].bias)
    torch.testing.assert_close(A, phi.T @ phi / len(X))
    assert B.shape == (3, 3)


def test_selected_parameters_are_put_back():
    la = made(parameters=["2.weight"])
    before = [p.requires_grad for p in la.model.parameters()]
    with engine_of(la, ours=True) as (engine, _, _):
        assert engine.names == ("2.weight",)
    assert [p.requires_grad for p in la.model.parameters()] == before


def test_other_parameters_than_before_are_refused():
    la = made()
    la.model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="required a gradient when"), engine_of(la, ours=True):
        pass


def test_backends_of_laplace_torch_have_an_engine_of_theirs():
    la = made(backend=CurvlinopsGGN)
    with engine_of(la, ours=False) as (engine, _, _):
        assert isinstance(engine, BackendEngine)


def test_the_check_is_counted_and_remembers_what_it_reached():
    la, (X, _) = made(), batch()
    with engine_of(la, ours=True) as (engine, _, check):
        check(X)
    assert "verification" in engine.cost.seconds
    assert engine.reached and engine.first_output is not None


@pytest.mark.parametrize("verify", [True, False])
def test_data_are_checked_if_asked_for(verify):
    la = made(verify=verify)
    with engine_of(la, ours=True) as computing:
        data = training_data(la, computing, (batch(), None), N)
        assert data.n_data == N and (data.check is not None) is verify
        assert training_data(la, computing, (batch(), None), N, 2**30).check is not None


def test_a_posterior_is_the_rebuilt_curvature_at_the_weights():
    la, (X, y) = made(), batch()
    factors = kfac_factors(la.model, X, y, likelihood="classification")
    H, mean = posterior_of(la, fit_factors(factors, None, N))
    weights = torch.cat([p.detach().reshape(-1) for p in la.model.parameters()])
    assert torch.equal(mean, weights) and not mean.requires_grad
    B, A = factors.blocks[0]
    dense = torch.kron(B, A) * N / len(X)
    torch.testing.assert_close(H.to_matrix()[: len(dense), : len(dense)], dense)


def test_curvature_beyond_the_dtype_is_refused():
    la, (X, y) = made(), batch()
    factors = kfac_factors(la.model, X, y, likelihood="classification")
    with pytest.raises(ValueError, match=r"'0.weight' to fit into torch.float16, .* Remedy: "):
        posterior_of(la_of(torch.float16), fit_factors(factors, None, 10**9))


def la_of(dtype):
    la = made()
    return Laplace(la.model.to(dtype), "classification", "all", "kron", debias="single")


@pytest.mark.parametrize("debias", ["single", "crossfit", "auto"])
def test_only_two_batches_have_a_loader_of_their_own(debias):
    with pytest.raises(ValueError, match="no `curvature_loader`"):
        check_fit(debias, curvature_loader=[], override=True, draws=False)
    check_fit("two-batch", curvature_loader=[], override=True, draws=False)


def test_draws_cannot_be_added_to():
    with pytest.raises(ValueError, match="draws are gone"):
        check_fit("auto", curvature_loader=None, override=False, draws=True)
    check_fit("two-batch", curvature_loader=None, override=False, draws=False)
