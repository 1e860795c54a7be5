"""Directions by recorded products: those of dense matrices, and of uninterrupted solvers."""

import pytest
import torch

from laplace_debias.quadratics import Quadratic, RecordedProducts, cg, top_eigenvectors
from laplace_debias.quadratics.chosen import choose_directions, kept_directions
from tests.oracles_quadratics import dense_ggn
from tests.quadratics.test_quadratic import make_classifier


class Interrupting:
    """A matrix that counts its products, and stops when it has made as many as allowed."""

    def __init__(self, matrix, most):
        self.matrix, self.most, self.made = matrix, most, 0
        self.shape, self.dtype, self.device = matrix.shape, matrix.dtype, matrix.device

    def __matmul__(self, V):
        """Multiply, or stop."""
        if self.made == self.most:
            raise InterruptedError
        self.made += 1
        return self.matrix @ V


def symmetric(P=30, seed=0):
    A = torch.randn(P, P, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return A @ A.T


SOLVERS = {
    "lanczos": lambda H: top_eigenvectors(H, 3, block_size=1).vectors,
    "blocks": lambda H: top_eigenvectors(H, 3, block_size=2, probes=0).vectors,
    "cg": lambda H: cg(H, torch.ones(30, dtype=torch.float64), max_iter=12).solution,
}


@pytest.mark.parametrize("solve", SOLVERS.values(), ids=SOLVERS)
def test_an_interrupted_solver_makes_no_product_twice(tmp_path, solve):
    H = symmetric()
    whole = Interrupting(H, 10**6)
    expected = solve(whole)
    with pytest.raises(InterruptedError):
        solve(RecordedProducts(Interrupting(H, 4), tmp_path))
    rest = Interrupting(H, 10**6)
    recorded = RecordedProducts(rest, tmp_path)
    assert torch.equal(solve(recorded), expected)
    assert rest.made == whole.made - 4
    recorded.clear()
    assert not tmp_path.exists()


def test_other_vectors_are_multiplied_anew(tmp_path):
    H, v = symmetric(), torch.ones(30, dtype=torch.float64)
    RecordedProducts(H, tmp_path) @ v
    again = RecordedProducts(H, tmp_path)
    assert torch.equal(again @ (2 * v), H @ (2 * v)) and again.n_products == 1
    again = RecordedProducts(H, tmp_path)  # and now those are kept
    assert torch.equal(again @ (2 * v), H @ (2 * v)) and again.n_products == 0
    again = RecordedProducts(H, tmp_path)
    assert torch.equal(again @ v[:, None], H @ v[:, None]) and again.n_products == 1


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    H = RecordedProducts(symmetric(), None)
    assert torch.equal(H @ torch.eye(30).double(), symmetric()) and H.n_products == 30
    assert not list(tmp_path.iterdir())


def test_directions_are_those_of_the_dense_matrix(tmp_path):
    model, loss, X, y = make_classifier()
    G = dense_ggn(model, loss, X, y, l2=0.1)
    values, U = (part.flip(-1)[..., :2] for part in torch.linalg.eigh(G))
    options = {"solver_options": {"block_size": 1}, "l2": 0.1}
    for folder in (None, tmp_path / "a", tmp_path / "a"):
        got = kept_directions(model, loss, (X, y), "eigenvectors", 2, folder=folder, **options)
        torch.testing.assert_close(got["values"], values)
        torch.testing.assert_close((got["D"].T @ U).abs(), torch.eye(2).double(), atol=1e-6, rtol=0)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"config.json", "directions.npz"}
    with pytest.raises(ValueError, match="options.l2: 0.1 there, 0.2 now"):
        options["l2"] = 0.2
        kept_directions(model, loss, (X, y), "eigenvectors", 2, folder=folder, **options)


def test_cg_comes_with_its_steps():
    model, loss, X, y = make_classifier()
    quadratic = Quadratic(model, loss, (X, y), l2=0.1)
    got = choose_directions(RecordedProducts(quadratic, None), "cg", 4)
    g, G = quadratic.gradient, dense_ggn(model, loss, X, y, l2=0.1)
    d = got["D"][:, 0]
    torch.testing.assert_close(d, -g / g.norm())
    torch.testing.assert_close(got["steps"][0], g.norm() / (d @ G @ d))


def test_unknown_directions():
    with pytest.raises(ValueError, match="directions in .*got 'random'.*Remedy"):
        choose_directions(symmetric(), "random", 2)
