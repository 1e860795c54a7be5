"""The engine as a backend of laplace-torch."""

import copy

import pytest
import torch
from laplace import Laplace
from laplace.curvature.asdl import AsdlGGN
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias.kfac.backend import HookEF, HookGGN
from laplace_debias.network.vectors import sampled_hessian_root
from tests.cases_kfac import make
from tests.cases_layers import Conv1D
from tests.oracles_kfac import oracle


def test_exact_ggn_of_a_single_linear_layer_with_one_datum():
    """For one datum and one position the Kronecker product is the GGN itself."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    x, y = torch.randn(1, 3).double(), torch.tensor([2])
    _, kron = HookGGN(model, "classification").kron(x, y, N=1)
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()

    def loss(theta):
        W, b = theta[:12].reshape(4, 3), theta[12:]
        return F.cross_entropy(x @ W.T + b, y)

    H = torch.autograd.functional.hessian(loss, flat)  # the model is linear: Hessian = GGN
    torch.testing.assert_close(kron.to_matrix()[:12, :12], H[:12, :12])
    torch.testing.assert_close(kron.to_matrix()[12:, 12:], H[12:, 12:])


def test_last_layer_backend():
    model, x, y = make("mlp", "classification", n=12)
    loader = DataLoader(TensorDataset(x, y), batch_size=5)
    fitted = [
        Laplace(copy.deepcopy(model), "classification", "last_layer", "kron", backend=backend)
        for backend in (HookGGN, AsdlGGN)
    ]
    for la in fitted:
        la.fit(loader)
    torch.testing.assert_close(fitted[0].H.to_matrix(), fitted[1].H.to_matrix())


def test_stochastic_backend_takes_one_backward_pass():
    model, x, y = make("mlp", "classification")
    torch.manual_seed(0)
    _, kron = HookGGN(model, "classification", stochastic=True).kron(x, y, N=6)
    generator = torch.Generator().manual_seed(0)
    hidden = model[0](x).detach().requires_grad_()
    f = model[1:](hidden)
    v = sampled_hessian_root(f.detach(), "classification", generator).squeeze(2)
    (g,) = torch.autograd.grad(f, hidden, v)
    torch.testing.assert_close(kron.kfacs[0][0], g.T @ g)
    p = f.detach().softmax(-1)  # at the output the Hessian itself, not a sample of it
    torch.testing.assert_close(kron.kfacs[2][0], torch.diag(p.sum(0)) - p.T @ p)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize(("backend", "fisher"), [(HookGGN, "exact"), (HookEF, "empirical")])
def test_the_input_factor_is_scaled_as_laplace_torch_expects(backend, fisher, likelihood):
    """A mini-batch of 6 of N = 24 data: B as it is, A times 6 / 24, and the sum of the losses."""
    model, x, y = make("conv2d", likelihood)
    loss, kron = backend(model, likelihood).kron(x, y, N=24)
    expected = oracle(model, x, y, likelihood, torch.ones(6), fisher)
    for block, (B, *A) in zip(kron.kfacs, expected, strict=True):
        torch.testing.assert_close(block[0], B)
        for one, other in zip(block[1:], A, strict=True):
            torch.testing.assert_close(one, other * 6 / 24)
    f = model.eval()(x)
    per_datum = (
        F.cross_entropy(f, y, reduction="sum")
        if likelihood == "classification"
        else 0.5 * (f - y).square().sum()
    )
    torch.testing.assert_close(loss, per_datum.detach())


def test_weights_of_data_reach_the_factors():
    model, x, y = make("mlp", "classification")
    weights = torch.linspace(0, 2, 6).double()
    _, kron = HookGGN(model, "classification").kron(x, y, N=6, weights=weights)
    for block, (B, *_) in zip(
        kron.kfacs, oracle(model, x, y, "classification", weights), strict=True
    ):
        torch.testing.assert_close(block[0], B)


def test_blocks_of_transposed_weights_have_the_input_factor_first():
    layer = Conv1D(2, 3)  # its weight is [d_in, d_out]
    x, y = torch.randn(5, 3), torch.arange(5) % 2
    _, kron = HookGGN(nn.Sequential(layer), "classification").kron(x, y, N=5)
    sides = [[len(M) for M in block] for block in kron.kfacs]
    assert sides == [list(p.shape) for p in layer.parameters()] == [[3, 2], [2]]
