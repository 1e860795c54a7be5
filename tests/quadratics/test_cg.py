"""CG against scipy and a dense solve, debiased CG against the naive one with two products."""

import pytest
import scipy.sparse.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laplace_debias.quadratics import (
    CGStatus,
    Quadratic,
    cg,
    debiased_cg,
    partition,
)
from tests.oracles_quadratics import book_cg, naive_debiased_cg, orthonormal
from tests.quadratics.test_quadratic import make_classifier


class Counting:
    """A matrix that counts the columns it is multiplied onto."""

    def __init__(self, matrix):
        """Wrap a matrix."""
        self.matrix, self.columns = matrix, 0
        self.shape, self.dtype, self.device = matrix.shape, matrix.dtype, matrix.device

    def __matmul__(self, V):
        """Multiply and count."""
        self.columns += 1 if V.ndim == 1 else V.shape[1]
        return self.matrix @ V


def problem(P=40, seed=0, condition=100.0):
    Q = orthonormal(P, P, seed)
    H = (Q * torch.linspace(1, condition, P).double()) @ Q.T
    return (H + H.T) / 2, orthonormal(P, 1, seed + 100).flatten()


def two_batches():
    """Two different positive definite quadratics: mini-batches of one classifier."""
    model, loss, X, y = make_classifier()
    return [Quadratic(model, loss, batch, l2=0.05) for batch in partition((X, y), 12)]


def test_solves_like_scipy_and_a_dense_solve():
    H, g = problem()
    result = cg(H, g, max_iter=200, rtol=1e-13)
    expected = torch.linalg.solve(H, -g)
    scipys, info = scipy.sparse.linalg.cg(H.numpy(), -g.numpy(), rtol=1e-13, maxiter=200)
    assert info == 0 and result.status is CGStatus.CONVERGED
    assert torch.allclose(result.solution, expected, rtol=0, atol=1e-10 * expected.norm())
    assert torch.allclose(result.solution, torch.tensor(scipys), atol=1e-10 * expected.norm())


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), iterations=st.integers(1, 15))
def test_trajectory_is_that_of_scipy(seed, iterations):
    H, g = problem(seed=seed)
    result = cg(H, g, max_iter=iterations, rtol=0.0)
    path = []
    scipy.sparse.linalg.cg(
        H.numpy(),
        -g.numpy(),
        rtol=0.0,
        maxiter=iterations,
        callback=lambda x: path.append(torch.tensor(x)),
    )
    iterates = result.iterates
    assert iterates.shape == (40, iterations + 1) and not iterates[:, 0].any()
    assert torch.allclose(iterates[:, 1:], torch.stack(path, 1), rtol=0, atol=1e-10)
    assert torch.allclose(iterates[:, -1], result.solution, atol=1e-12)


def test_properties_of_the_solution():
    H, g = problem()
    result = cg(H, g, max_iter=10, rtol=0.0)
    D, x = result.directions, result.iterates
    conjugacy = D.T @ H @ D
    assert (conjugacy - torch.diag(conjugacy.diagonal())).abs().max() < 1e-10 * conjugacy.max()
    assert torch.allclose(D.norm(dim=0), torch.ones(10).double())
    slopes = torch.stack([D[:, p] @ (H @ x[:, p] + g) for p in range(10)])
    assert torch.allclose(result.magnitudes, -slopes / conjugacy.diagonal(), rtol=1e-9)
    assert torch.allclose(result.residuals, (H @ x + g[:, None]).norm(dim=0), rtol=1e-9)
    assert result.status is CGStatus.MAX_ITERATIONS and result.n_products == 10


@pytest.mark.parametrize("side_by_side", [True, False])
def test_debiased_against_two_products(side_by_side):
    q, q_tilde = two_batches()
    eye = torch.eye(q.shape[0]).double()
    H, H_tilde = q @ eye, q_tilde @ eye
    iterates, magnitudes = naive_debiased_cg(H, q.gradient, H_tilde, q_tilde.gradient, 8)
    result = debiased_cg(q, q_tilde, max_iter=8, rtol=0.0, side_by_side=side_by_side)
    expected = torch.stack(iterates, 1)
    scale = expected.norm(dim=0).max()
    assert torch.allclose(result.iterates, expected, rtol=0, atol=1e-12 * scale)
    assert torch.allclose(result.magnitudes, torch.stack(magnitudes), rtol=0, atol=1e-12 * scale)
    residuals = (H_tilde @ expected + q_tilde.gradient[:, None]).norm(dim=0)
    assert torch.allclose(result.residuals, residuals, rtol=1e-10)
    plain = cg(q, max_iter=8, rtol=0.0)
    assert torch.allclose(result.single_batch_magnitudes, plain.magnitudes, rtol=1e-10)
    assert torch.allclose(result.single_batch_residuals, plain.residuals, rtol=1e-8)
    assert torch.allclose(result.directions, plain.directions, atol=1e-12)
    assert (result.magnitudes - plain.magnitudes).abs().max() > 0.01  # the batches do differ


