"""The curvature outside the span of a draw, against projections one by one."""

import pytest
import torch

from laplace_debias.debias.inverse import inverse_inflation
from laplace_debias.debias.span import null_floor, null_tail, span_of


def outside(X):
    """Squared mean distance of the rows to the others' span, by projections one by one."""
    distances = []
    for i in range(len(X)):
        others = torch.cat([X[:i], X[i + 1 :]])
        Q = torch.linalg.qr(others.T)[0]
        distances.append((X[i] - Q @ (Q.T @ X[i])).norm())
    return float(torch.stack(distances).square().mean())


def test_the_tail_is_held_out_curvature_outside_the_span():
    X = torch.randn(6, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    X = X * torch.logspace(0, -2, 12, dtype=torch.float64)
    tail = null_tail(span_of(X), 12)
    assert float(tail.sum()) == pytest.approx(6 * outside(X))
    before = torch.tensor([outside(X[0::2]), outside(X[1::2])]).mean()
    fall = outside(X) / float(before) / ((12 - 6 + 1) / (12 - 3 + 1))
    assert 0 < fall < 1
    torch.testing.assert_close(tail[3] / tail[0], tail.new_tensor(fall), rtol=1e-5, atol=0)
    assert len(tail) == 7
    none = null_tail(span_of(X.T), 6)
    assert none.tolist() == [] and null_floor(none, 1.0) == 0.0
    assert len(null_tail(span_of(X[:1]), 12)) == 12


def test_the_floor_is_a_geometric_mean_that_knows_the_ridge():
    tail = torch.tensor([4.0, 1.0, 0.25], dtype=torch.float64)
    assert null_floor(tail, 1e-12) == pytest.approx(1.0)
    assert null_floor(tail, 0.5) == pytest.approx((4.5 * 1.5 * 0.75) ** (1 / 3) - 0.5)
    assert null_floor(tail, 1e6) == pytest.approx(1.75, rel=1e-3)


@pytest.mark.parametrize("steep", [0.0, 0.02, 0.1])
def test_inverses_of_few_rows_need_a_floor_and_no_inflation(steep):
    """Decades per direction: 10 rows of 30 dimensions, 100 draws, variances of rows to come."""
    d, n, ridge = 30, 10, 1e-3
    spectrum = 10 ** (-steep * torch.arange(d, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)

    def rows(m):
        return torch.randn(m, d, generator=generator, dtype=torch.float64) * spectrum.sqrt()

    off = {"single": 0.0, "floor": 0.0, "floor and c": 0.0}
    for _ in range(100):
        X, new = rows(n) / n**0.5, rows(20)
        lam, Q = torch.linalg.eigh(X.T @ X)
        lam, tail, x = lam.clamp(min=0), null_tail(span_of(X), d), (new @ Q).square()
        truth = (new.square() / (spectrum + ridge)).sum(1).log()
        floor = null_floor(tail, ridge)
        c = inverse_inflation(
            (X @ Q)[:, None], torch.full((n,), 1e-9), lam, lam.new_tensor([ridge + floor])
        )
        made = (lam, lam + floor, c * lam + floor)
        for name, values in zip(off, made, strict=True):
            variances = (x / (values + ridge)).sum(1)
            off[name] += float((variances.log() - truth).abs().mean()) / 200
    assert off["floor"] < 0.2 and off["single"] > 1.5
    assert off["floor"] < 0.75 * off["floor and c"]
