"""Eigendecompositions, dense and of few rows."""

import pytest
import torch

from laplace_debias.debias.eigen import eigh_float64, eigh_rows, null_tolerance


def rows_of_rank(m, d, rank, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(m, rank, generator=generator, dtype=torch.float64)
    rows = rows * torch.logspace(0, -3, rank, dtype=torch.float64)
    return rows @ torch.randn(rank, d, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("m, rank", [(1, 1), (7, 7), (9, 4), (12, 12)])
def test_few_rows_have_the_spectrum_of_their_matrix(m, rank):
    rows = rows_of_rank(m, 25, rank)
    lam, Q = eigh_rows(rows)
    expected = torch.linalg.eigvalsh(rows.T @ rows)
    torch.testing.assert_close(lam, expected.clamp(min=0), rtol=1e-9, atol=1e-12 * expected[-1])
    assert Q.shape == (25, rank) and (lam[: 25 - rank] == 0).all()
    torch.testing.assert_close(Q.T @ Q, torch.eye(rank, dtype=torch.float64))
    torch.testing.assert_close(Q @ torch.diag(lam[25 - rank :]) @ Q.T, rows.T @ rows)


def test_repeated_and_empty_rows_add_no_directions():
    rows = rows_of_rank(5, 30, 5).float()
    twice = torch.cat([rows, rows * 1.0000001, torch.zeros(3, 30)])
    lam, Q = eigh_rows(twice)
    assert Q.shape == (30, 5) and Q.dtype == lam.dtype == torch.float64
    for nothing in (rows[:0], torch.zeros(4, 30)):
        lam, Q = eigh_rows(nothing)
        assert Q.shape == (30, 0) and (lam == 0).all() and lam.shape == (30,)


def test_rows_with_nan_are_refused_by_name():
    rows = rows_of_rank(3, 9, 3)
    rows[1, 2] = float("nan")
    with pytest.raises(ValueError, match="1 NaN or Inf.*'A of 0'.*Remedy"):
        eigh_rows(rows, "A of 0")


def test_directions_within_the_rounding_of_the_rows_are_null():
    """Rows in single precision are rounded to 1e-7: what is smaller is no direction of theirs."""
    generator = torch.Generator().manual_seed(0)
    a, b, noise = torch.randn(3, 400, generator=generator)
    rows = torch.stack([a, b, a + b + 3e-7 * noise])
    assert eigh_rows(rows)[1].shape == (400, 2)
    assert eigh_rows(rows.double())[1].shape == (400, 3)


def test_decomposition_averages_the_triangles_and_reports_failure(monkeypatch):
    torch.manual_seed(0)
    M = torch.randn(6, 6)
    symmetric = (M.double() + M.double().T) / 2
    lam, Q = eigh_float64(M)
    torch.testing.assert_close(Q @ torch.diag(lam) @ Q.T, symmetric)
    torch.testing.assert_close(Q.T @ Q, torch.eye(6, dtype=torch.float64))
    assert (lam.diff() >= 0).all()

    def fail(matrix):
        raise torch.linalg.LinAlgError("no convergence")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.raises(ValueError, match="'A of 0'.*no convergence.*Remedy"):
        eigh_float64(M, "A of 0")


@pytest.mark.parametrize("d, n", [(40, 10), (300, 100)])
def test_null_tolerance_separates_rounded_zeros_from_eigenvalues(d, n):
    """Also with a dominant mean, as activations have it."""
    torch.manual_seed(0)
    rows = torch.randn(n, d) * 0.3 + 1
    gram = rows.T @ rows / n
    mu, _ = eigh_float64(gram)
    assert int((mu <= null_tolerance(gram) * mu[-1]).sum()) == d - n