def test_both_orders_agree_also_with_damping_and_preconditioner():
    q, q_tilde = two_batches()
    diagonal = 1 + q.theta0.abs()
    options = {
        "max_iter": 8,
        "rtol": 0.0,
        "damping": 0.3,
        "preconditioner": lambda r: r / diagonal,
    }
    one = debiased_cg(q, q_tilde, side_by_side=True, **options)
    two = debiased_cg(q, q_tilde, side_by_side=False, **options)
    assert torch.allclose(one.iterates, two.iterates, rtol=0, atol=1e-12)
    assert torch.allclose(one.residuals, two.residuals, rtol=1e-10)
    same = debiased_cg(q, q, **options)
    plain = cg(q, **options)
    assert torch.allclose(same.iterates, plain.iterates, rtol=0, atol=1e-12)


@pytest.mark.parametrize("side_by_side", [True, False])
def test_same_batch_twice_is_plain_cg(side_by_side):
    q, _ = two_batches()
    plain = cg(q, max_iter=8, rtol=0.0)
    twice = debiased_cg(q, q, max_iter=8, rtol=0.0, side_by_side=side_by_side)
    scale = plain.iterates.abs().max()
    assert torch.allclose(twice.iterates, plain.iterates, rtol=0, atol=1e-11 * scale)
    assert torch.allclose(twice.residuals, plain.residuals, rtol=1e-8)
    assert twice.status is plain.status


@pytest.mark.parametrize("K", [1, 7])
@pytest.mark.parametrize("side_by_side", [True, False])
def test_products_are_K_and_2K(K, side_by_side):
    H, g = problem()
    plain = Counting(H)
    assert cg(plain, g, max_iter=K, rtol=0.0).n_products == plain.columns == K
    one, two = Counting(H), Counting(H + torch.eye(40).double())
    result = debiased_cg(one, two, g, g, max_iter=K, rtol=0.0, side_by_side=side_by_side)
    assert (one.columns, two.columns, result.n_products) == (K, K, 2 * K)


def test_damping_and_preconditioner_solve_the_damped_system():
    H, g = problem(condition=1e4)
    expected = torch.linalg.solve(H + 3 * torch.eye(40).double(), -g)
    diagonal = H.diagonal() + 3
    plain = cg(H, g, max_iter=500, rtol=1e-12, damping=3.0)
    conditioned = cg(
        H, g, max_iter=500, rtol=1e-12, damping=3.0, preconditioner=lambda r: r / diagonal
    )
    exact = cg(H, g, max_iter=500, rtol=1e-12, preconditioner=lambda r: torch.linalg.solve(H, r))
    for result in (plain, conditioned):
        assert torch.allclose(result.solution, expected, rtol=0, atol=1e-10)
    assert exact.n_products == 1  # the inverse as preconditioner: one iteration


def test_negative_curvature_is_a_status():
    H, g = problem(condition=10.0)
    indefinite = H - 5 * torch.eye(40).double()
    result = cg(indefinite, g, max_iter=40)
    assert result.status is CGStatus.NEGATIVE_CURVATURE
    count = len(result.magnitudes)
    assert result.iterates.shape == (40, count + 1) and len(result.residuals) == count + 1
    expected, _, _ = book_cg(indefinite, g, count)
    assert torch.allclose(result.solution, expected[-1], rtol=1e-8)
    for side_by_side in (True, False):
        stopped = debiased_cg(H, indefinite, g, g, max_iter=9, side_by_side=side_by_side)
        assert stopped.status is CGStatus.NEGATIVE_CURVATURE
        assert len(stopped.magnitudes) == len(stopped.single_batch_magnitudes) < 9
    at_once = cg(-H, g)
    assert at_once.status is CGStatus.NEGATIVE_CURVATURE
    assert not at_once.solution.any() and at_once.iterates.shape == (40, 1)
    empty = debiased_cg(-H, H, g, g, side_by_side=False)
    assert empty.status is CGStatus.NEGATIVE_CURVATURE and not empty.solution.any()


def test_zero_gradient_has_converged():
    H, g = problem()
    result = cg(H, torch.zeros_like(g))
    assert result.status is CGStatus.CONVERGED and result.n_products == 0


def test_last_iterate_only():
    H, g = problem()
    short = cg(H, g, max_iter=5, keep_directions=False)
    assert short.directions is None
    assert torch.allclose(short.solution, cg(H, g, max_iter=5).solution)
    with pytest.raises(ValueError, match="keep_directions=False"):
        _ = short.iterates
    assert debiased_cg(H, H, g, g, keep_directions=False).directions is None


def test_inputs_are_not_changed():
    H, g = problem()
    H0, g0 = H.clone(), g.clone()
    cg(H, g)
    debiased_cg(H, H, g, g)
    assert torch.equal(H, H0) and torch.equal(g, g0)


def test_bad_input():
    H, g = problem()
    with pytest.raises(ValueError, match="symmetric operator"):
        cg(H + torch.ones_like(H).triu(), g)
    with pytest.raises(ValueError, match="finite gradient"):
        cg(H, g * float("nan"))
    with pytest.raises(ValueError, match="finite product"):
        cg(H * float("inf"), g)
    with pytest.raises(ValueError, match=r"gradient \[P\]"):
        cg(H, g[:-1])
    with pytest.raises(ValueError, match="max_iter >= 1"):
        cg(H, g, max_iter=0)
    with pytest.raises(ValueError, match="damping"):
        cg(H, g, damping=-1.0)
    with pytest.raises(ValueError, match="positive definite preconditioner"):
        cg(H, g, preconditioner=lambda r: -r)
    with pytest.raises(ValueError, match="one space"):
        debiased_cg(H, H[:-1, :-1], g, g[:-1])
