"""The linearised predictive: gradients, inputs, an untouched model, and errors."""

from __future__ import annotations

import pytest
import torch
from laplace.baselaplace import KronLaplace
from laplace.lllaplace import KronLLLaplace
from torch import nn

from laplace_debias.predictive.linearized import linearized_predictive
from tests.cases_predictive import STRUCTURED
from tests.fitted_predictive import (
    EXACT,
    build,
    double_precision,  # noqa: F401
    fitted_cnn,
)
from tests.oracles_predictive import (
    random_laplace,
)

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.mark.parametrize("cls", [KronLaplace, KronLLLaplace])
@pytest.mark.parametrize("link", ["variance", "covariance", "joint"])
def test_gradients_with_respect_to_the_inputs(cls, link):
    la, x = fitted_cnn(cls, "regression", enable_backprop=True)
    x = x[:2].clone()
    options = {"diagonal_output": link == "variance", "joint": link == "joint"}

    def moments(x):
        result = linearized_predictive(la, x, **options)
        return torch.cat([result.mean.flatten(), result.covariance.flatten()])

    directions = torch.randn(2, *x.shape)
    weights = torch.randn(moments(x).shape)
    x.requires_grad_(True)
    (grad,) = torch.autograd.grad((moments(x) * weights).sum(), x)
    for v in directions:
        eps = 1e-6
        with torch.no_grad():
            slope = ((moments(x + eps * v) - moments(x - eps * v)) * weights).sum() / (2 * eps)
        torch.testing.assert_close((grad * v).sum(), slope, rtol=1e-5, atol=1e-7)


def test_no_graph_without_enable_backprop():
    la, x = fitted_cnn()
    result = linearized_predictive(la, x.requires_grad_(True))
    assert not result.mean.requires_grad and not result.covariance.requires_grad


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_works_without_gradients_around_it(guard):
    la, x = fitted_cnn()
    expected = linearized_predictive(la, x).covariance
    with guard():
        torch.testing.assert_close(linearized_predictive(la, x + 0).covariance, expected)


class DictNet(nn.Module):
    """A network on a mapping of tensors."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, batch):
        """Read the input from the mapping."""
        return self.head(torch.tanh(self.body(batch["input_ids"])))


def test_mappings_as_inputs():
    net = DictNet()
    la = random_laplace(net, 3)
    plain = random_laplace(nn.Sequential(net.body, nn.Tanh(), net.head), 3)
    x = torch.randn(7, 4)
    expected = linearized_predictive(plain, x, [0.5, 1.0])
    for budget in (2**30, 1):
        got = linearized_predictive(
            la,
            {"input_ids": x, "labels": torch.zeros(7), "n": 3},
            [0.5, 1.0],
            memory_budget=budget,
        )
        torch.testing.assert_close(got.covariance, expected.covariance, **EXACT)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails):
    la, x = build(STRUCTURED["batch norm"]())
    model = la.model
    model.train()
    model[1].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    model[0].bias.requires_grad_(False)  # after construction: still a block of la
    state = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    rng = torch.get_rng_state()
    if fails:
        with pytest.raises(RuntimeError):
            linearized_predictive(la, x[:, :, :1])
    else:
        linearized_predictive(la, x)
    assert [m.training for m in model.modules()] == modes
    assert all(not m._forward_hooks for m in model.modules())
    assert not model[0].bias.requires_grad and model[0].weight.requires_grad
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[0].bias.grad is None and model[-1].weight.grad is None
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)


class Overwriting(nn.Module):
    """A network that changes a layer's input after the layer has used it."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        """Change it."""
        h = 2 * x
        out = self.a(h)
        h.relu_()
        return self.b(out + h)


def test_an_input_changed_in_place_is_an_error():
    la = random_laplace(Overwriting(), 2)
    with pytest.raises(RuntimeError, match="in place"):
        linearized_predictive(la, torch.randn(4, 3))


def test_bad_arguments():
    la, x = fitted_cnn()
    with pytest.raises(ValueError, match="one of"):
        linearized_predictive(la, x, method="fast")
    with pytest.raises(ValueError, match="joint=True alone"):
        linearized_predictive(la, x, joint=True, diagonal_output=True)
    with pytest.raises(ValueError, match="memory budget"):
        linearized_predictive(la, x, memory_budget=0)
    with pytest.raises(ValueError, match="empty batch"):
        linearized_predictive(la, x[:0])
    with pytest.raises(ValueError, match="n_samples"):
        linearized_predictive(la, x, method="samples", n_samples=0)
    with pytest.raises(TypeError, match="KronLaplace"):
        linearized_predictive(la.model, x)
    unfitted = KronLaplace(la.model, "classification")
    with pytest.raises(AttributeError, match="fit"):
        linearized_predictive(unfitted, x)
    tokens = random_laplace(nn.Sequential(nn.Linear(2, 2)), 2)
    with pytest.raises(ValueError, match="joint=False for outputs with positions"):
        linearized_predictive(tokens, torch.randn(3, 4, 2), joint=True)
