"""Hook-based K-FAC against dense float64 oracles, ASDL and curvlinops."""

import copy
import warnings
from collections import UserDict

import pytest
import torch
from laplace.curvature.asdl import AsdlEF, AsdlGGN
from laplace.curvature.curvlinops import CurvlinopsEF, CurvlinopsGGN
from torch import nn

from laplace_debias.kfac.backend import HookEF, HookGGN
from laplace_debias.kfac.engine import Engine, kfac_factors
from laplace_debias.network.loss import (
    mean_loss_hessian,
)
from tests.cases_kfac import CASES, forward_factors, make
from tests.oracles_kfac import oracle

LIKELIHOODS = ["classification", "regression"]


def assert_blocks_close(got, expected, **tolerance):
    assert [len(b) for b in got] == [len(b) for b in expected]
    for one, other in zip(got, expected, strict=True):
        for M, L in zip(one, other, strict=True):
            torch.testing.assert_close(M, L, **tolerance)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("case", CASES)
def test_factors_equal_the_oracle_with_weights(case, likelihood, fisher):
    model, x, y = make(case, likelihood)
    weights = torch.tensor([0.0, 0.3, 1.0, 2.0, 0.7, 5.0], dtype=torch.float64)
    factors = kfac_factors(model, x, y, likelihood=likelihood, weights=weights, fisher=fisher)
    assert_blocks_close(factors.blocks, oracle(model, x, y, likelihood, weights, fisher))
    assert factors.n == len(y)
    assert factors.names == tuple(n for n, p in model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("case", CASES)
def test_separate_inputs_change_nothing(case):
    model, x, y = make(case, "classification")
    factors = kfac_factors(model, x, y, likelihood="classification")
    alone = kfac_factors(model, x, y, likelihood="classification", inputs=False)
    forward = forward_factors(model, x)
    assert_blocks_close(alone.with_inputs(forward).blocks, factors.blocks)
    torch.testing.assert_close(forward.outputs, copy.deepcopy(model).eval()(x).detach())


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("case", ["mlp", "conv2d"])
@pytest.mark.parametrize("ours, theirs", [(HookGGN, AsdlGGN), (HookEF, AsdlEF)])
def test_agrees_with_asdl(case, likelihood, ours, theirs):
    model, x, y = make(case, likelihood)
    loss, kron = ours(copy.deepcopy(model), likelihood).kron(x, y, N=20)
    their_loss, their_kron = theirs(copy.deepcopy(model), likelihood).kron(x, y, N=20)
    torch.testing.assert_close(loss, their_loss)
    torch.testing.assert_close(kron.to_matrix(), their_kron.to_matrix())


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize(
    "case", ["mlp", "tokens", "conv2d", "conv2d groups", "conv2d dilation", "conv2d same"]
)
@pytest.mark.parametrize("ours, theirs", [(HookGGN, CurvlinopsGGN), (HookEF, CurvlinopsEF)])
def test_agrees_with_curvlinops(case, likelihood, ours, theirs):
    model, x, y = make(case, likelihood)
    model.eval()
    loss, kron = ours(copy.deepcopy(model), likelihood).kron(x, y, N=20)
    their_loss, their_kron = theirs(copy.deepcopy(model), likelihood).kron(x, y, N=20)
    torch.testing.assert_close(loss, their_loss)
    torch.testing.assert_close(kron.to_matrix(), their_kron.to_matrix())


def test_tied_weights_count_as_positions():
    """Two modules with one weight: sums of B, pooled mean of A."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3, bias=False).double() for _ in range(2)]
    layers[1].weight = layers[0].weight
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    x = torch.randn(5, 3).double()
    tied = kfac_factors(model, x, likelihood="regression")
    untied = nn.Sequential(*(copy.deepcopy(layer) for layer in model))
    (B1, A1), (B2, A2) = kfac_factors(untied, x, likelihood="regression").blocks
    assert tied.names == ("0.weight",)
    assert_blocks_close(tied.blocks, [(B1 + B2, (A1 + A2) / 2)])


def test_dict_batches():
    model, x, y = make("tokens", "classification")
    factors = kfac_factors(model, UserDict(tokens=x), y, likelihood="classification")
    assert_blocks_close(
        factors.blocks, kfac_factors(model, x, y, likelihood="classification").blocks
    )
    assert factors.n == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_accumulate_in_single(dtype):
    model, x, y = make("mlp", "classification", n=64, dtype=torch.float32)
    expected = kfac_factors(model, x, y, likelihood="classification")
    half = kfac_factors(model.to(dtype), x.to(dtype), y, likelihood="classification")
    for block, exact in zip(half.blocks, expected.blocks, strict=True):
        for M, L in zip(block, exact, strict=True):
            assert M.dtype == torch.float32
            assert (M - L).norm() < 0.03 * L.norm()


def test_the_model_is_left_as_found_also_after_an_error():
    model, x, y = make("frozen", "classification")
    model.train()
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    for target in (y, y + 7):
        try:
            kfac_factors(model, x, target, likelihood="classification")
        except ValueError as error:
            assert "class indices in [0, 2]" in str(error)
        assert [m.training for m in model.modules()] == modes
        assert not any(m._forward_hooks for m in model.modules())
        assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    with torch.no_grad():  # the caller's grad mode does not matter
        kfac_factors(model, x, y, likelihood="classification")


class _Unused(nn.Module):
    """Holds a layer which it does not call."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)


def test_errors_say_what_to_do():
    model, x, y = make("mlp", "classification")
    kwargs = {"likelihood": "classification"}
    with pytest.raises(ValueError, match="frozen|unfreeze"):
        kfac_factors(copy.deepcopy(model).requires_grad_(False), x, y, **kwargs)
    other = nn.Sequential(nn.Linear(3, 3), nn.PReLU()).double()
    with pytest.raises(ValueError, match=r'1.weight \(PReLU\).*get_parameter\("1.weight"\)'):
        kfac_factors(other, x, y, **kwargs)
    with pytest.raises(ValueError, match="idle.weight"):
        kfac_factors(_Unused().double(), x, y, **kwargs)
    with pytest.raises(ValueError, match="idle.weight"):
        forward_factors(_Unused().double(), x)
    with pytest.raises(ValueError, match=r"shape \['m', 1\].*\[n, T, C\], or \[n, C, H, W\]"):
        kfac_factors(model, x[:, None], y, **kwargs)
    with pytest.raises(ValueError, match=r"\[n, C\] with likelihood='regression'"):
        kfac_factors(model, x[:, None], likelihood="regression")
    with pytest.raises(ValueError, match="'exact' or 'mc' for one categorical per position"):
        kfac_factors(model, x[:, None], y[:, None], fisher="empirical", **kwargs)
    with pytest.raises(ValueError, match=r"class indices of an integer dtype and shape"):
        kfac_factors(model, x, y[:, None], **kwargs)
    with pytest.raises(ValueError, match=r"shape \['m', 3\]"):
        kfac_factors(model, x, y, likelihood="regression")
    with pytest.raises(ValueError, match=r"weights of shape \[6\]"):
        kfac_factors(model, x, y, weights=torch.ones(5), **kwargs)
    with pytest.raises(ValueError, match="non-negative"):
        kfac_factors(model, x, y, weights=-torch.ones(6), **kwargs)
    with pytest.raises(ValueError, match="'exact', 'mc', 'empirical'"):
        kfac_factors(model, x, y, fisher="hessian", **kwargs)
    with pytest.raises(ValueError, match="pass `y`"):
        kfac_factors(model, x, fisher="empirical", **kwargs)
    with pytest.raises(ValueError, match="likelihood"):
        kfac_factors(model, x, likelihood="reward")


def test_layers_at_the_output_are_recognised():
    """B of the last layer is the mean loss Hessian; not so after an activation, in place or not."""
    model, x, y = make("mlp", "classification")
    forward = forward_factors(model, x)
    assert forward.at_output == (False, False, True, True)
    factors = kfac_factors(model, x, y, likelihood="classification")
    for B in (factors.blocks[2][0], factors.blocks[3][0]):
        torch.testing.assert_close(B / 6, mean_loss_hessian(forward.outputs, "classification"))
    for inplace in (True, False):
        covered = nn.Sequential(*copy.deepcopy(model), nn.ReLU(inplace=inplace))
        assert forward_factors(covered, x).at_output == (False,) * 4


def test_factors_add_up():
    """Two mini-batches of different sizes: the sum of their factors is the factors of both."""
    model, x, y = make("conv2d", "classification")
    whole = kfac_factors(model, x, y, likelihood="classification")
    kwargs = {"likelihood": "classification"}
    parts = [kfac_factors(model, x[s], y[s], **kwargs) for s in (slice(2), slice(2, 6))]
    both = parts[0] + parts[1]
    assert_blocks_close(both.blocks, whole.blocks)
    torch.testing.assert_close(both.loss, whole.loss)
    assert both.n == 6
    forward = forward_factors(model, x[:2]) + forward_factors(model, x[2:])
    assert_blocks_close(parts[0].with_inputs(forward).blocks[0][1:], whole.blocks[0][1:])
    torch.testing.assert_close(forward.outputs, forward_factors(model, x).outputs)
    with pytest.raises(ValueError, match="same model"):
        both + kfac_factors(model[2:], torch.randn(2, 4, 5, 6).double(), likelihood="regression")


@pytest.mark.parametrize("likelihood", ["classification", "regression", "bernoulli"])
def test_the_output_layer_takes_no_backward_pass(likelihood):
    """Its B is the sum of the loss Hessians, weights included."""
    torch.manual_seed(0)
    layer, X = nn.Linear(3, 4).double(), torch.randn(6, 3, dtype=torch.float64)
    w = torch.rand(6, dtype=torch.float64)
    engine = Engine(layer, likelihood)
    factors = engine.factors(X, weights=w)
    assert engine.cost.backward == 0 and factors.backward == 0
    loss = {
        "classification": lambda f: torch.nn.functional.cross_entropy(f, torch.tensor(1)),
        "regression": lambda f: 0.5 * f.square().sum(),
        "bernoulli": lambda f: torch.nn.functional.softplus(f).sum(),
    }[likelihood]
    expected = sum(
        w_n * torch.autograd.functional.hessian(loss, f)
        for w_n, f in zip(w, layer(X).detach(), strict=True)
    )
    for B in factors.B:
        torch.testing.assert_close(B, expected, rtol=1e-12, atol=1e-14)


def test_the_textbook_s_labels_stay_samples_at_the_output():
    engine = Engine(nn.Linear(3, 4), "classification", "mc", sampler="label")
    engine.factors(torch.randn(6, 3))
    assert engine.cost.backward == 6


def test_many_outputs_are_sampled_unless_exact_ones_are_asked_for():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 30))
    engine = Engine(net, "classification", exact_up_to=20)
    with pytest.warns(UserWarning, match=r"30 outputs are sampled.*fisher='exact'"):
        engine.factors(torch.randn(6, 3))
    assert engine.cost.backward == 6 and engine.fisher == "mc"
    exact = Engine(net, "classification")
    exact.factors(torch.randn(6, 3))
    assert exact.cost.backward == 6 * 29


def test_exactly_as_many_outputs_as_allowed_are_exact():
    engine = Engine(
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), "classification", exact_up_to=5
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.factors(torch.randn(6, 3))
    assert engine.fisher == "exact" and engine.cost.backward == 6 * 4


def test_input_factors_alone_take_no_backward_pass():
    engine = Engine(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), "classification")
    factors = engine.factors(torch.randn(6, 3), outputs=False)
    assert (engine.cost.forward, engine.cost.backward) == (6, 0)
    assert (factors.forward, factors.backward) == (6, 0)
