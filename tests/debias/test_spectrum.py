"""Eigenbases and curvatures along them, and the paper's identities behind it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laplace_debias.debias.spectrum import FitResult, decompose, rebuild, reevaluate
from laplace_debias.kfac.thin import curvature_along


def psd(d: int, rank: int, seed: int) -> torch.Tensor:
    """A random positive semi-definite matrix."""
    gen = torch.Generator().manual_seed(seed)
    root = torch.randn(d, rank, generator=gen, dtype=torch.float64)
    return root @ root.T / rank


@settings(max_examples=25, deadline=None)
@given(d=st.integers(1, 6), rank=st.integers(1, 8), seed=st.integers(0, 100))
def test_decompose_rebuild_round_trip(d, rank, seed):
    blocks = [[psd(d, rank, seed), psd(d + 1, rank, seed + 1)], [psd(d, rank, seed + 2)]]
    Q, lam = decompose(blocks, ["w", "b"])
    for block, again, values in zip(blocks, rebuild(Q, lam), lam, strict=True):
        for factor, rebuilt, lam_f in zip(block, again, values, strict=True):
            torch.testing.assert_close(rebuilt, factor, rtol=1e-10, atol=1e-10)
            assert (lam_f >= 0).all() and (lam_f.diff() >= 0).all()


@settings(max_examples=25, deadline=None)
@given(d=st.integers(1, 6), seed=st.integers(0, 100))
def test_reevaluate_is_the_diagonal_of_the_rotated_factor(d, seed):
    Q, _ = decompose([[psd(d, d + 2, seed)]], ["b"])
    C = psd(d, d + 2, seed + 1)
    rotated = Q[0][0].numpy().T @ C.numpy() @ Q[0][0].numpy()
    np.testing.assert_allclose(reevaluate(Q, [[C]], ["b"])[0][0], np.diag(rotated), rtol=1e-10)


def test_reevaluated_curvatures_are_clamped_at_zero():
    indefinite = torch.diag(torch.tensor([-1e-9, 1.0], dtype=torch.float64))
    lam = reevaluate([[torch.eye(2, dtype=torch.float64)]], [[indefinite]], ["b"])[0][0]
    assert lam.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_factors_name_the_layer(bad):
    factor = torch.eye(3)
    factor[0, 1] = bad
    with pytest.raises(ValueError, match="'conv1.weight'.*Remedy"):
        decompose([[factor, torch.eye(2)]], ["conv1.weight"])
    with pytest.raises(ValueError, match="'conv1.weight'.*Remedy"):
        reevaluate([[torch.eye(3)]], [[factor]], ["conv1.weight"])


def test_float32_factors_are_decomposed_in_float64():
    factor = psd(40, 60, 0).float()
    Q, lam = decompose([[factor]], ["b"])
    assert Q[0][0].dtype == lam[0][0].dtype == torch.float64
    torch.testing.assert_close(rebuild(Q, lam)[0][0], factor.double(), rtol=0, atol=1e-13)


@settings(max_examples=30, deadline=None)
@given(d=st.integers(2, 8), seed=st.integers(0, 1000))
def test_overlaps_and_curvature_inequalities(d, seed):
    """Weights Omega sum to one; equal spectra give less extreme curvature on the other batch."""
    gen = torch.Generator().manual_seed(seed)
    U, V = (
        torch.linalg.qr(torch.randn(d, d, generator=gen, dtype=torch.float64))[0] for _ in range(2)
    )
    lam = torch.rand(d, generator=gen, dtype=torch.float64).sort().values
    H1, H2 = (U * lam) @ U.T, (V * lam) @ V.T
    Q, lam1 = decompose([[H1]], ["b"])
    along = reevaluate(Q, [[H2]], ["b"])[0][0]
    Omega = (Q[0][0].T @ V) ** 2
    torch.testing.assert_close(Omega.sum(dim=1), torch.ones(d, dtype=torch.float64))
    torch.testing.assert_close(along, Omega @ lam)
    assert along[-1] <= lam1[0][0][-1] + 1e-12
    assert along[0] >= lam1[0][0][0] - 1e-12
    torch.testing.assert_close(along.sum(), H2.trace())


def test_weight_and_bias_share_one_decomposition_of_b(monkeypatch):
    calls = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda M: calls.append(M) or eigh(M))
    B, A, D = psd(4, 5, 0), psd(3, 5, 1), psd(4, 5, 2)
    blocks = [[B, A], [B.clone()], [D, A], [D], [B]]
    Q, lam = decompose(blocks, list("abcde"))
    assert len(calls) == 5
    for block, other in zip(rebuild(Q, lam), blocks, strict=True):
        for got, expected in zip(block, other, strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("d", [1, 255, 256, 257, 600])
def test_curvature_along_directions_by_blocks_of_rows(d):
    M, Q = psd(d, 20, 0), torch.randn(d, 3, dtype=torch.float64)
    expected = [float(q @ M @ q) for q in Q.T]
    torch.testing.assert_close(curvature_along(M, Q).tolist(), expected, rtol=1e-12, atol=0.0)
    assert curvature_along(M.float(), Q).dtype == torch.float64


def test_blocks_of_transposed_weights_have_their_factors_the_other_way_round():
    """The flattened parameter is [d_in, d_out], so its block is kron(A, B)."""
    B, A = psd(2, 4, 0), psd(3, 5, 1)
    Q, lam = decompose([[B, A], [B, A]], ["one", "two"])
    fit = FitResult(Q, lam, lam, [], torch.zeros(()), 1, 1)
    found = fit.decomposed(torch.float64, transposed=[False, True]).to_matrix()
    torch.testing.assert_close(found, torch.block_diag(torch.kron(B, A), torch.kron(A, B)))
