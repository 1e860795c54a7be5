"""Thin bases against full ones: the frame, the null space, and laplace-torch's products."""

import pytest
import torch
from laplace.utils import KronDecomposed

from laplace_debias.debias.spectrum import kron_decomposed
from laplace_debias.kfac.thin import (
    all_completed,
    bases_of,
    completed,
    coordinates,
    frame_values,
    from_coordinates,
    is_thin,
    with_null_space,
)
from laplace_debias.kfac.thin_kron import ThinKronDecomposed


def basis(d, r, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(d, r, generator=generator, dtype=torch.float64))[0]


def values(d, r, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lam = 1 + torch.rand(d, generator=generator, dtype=torch.float64)
    lam[: d - r] = 0.5
    return lam


@pytest.mark.parametrize("r", [0, 1, 3, 8])
def test_the_frame_is_the_full_basis_in_every_quadratic_form(r):
    d = 8
    Q, lam, x = basis(d, r), values(d, r), torch.randn(5, d, dtype=torch.float64)
    full = completed(Q)
    torch.testing.assert_close(full.T @ full, torch.eye(d, dtype=torch.float64))
    torch.testing.assert_close(full[:, d - r :], Q)
    F = full @ torch.diag(lam) @ full.T
    z, w = coordinates(x, Q), frame_values(lam, Q)
    assert z.shape[1] == len(w) == (d if r == d else d + r)
    torch.testing.assert_close((z * w) @ z.T, x @ F @ x.T)
    torch.testing.assert_close(from_coordinates(z * w, Q), x @ F)
    torch.testing.assert_close(from_coordinates(z, Q), x)


def test_a_small_residual_keeps_its_digits():
    """In float32, |x|^2 - |Q^T x|^2 of a row that lies nearly in the span is nothing but noise."""
    Q = basis(400, 40).float()
    x = 100 * Q @ torch.ones(40) + 1e-3 * completed(Q)[:, 0]
    null = coordinates(x, Q)[:400].double().square().sum()
    difference = x.square().sum() - (x @ Q).square().sum()
    assert abs(null / 1e-6 - 1) < 0.1
    assert abs(difference / 1e-6 - 1) > 10


def test_the_null_space_gets_the_mean_of_what_is_left():
    Q = basis(9, 4)
    M = torch.randn(9, 9, dtype=torch.float64)
    M = M @ M.T
    along = (Q.T @ M @ Q).diagonal()
    got = with_null_space(along, M.trace(), 9)
    P_0 = torch.eye(9, dtype=torch.float64) - Q @ Q.T
    torch.testing.assert_close(got[:5], ((P_0 @ M).trace() / 5).expand(5))
    torch.testing.assert_close(got.sum(), M.trace())
    assert (with_null_space(along, along.sum() * (1 - 1e-9), 9)[:5] == 0).all()


@pytest.mark.parametrize("exponent", [-1, -0.5, 1])
@pytest.mark.parametrize("damping", [False, True])
def test_products_equal_those_of_laplace_torch_with_full_bases(exponent, damping):
    sizes = [(5, 7), (5,), (3, 4)]
    ranks = [(5, 2), (2,), (1, 1)]
    Q = [
        [basis(d, r, i) for d, r in zip(*pair, strict=True)]
        for i, pair in enumerate(zip(sizes, ranks, strict=True))
    ]
    lam = [
        [values(d, r, i) for d, r in zip(*pair, strict=True)]
        for i, pair in enumerate(zip(sizes, ranks, strict=True))
    ]
    thin = kron_decomposed(Q, lam, damping)
    thin.deltas = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    assert isinstance(thin, ThinKronDecomposed) and bases_of(thin)[0][1] is Q[0][1]
    full = KronDecomposed(all_completed(Q), lam, thin.deltas, damping)
    for W in (torch.randn(52, dtype=torch.float64), torch.randn(2, 3, 52, dtype=torch.float64)):
        torch.testing.assert_close(thin.bmm(W, exponent), full.bmm(W, exponent))
    torch.testing.assert_close(thin.to_matrix(exponent), full.to_matrix(exponent))
    torch.testing.assert_close(thin.diag(exponent), full.diag(exponent))
    torch.testing.assert_close(thin.logdet(), full.logdet())


def test_sums_and_multiples_stay_thin_and_bases_are_shared():
    H = kron_decomposed([[basis(6, 2), basis(4, 4)]], [[values(6, 2), values(4, 4)]])
    full = KronDecomposed(all_completed(bases_of(H)), H.eigenvalues)
    moved, expected = 3.0 * H + torch.tensor(0.5), full * 3.0 + torch.tensor(0.5)
    assert isinstance(moved, ThinKronDecomposed) and moved.bases is H.bases
    torch.testing.assert_close(moved.to_matrix(), expected.to_matrix())
    assert type(kron_decomposed([[basis(4, 4)]], [[values(4, 4)]])) is KronDecomposed
    assert is_thin(basis(6, 2)) and not is_thin(basis(4, 4))
