"""Top eigenvectors against dense and scipy's, also for spectra that are hard on Krylov methods."""

import pytest
import scipy.sparse.linalg
import torch
from torch import nn

from laplace_debias.quadratics import Quadratic, normalize_directions, top_eigenvectors
from tests.oracles_quadratics import dense_ggn, dense_hessian, orthonormal
from tests.quadratics.test_quadratic import make_classifier


def with_spectrum(values, seed=0):
    Q = orthonormal(len(values), len(values), seed)
    return (Q * torch.as_tensor(values, dtype=torch.float64)) @ Q.T


SPECTRA = {
    "decaying": 0.9 ** torch.arange(200.0),
    "flat": torch.linspace(1, 2, 200),
    "clustered": torch.cat([torch.full((30,), 3.0), torch.linspace(0, 1, 170)]),
    "low rank": torch.cat([torch.arange(1.0, 13.0), torch.zeros(188)]),
    "indefinite": torch.linspace(-5, 1, 200),
    "identity": torch.ones(50),
    "zero": torch.zeros(50),
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("k, block_size", [(1, 1), (10, 4), (40, 8), (50, 16)])
def test_matches_dense(name, k, block_size):
    H = with_spectrum(SPECTRA[name])
    pairs = top_eigenvectors(H, k, block_size=block_size)
    expected = torch.linalg.eigvalsh(H).flip(0)[:k]
    scale = max(float(torch.linalg.matrix_norm(H, 2)), 1e-30)
    assert torch.allclose(pairs.values, expected, rtol=0, atol=1e-9 * scale)
    assert torch.allclose(pairs.vectors.T @ pairs.vectors, torch.eye(k).double(), atol=1e-9)
    residuals = (H @ pairs.vectors - pairs.vectors * pairs.values).norm(dim=0)
    assert float(residuals.max()) <= 1e-9 * scale
    assert torch.allclose(residuals, pairs.residuals, rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("curvature, dense", [("ggn", dense_ggn), ("hessian", dense_hessian)])
def test_of_a_network(curvature, dense):
    model, loss, X, y = make_classifier()
    q = Quadratic(model, loss, (X, y), curvature=curvature, l2=0.1)
    pairs = top_eigenvectors(q, 6)
    values, vectors = torch.linalg.eigh(dense(model, loss, X, y, l2=0.1))
    assert torch.allclose(pairs.values, values.flip(0)[:6], rtol=1e-9)
    overlap = (pairs.vectors.T @ vectors.flip(1)[:, :6]).diagonal().abs()
    assert torch.allclose(overlap, torch.ones(6).double(), atol=1e-8)
    assert torch.allclose(q.curvatures(pairs.vectors), pairs.values, rtol=1e-9)
    assert pairs.n_products + 6 == q.n_products


def test_matches_scipy_in_float32_with_restarts():
    H = with_spectrum(torch.linspace(0, 1, 600) ** 3).float()
    pairs = top_eigenvectors(H, 20, block_size=4)
    expected, _ = scipy.sparse.linalg.eigsh(H.double().numpy(), 20, which="LA")
    assert torch.allclose(pairs.values.double(), torch.tensor(expected).flip(0), atol=1e-4)
    assert pairs.n_products > 80  # more than one basis, so it has restarted
    residuals = (H @ pairs.vectors - pairs.vectors * pairs.values).norm(dim=0)
    assert float(residuals.max()) <= 1e-4


def test_seeded_and_global_random_state_untouched():
    H = with_spectrum(SPECTRA["decaying"])
    state = torch.get_rng_state()
    one, two = top_eigenvectors(H, 3), top_eigenvectors(H, 3)
    other = top_eigenvectors(H, 3, generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.vectors, two.vectors)
    assert not torch.equal(one.vectors, other.vectors)
    assert torch.allclose(one.values, other.values)


def test_bad_input():
    H = with_spectrum(SPECTRA["flat"])
    with pytest.raises(ValueError, match="1 <= k <= 200"):
        top_eigenvectors(H, 201)
    with pytest.raises(ValueError, match="1 <= k"):
        top_eigenvectors(H, 0)
    with pytest.raises(ValueError, match="square"):
        top_eigenvectors(H[:, :3], 2)
    with pytest.raises(ValueError, match="symmetric"):
        top_eigenvectors(H + torch.ones_like(H).triu(), 2)
    with pytest.raises(RuntimeError, match="Remedy: raise max_products"):
        top_eigenvectors(H, 5, max_products=30)
    with pytest.raises(ValueError, match="block_size"):
        top_eigenvectors(H, 5, block_size=0)


def test_normalize_directions_reports_only_what_was_off():
    D = orthonormal(1000, 4, dtype=torch.float32)
    same, changed = normalize_directions(D)
    assert changed == 0 and torch.allclose(same, D, atol=1e-6)
    scaled, changed = normalize_directions(D * torch.tensor([1.0, 1.01, 5.0, 1.0]))
    assert changed == 2 and torch.allclose(scaled, D, atol=1e-6)
    D[0, 1] = float("nan")
    with pytest.raises(ValueError, match=r"column\(s\) \[1\]"):
        normalize_directions(D)


def test_k_equal_to_all_parameters():
    q = Quadratic(nn.Linear(2, 1), nn.MSELoss(), (torch.eye(2), torch.ones(2, 1)))
    pairs = top_eigenvectors(q, 3)
    assert torch.allclose(pairs.values.sum(), (q @ torch.eye(3)).trace(), rtol=1e-5)
    with pytest.raises(ValueError, match="1 <= k <= 3"):
        top_eigenvectors(q, 4)
