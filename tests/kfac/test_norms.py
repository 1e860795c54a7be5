"""Exact blocks of scales and shifts, against dense Jacobians."""

import pytest
import torch
from torch import nn

from laplace_debias import Laplace, check_model, freeze_unsupported
from laplace_debias.kfac.engine import Engine, kfac_factors
from laplace_debias.kfac.norms import NormGram
from laplace_debias.network.ownership import OwnedParameter
from tests.cases_norms import case, norm_names
from tests.oracles import output_hessian
from tests.oracles_predictive import dense_jacobian


def dense_block(model, name, x, y, likelihood, weights=None, fisher="ggn"):
    """The block of the generalised Gauss-Newton matrix of one parameter, datum by datum."""
    model.eval()
    f = model(x).detach()
    model.train()
    J = dense_jacobian(model, x, [model.get_parameter(name)])
    H = [output_hessian(f[i], y[i], likelihood, fisher) for i in range(len(x))]
    weights = torch.ones(len(x)).double() if weights is None else weights
    return sum(w * J_n.T @ H_n @ J_n for w, J_n, H_n in zip(weights, J, H, strict=True))


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("name", ["tokens", "images"])
def test_blocks_are_those_of_the_ggn(name, likelihood):
    model, x, y = case(name, likelihood)
    weights = torch.rand(len(x)).double()
    factors = kfac_factors(model, x, y, likelihood=likelihood, weights=weights)
    blocks = dict(zip(factors.names, factors.blocks, strict=True))
    names = norm_names(model)
    assert len(names) == (5 if name == "tokens" else 6)
    for parameter in names:
        (B,) = blocks[parameter]
        torch.testing.assert_close(
            B, dense_block(model, parameter, x, y, likelihood, weights), rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize("approx", ["reduce", "backpack"])
def test_no_approximation_touches_them(approx):
    model, x, y = case("tokens")
    factors = [
        kfac_factors(model, x, y, likelihood="classification", kfac_approx=way)
        for way in ("expand", approx)
    ]
    for parameter, one, two in zip(factors[0].names, *(f.blocks for f in factors), strict=True):
        if parameter in norm_names(model):
            torch.testing.assert_close(one, two)


def test_the_empirical_fisher_and_sampled_vectors():
    model, x, y = case("images")
    factors = kfac_factors(model, x, y, likelihood="classification", fisher="empirical")
    for parameter, block in zip(factors.names, factors.blocks, strict=True):
        if parameter in norm_names(model):
            expected = dense_block(model, parameter, x, y, "classification", fisher="ef")
            torch.testing.assert_close(block[0], expected, rtol=1e-10, atol=1e-12)
    generator = torch.Generator().manual_seed(0)
    engine = Engine(model, "classification", "mc", generator=generator)
    draws = [engine.factors(x).B for _ in range(400)]
    number = list(engine.names).index("1.weight")
    mean = torch.stack([B[number] for B in draws]).mean(0)
    expected = dense_block(model, "1.weight", x, y, "classification").detach()
    assert float((mean - expected).norm() / expected.norm()) < 0.1


def test_a_layer_that_is_called_twice_adds_up_before_the_square():
    """Sums of squares, without the products of different calls, are not the block."""
    model, x, y = case("tokens")
    factors = kfac_factors(model, x, y, likelihood="classification")
    B = factors.blocks[list(factors.names).index("layer.bias")][0]
    expected = dense_block(model, "layer.bias", x, y, "classification")
    layer = model.layer
    calls, gradients = [], []

    def keep(module, args, output):
        output.retain_grad()
        calls.append(output)

    handle = layer.register_forward_hook(keep)
    model.eval()
    for c in range(3):
        for n in range(len(x)):
            calls.clear()
            model(x[n : n + 1])[0, c].backward()
            gradients.append([z.grad.sum((0, 1)) for z in calls])
    handle.remove()
    apart = sum(torch.outer(g, g) for pair in gradients for g in pair)
    assert len(gradients[0]) == 2 and apart.shape == B.shape
    torch.testing.assert_close(B, expected, rtol=1e-10, atol=1e-12)
    assert float((apart - B).norm() / B.norm()) > 0.1


def test_data_that_are_not_first_are_refused_by_name():
    class PositionsFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 2)

        def forward(self, x):  # [n, T, d]
            return self.head(torch.tanh(self.norm(x.transpose(0, 1))).mean(0))

    torch.manual_seed(0)
    model, x, y = PositionsFirst(), torch.randn(4, 4, 3), torch.tensor([0, 1, 1, 0])
    check = check_model(model, x, "classification")
    assert [c.status for c in check.layers] == ["not supported"] * 2 + ["approximated", "exact"][
        1:
    ] * 2
    la = Laplace(model, "classification", "all", "kron", debias=True)
    with pytest.raises(ValueError, match="norm.weight.*first dimension.*batch_first"):
        la.fit((x, y), curvature_loader=(x, y), n_data=9)
    gram = NormGram(OwnedParameter("b", "bias", (model.norm,)), x)
    with pytest.raises(ValueError, match="'b' to see its 3 data along the first dimension"):
        gram.add({model.norm: [torch.ones(4, 2, 3)]}, {}, n=3)


def test_they_need_not_be_frozen_and_the_check_calls_them_exact():
    model, x, _ = case("images")
    assert freeze_unsupported(model).layers == ()
    check = check_model(model, x, "classification")
    assert check.supported and check.share == 1.0
    assert {c.status for c in check.layers if c.name in norm_names(model)} == {"exact"}


def test_statistics_of_the_batch_itself_are_unsupported():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False))
    assert freeze_unsupported(model).layers == ("1",)
