"""Blocks corrected for the inverse: inflated, raised by a floor, and still Kronecker products."""

import pytest
import torch

from laplace_debias.debias.corrected import Spectrum, corrected_block
from laplace_debias.debias.inverse import inverse_inflation, resolvent_inflation
from laplace_debias.debias.span import NullSpace, null_floor


def drawn_spectrum(n=12, d=4):
    """Spectrum of n rare draws in d dimensions, none alone."""
    X = torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 10
    lam, Q = torch.linalg.eigh(X.T @ X)
    ones, null = torch.ones(n, dtype=torch.float64), NullSpace(lam.new_zeros(0), 0.0, d)
    linked = torch.ones(n - 1, dtype=torch.bool)
    return Spectrum(Q, lam, (X @ Q)[:, None], 0.01 * ones, linked, ones, 0 * ones, null)


def test_a_corrected_block_is_inflated_or_has_a_floor():
    spectrum = drawn_spectrum()
    ridge = torch.tensor([1e-3], dtype=torch.float64)
    c = inverse_inflation(
        spectrum.rows, spectrum.probabilities, spectrum.lam, ridge, linked=spectrum.linked
    )
    assert float(c) > 1.1 and not len(spectrum.null.tail)  # more draws than dimensions
    block = corrected_block(spectrum, None, 1e-3)
    torch.testing.assert_close(block.lam_B, float(c) * spectrum.lam)
    null = NullSpace(torch.tensor([4.0, 1.0], dtype=torch.float64), 1.0, 4)
    few = spectrum._replace(null=null, alone=torch.ones(12).double())
    floor = null_floor(null.tail, 1e-3)
    torch.testing.assert_close(corrected_block(few, None, 1e-3).lam_B, few.lam + floor)
    Q_A, lam_A = torch.eye(2).double(), torch.tensor([2.0, 1.0]).double()
    block = corrected_block(few, (Q_A, lam_A), 2e-3)  # the floor of the largest of A
    torch.testing.assert_close(block.lam_B, few.lam + floor)
    torch.testing.assert_close(block.lam_A, lam_A)
    some = few._replace(alone=(torch.arange(12) < 6).double())  # the other six make c
    c_some = some.inflation(ridge)
    assert 1.05 < float(c_some) < float(c)
    some = some._replace(null=null._replace(share=0.5, rank=3))
    raised = few.lam + floor * torch.tensor([1.0, 0.5, 0.5, 0.5])
    torch.testing.assert_close(corrected_block(some, None, 1e-3).lam_B, float(c_some) * raised)


def test_corrections_do_not_depend_on_the_scale_of_the_inputs():
    spectrum = drawn_spectrum()
    Q, lam = torch.eye(3, dtype=torch.float64), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    one, tiny = (corrected_block(spectrum, (Q, s * lam), s * 1e-3) for s in (1.0, 1e-16))
    torch.testing.assert_close(tiny.lam_A / 1e-16, one.lam_A)


def test_a_corrected_block_is_larger_and_a_kronecker_product():
    spectrum = drawn_spectrum()
    A = (torch.eye(3, dtype=torch.float64), torch.tensor([1e-10, 1.0, 2.0], dtype=torch.float64))
    plain = corrected_block(spectrum, A, 1e-3, correct=False)
    block = corrected_block(spectrum, A, 1e-3)
    assert bool((block.table >= plain.table).all())
    torch.testing.assert_close(block.lam_A[0], A[1][0], rtol=0.15, atol=0)  # its ridge is large
    assert float(block.lam_A[2] / A[1][2]) > 1.1


def test_input_factors_of_a_part_of_the_data_inflate_the_output_factor():
    """The other way round: A's resolvent at the ridges of B, for n of N rows."""
    spectrum = drawn_spectrum()
    A = torch.eye(3, dtype=torch.float64), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    plain = corrected_block(spectrum, A, 1e-2)
    block = corrected_block(spectrum, A, 1e-2, input_rows=(6, 1000))
    torch.testing.assert_close(block.lam_A, plain.lam_A)
    c = resolvent_inflation(plain.lam_A, 1e-2 / plain.lam_B, 6, 1000)
    torch.testing.assert_close(block.lam_B, c * plain.lam_B)
    assert bool((c > 1.2).all())
    uncorrected = corrected_block(spectrum, A, 1e-2, correct=False, input_rows=(6, 1000))
    torch.testing.assert_close(uncorrected.lam_B, spectrum.lam)
    torch.testing.assert_close(uncorrected.lam_A, A[1])


@pytest.mark.parametrize("of_weight", [True, False])
def test_a_corrected_block_is_the_dense_one(of_weight):
    """Curvature c (B + floor), between directions of A each with a c of its own."""
    spectrum = drawn_spectrum()
    null = NullSpace(torch.tensor([40.0, 10.0], dtype=torch.float64), 0.25, 3)
    spectrum = spectrum._replace(null=null)
    floor = null_floor(null.tail, 1e-2 / 2 if of_weight else 1e-2)
    raised = spectrum.lam + floor * torch.tensor([1.0, 0.25, 0.25, 0.25])
    B = spectrum.Q @ torch.diag(raised) @ spectrum.Q.T
    if not of_weight:
        c = float(spectrum.inflation(raised.new_tensor([1e-2])))
        block = corrected_block(spectrum, None, 1e-2)
        torch.testing.assert_close(block.Q_B @ torch.diag(block.lam_B) @ block.Q_B.T, c * B)
        return
    Q_A = torch.linalg.qr(torch.randn(2, 2, dtype=torch.float64))[0]
    lam_A = torch.tensor([0.5, 2.0], dtype=torch.float64)
    c = torch.cat([spectrum.inflation((1e-2 / a)[None]) for a in lam_A])
    A = Q_A @ torch.diag(c * lam_A) @ Q_A.T
    block = corrected_block(spectrum, (Q_A, lam_A), 1e-2)
    Q = torch.kron(block.Q_B, block.Q_A)
    dense = Q @ torch.diag(block.table.flatten()) @ Q.T
    torch.testing.assert_close(dense, torch.kron(B, A))
