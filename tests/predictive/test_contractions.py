"""Contractions of rotated Jacobians against explicit matrices."""

import pytest
import torch

from laplace_debias.predictive import contractions
from tests.fitted_predictive import EXACT


@pytest.mark.parametrize("mode", ["variance", "covariance", "joint"])
@pytest.mark.parametrize(
    ("groups", "order"),
    [(1, (a, b)) for a in (True, False) for b in (True, False)]
    + [(2, (a, False)) for a in (True, False)],  # gradients of several groups are rotated last
)
def test_every_order_of_rotation_gives_the_dense_result(mode, groups, order, monkeypatch):
    n, C, d_out, d_in, R, k = 5, 3, 4, 6, 7, 2
    generator = torch.Generator().manual_seed(0)
    like = {"dtype": torch.float64, "generator": generator}
    G, A = torch.randn(n, C, d_out, R, **like), torch.randn(n, R, groups, d_in, **like)
    bases = [
        tuple(torch.linalg.qr(torch.randn(d, d, **like))[0] for d in (d_out, d_in))
        for _ in range(3)
    ]
    ws = [torch.rand(d_out * d_in, k, **like) for _ in bases]
    monkeypatch.setattr(contractions, "TILE_NUMEL", 2 * C * d_in * n)
    monkeypatch.setattr(contractions, "rotation_order", lambda *args: order)
    got = contractions.weight_moments(
        lambda rows: A[rows],
        G,
        bases,
        [lambda rows, w=w: [w.view(d_out, d_in, k)[rows].flatten(0, 1)] for w in ws],
        mode,
    )
    for moments, (Q_B, Q_A), w in zip(got, bases, ws, strict=True):
        J = torch.zeros(n, C, d_out, d_in, dtype=torch.float64)
        for o in range(d_out):  # an output sees the inputs of its own group
            J[:, :, o] = torch.einsum("ncr,nri->nci", G[:, :, o], A[:, :, o * groups // d_out])
        J = J.flatten(2) @ torch.kron(Q_B, Q_A)
        for i in range(k):
            joint = torch.einsum("ncp,p,mdp->ncmd", J, w[:, i], J)
            own = torch.stack([joint[j, :, j] for j in range(n)])
            want = {
                "joint": joint.reshape(n * C, n * C),
                "covariance": own,
                "variance": own.diagonal(dim1=1, dim2=2),
            }
            torch.testing.assert_close(moments[..., i], want[mode], **EXACT)


def test_the_order_of_rotation_is_the_cheapest():
    for C, R, d_out, d_in, groups, n_bases in [
        (3, 9, 4, 5, 1, 1),
        (2, 2, 8, 3, 1, 4),
        (5, 9, 4, 8, 2, 3),
    ]:
        costs = {}
        for A_first in (True, False):
            for B_first in (True, False) if groups == 1 else (False,):
                products = C * R * d_out * d_in * (n_bases if A_first or B_first else 1)
                inputs = n_bases * d_in**2 * (R * groups if A_first else C * d_out)
                outputs = n_bases * C * d_out**2 * (R if B_first else d_in)
                costs[A_first, B_first] = products + inputs + outputs
        best = min(costs, key=costs.get)
        assert contractions.rotation_order(C, R, d_out, d_in, groups, n_bases) == best


def rotated(n=3, C=4, D=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, C, D, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 2, 3, 7])  # few prior precisions and many go different ways
@pytest.mark.parametrize("per_datum", [False, True])
def test_sums_over_the_eigenbasis(k, per_datum):
    J = rotated()
    w = rotated(3, 6, k, seed=1).exp() if per_datum else rotated(1, 6, k, seed=1)[0].exp()
    ws = w if per_datum else w.expand(3, 6, k)
    expected = torch.einsum("nci,nik,ndi->ncdk", J, ws, J)
    torch.testing.assert_close(contractions.covariance(J, w), expected, **EXACT)
    got = contractions.variance(J.square(), w)
    torch.testing.assert_close(got, expected.diagonal(dim1=1, dim2=2).mT, **EXACT)
    if not per_datum:
        joint = torch.einsum("nci,ik,mdi->ncmdk", J, w, J).reshape(12, 12, k)
        torch.testing.assert_close(contractions.joint_covariance(J, w), joint, **EXACT)


def test_the_input_side_of_a_layer_with_one_position():
    a, w = rotated(1, 5, 3)[0], rotated(3, 4, 2, seed=1).exp()  # [n, d_in], [d_in, d_out, k]
    expected = torch.einsum("nj,jik->nik", a.square(), w)
    torch.testing.assert_close(contractions.input_side(a, w), expected, **EXACT)


@pytest.mark.parametrize("numel", [1, 20, 10**6])
def test_explicit_jacobians_are_rotated_in_chunks(numel, monkeypatch):
    monkeypatch.setattr(contractions, "CHUNK_NUMEL", numel)
    J = rotated(5, 2, 12)
    Q_B, Q_A = (torch.linalg.qr(rotated(1, d, d)[0])[0] for d in (3, 4))
    Q = torch.linalg.qr(rotated(1, 12, 12)[0])[0]
    for bases, matrix in (((Q_B, Q_A), torch.kron(Q_B, Q_A)), ((Q,), Q)):
        parts = list(contractions.dense_jacobians(J, bases))
        assert len(parts) == {1: 5, 20: 5, 10**6: 1}[numel]
        torch.testing.assert_close(torch.cat(parts), J @ matrix, **EXACT)
        assert len(list(contractions.dense_jacobians(J, bases, whole=True))) == 1


def test_chunks_of_data_and_of_prior_precisions_are_put_together():
    J, w = rotated(), rotated(1, 6, 5, seed=1)[0].exp()
    chunks = lambda: [w[:, :2], w[:, 2:]]  # noqa: E731
    for mode, wanted in (
        ("variance", contractions.variance(J.square(), w)),
        ("covariance", contractions.covariance(J, w)),
    ):
        got = contractions.contract([J[:1].clone(), J[1:].clone()], chunks, mode)
        torch.testing.assert_close(got, wanted, **EXACT)


def test_data_are_cut_into_slices_of_bounded_size(monkeypatch):
    monkeypatch.setattr(contractions, "CHUNK_NUMEL", 10)
    slices = contractions.data_chunks(7, 4)
    assert [(s.start, s.stop) for s in slices] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert len(contractions.data_chunks(7, 100, at_least=3)) == 3
