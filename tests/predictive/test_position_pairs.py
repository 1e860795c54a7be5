"""Variances from pairs of positions, against explicit Jacobians."""

import pytest
import torch
from torch import nn

from laplace_debias import Laplace, linearized_predictive
from laplace_debias.predictive import layer_jacobians, position_pairs, predictions, predictor
from tests.fitted_predictive import EXACT


def basis(d, r, like):
    return torch.linalg.qr(torch.randn(d, d, **like))[0][:, :r]


@pytest.mark.parametrize("R", [1, 2, 5])
@pytest.mark.parametrize("ranks", [(4, 6), (2, 6), (4, 3), (1, 2)])
def test_pairs_give_the_dense_variances(R, ranks, monkeypatch):
    n, C, d_out, d_in = 5, 3, 4, 6
    like = {"dtype": torch.float64, "generator": torch.Generator().manual_seed(R)}
    G, A = torch.randn(n, C, d_out, R, **like), torch.randn(n, R, 1, d_in, **like)
    Q_B, Q_A = basis(d_out, ranks[0], like), basis(d_in, ranks[1], like)
    frames = [
        Q if Q.shape[1] == len(Q) else torch.cat([torch.eye(len(Q)).double() - Q @ Q.T, Q], dim=1)
        for Q in (Q_B, Q_A)
    ]
    ws = [torch.rand(frames[1].shape[1], frames[0].shape[1], k, **like) for k in (2, 1)]
    for w in ws:  # one variance along a null space
        if ranks[0] < d_out:
            w[:, :d_out] = w[:, :1].clone()
        if ranks[1] < d_in:
            w[:d_in] = w[:1].clone()
    monkeypatch.setattr(position_pairs, "_ROWS", 2)  # several chunks
    monkeypatch.setattr("laplace_debias.predictive.contractions.CHUNK_NUMEL", 1)
    got = position_pairs.pair_moments(lambda s: A[s], G, Q_B, Q_A, lambda: ws)
    J = torch.einsum("ncor,nrgi->ncoi", G, A)
    rotated = frames[0].T @ J @ frames[1]
    expected = torch.einsum("ncoi,iok->nck", rotated.square(), torch.cat(ws, dim=-1))
    torch.testing.assert_close(got, expected, **EXACT)


def fitted():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3, 2), nn.Tanh(), nn.Conv2d(6, 8, 1), nn.Flatten(), nn.Linear(32, 12)
    ).double()
    X = torch.randn(20, 2, 5, 5).double()
    la = Laplace(net, "classification", "all", "kron", debias=True)
    la.fit((X[:10], torch.arange(10)), curvature_loader=(X[10:], torch.arange(10)), n_data=100)
    return la, X


def test_pairs_and_jacobians_agree_on_a_network(monkeypatch):
    la, X = fitted()
    taken = []

    def found(pay):
        monkeypatch.setattr(layer_jacobians, "pairs_pay", lambda *a: taken.append(pay) or pay)
        return linearized_predictive(la, X, [0.3, 3.0], diagonal_output=True).covariance

    torch.testing.assert_close(found(True), found(False), **EXACT)
    assert True in taken and False in taken


@pytest.mark.parametrize(
    ("C", "R", "d_out", "d_in", "k", "pay"),
    [
        (20, 16, 2048, 512, 1, True),
        (20, 16, 2048, 512, 100, False),  # a product per prior precision
        (20, 1024, 64, 64, 1, False),
        (1, 9, 64, 576, 1, False),
    ],
)
def test_pairs_are_taken_where_they_cost_less(C, R, d_out, d_in, k, pay):
    bases = torch.empty(d_out, d_out, device="meta"), torch.empty(d_in, d_in, device="meta")
    G = torch.empty(1, C, d_out, R, device="meta")
    assert position_pairs.pairs_pay(G, bases, torch.ones(k)) == pay


def test_more_data_with_fewer_outputs_at_a_time_change_nothing(monkeypatch):
    la, X = fitted()
    whole = linearized_predictive(la, X, diagonal_output=True).covariance
    contract, seen = layer_jacobians.LayerJacobians.contract, []

    def watched(self, x, mode, posteriors, at_once=None, choose=None, **options):
        seen.append((len(x), at_once))
        return contract(self, x, mode, posteriors, at_once, choose, **options)

    monkeypatch.setattr(layer_jacobians.LayerJacobians, "contract", watched)
    made = predictor.StructuredPredictor(la)
    held, per_output = made._layers.prepare(X)
    monkeypatch.setattr(predictions, "DATA_AT_ONCE", 10)
    made.memory_budget = 10 * (held + 9 * per_output) + 1
    torch.testing.assert_close(made(X, diagonal_output=True).covariance, whole, **EXACT)
    assert seen == [(10, 6), (10, 6)]
