"""A posterior whose factors have few rows is the same after a file, a copy, and in dense form."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from laplace_debias import Laplace


def problem():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(12, 40, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return model, X, torch.arange(12) % 3


def fitted(debias):
    model, X, y = problem()
    la = Laplace(model, "classification", "all", "kron", debias=debias, prior_precision=0.3)
    la.fit([(X[:6], y[:6]), (X[6:], y[6:])], n_data=12)
    return la, model, X


@pytest.mark.parametrize("debias", ["single", True])
def test_a_thin_posterior_survives_files_and_copies(debias):
    la, model, X = fitted(debias)
    thin = [Q.shape for block in la.H.bases for Q in block]
    assert any(shape[0] != shape[1] for shape in thin), "no factor of few rows: the test is empty"
    expected = la(X, link_approx="probit")
    file = io.BytesIO()
    torch.save(la.state_dict(), file)
    file.seek(0)
    other = Laplace(model, "classification", "all", "kron", debias=debias)
    other.load_state_dict(torch.load(file, weights_only=True))
    for again in (other, copy.deepcopy(la), pickle.loads(pickle.dumps(la))):
        assert torch.equal(again(X, link_approx="probit"), expected)
        assert torch.equal(again.log_marginal_likelihood(), la.log_marginal_likelihood())


def test_predictions_of_a_thin_fit_equal_a_dense_oracle():
    la, model, X = fitted("single")
    n, params = 12, dict(model.named_parameters())

    def outputs(values, x):
        return torch.func.functional_call(model, values, (x[None],))[0]

    J = torch.func.vmap(torch.func.jacrev(outputs), (None, 0))(params, X)
    f = model(X).detach()
    p = f.softmax(-1)
    H = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    cov = torch.zeros(n, 3, 3, dtype=torch.float64)
    a = {"0": X, "2": torch.tanh(X @ model[0].weight.T + model[0].bias).detach()}
    for layer in ("0", "2"):
        g = J[f"{layer}.bias"].detach()  # [n, C, d_out], the Jacobian by the layer's output
        B = torch.einsum("nci,ncd,ndj->ij", g, H, g)
        A = a[layer].T @ a[layer] / n
        for name, matrix in (
            (f"{layer}.weight", torch.kron(B.contiguous(), A)),
            (f"{layer}.bias", B),
        ):
            rows = J[name].detach().reshape(n, 3, -1)
            P = matrix + 0.3 * torch.eye(len(matrix), dtype=torch.float64)
            cov += rows @ torch.linalg.solve(P, rows.mT)
    _, found = la._glm_predictive_distribution(X)
    assert torch.allclose(found, cov, rtol=1e-9, atol=1e-12)
