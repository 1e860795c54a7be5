"""The curvature outside the span of a draw, against projections one by one."""

import pytest
import torch

from laplace_debias.debias.inverse import inverse_inflation
from laplace_debias.debias.span import NullSpace, null_floor, null_tail, outside_span, span_of


def outside(X):
    """Squared mean distance of the rows to the others' span, by projections one by one."""
    distances = []
    for i in range(len(X)):
        others = torch.cat([X[:i], X[i + 1 :]])
        distances.append((X[i] - X[i] @ torch.linalg.pinv(others, rtol=1e-9) @ others).norm())
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


def test_rows_are_alone_however_many_there_are():
    """Eight rows of rank 4 in six dimensions: against projections onto the others."""
    g = torch.Generator().manual_seed(1)
    X = torch.zeros(8, 6, dtype=torch.float64)
    X[:6, :2] = torch.randn(6, 2, generator=g, dtype=torch.float64)
    X[6, :3] = torch.randn(3, generator=g, dtype=torch.float64)  # alone in the third dimension
    X[7] = X[0] + torch.tensor([0, 0, 0, 1e-3, 0, 2e-3], dtype=torch.float64)
    found, rank = outside_span(X)
    assert rank == 4 and (found > 0).tolist() == [False] * 6 + [True, True]
    assert float(found[7]) == pytest.approx(5e-6, rel=1e-6)
    assert float(found.mean()) == pytest.approx(outside(X), rel=1e-6)
    span, w = span_of(X), torch.rand(8, generator=g, dtype=torch.float64)
    again, rank = outside_span(X * w.sqrt()[:, None])
    torch.testing.assert_close(again, w * span.outside)  # spans do not depend on weights
    assert rank == span.rank
    tail = null_tail(span, 6, w=w)
    assert len(tail) == 6 - 4 + 1
    assert float(tail.sum()) == pytest.approx(float((w * found).sum()))


def test_units_that_no_row_reaches_are_no_dimensions():
    """Five rows of three live units span them; in eight live ones they are independent."""
    g = torch.Generator().manual_seed(2)
    X = torch.randn(5, 8, generator=g, dtype=torch.float64)
    X[:, 3:] *= 1e-9  # steep, but independent
    found, rank = outside_span(X)
    assert bool((found > 0).all()) and rank == 5
    X[:, 3:] = 0.0
    assert outside_span(X)[1] == 3 and not bool(outside_span(X)[0].any())
    assert not len(null_tail(span_of(X), 8))


def rarely_active(n, generator):
    """Rows of 30 dimensions, ten of which are those of units that are active once in fifty."""
    X = torch.randn(n, 30, generator=generator, dtype=torch.float64)
    X *= torch.logspace(0, -0.5, 30, dtype=torch.float64)
    X[:, 20:] *= torch.rand(n, 10, generator=generator, dtype=torch.float64) < 0.02
    return X


def test_the_curvature_that_was_not_drawn_is_foretold_without_bias():
    """Poisson draws: what is left lies outside the span by T on average, certain rows apart."""
    generator = torch.Generator().manual_seed(0)
    X = rarely_active(60, generator)
    pi = torch.rand(60, generator=generator, dtype=torch.float64) * 0.6 + 0.3
    errors, without = [], []
    for _ in range(400):
        drawn = torch.rand(60, generator=generator, dtype=torch.float64) < pi
        S, rest = X[drawn], X[~drawn]
        Q = torch.linalg.svd(S, full_matrices=False)
        basis = Q.Vh[Q.S > 1e-6 * Q.S[0]]
        truth = (rest - rest @ basis.T @ basis).square().sum()
        span, rare = span_of(S / pi[drawn].sqrt()[:, None]), 1 - pi[drawn]
        errors.append(float(null_tail(span, 30, rare).sum() - truth))
        without.append(float(null_tail(span, 30).sum() - truth))
    for found, right in ((errors, True), (without, False)):
        off = torch.tensor(found)
        assert (abs(float(off.mean())) < 4 * float(off.std()) / 20) == right


def test_rarely_active_units_need_a_floor_and_leave_c_to_the_others():
    """45 of 2000 rows, 60 draws, variances of rows to come: off less than with one c for all."""
    generator, ridge, n, N = torch.Generator().manual_seed(0), 1e-4, 45, 2000
    population = rarely_active(N, generator) / N**0.5
    truth, Q = torch.linalg.eigh(population.T @ population)
    off = {"plain": 0.0, "one c": 0.0, "floor": 0.0, "alone apart": 0.0}
    for _ in range(60):
        drawn = torch.randperm(N, generator=generator)[:n]
        X, x = population[drawn] * (N / n) ** 0.5, rarely_active(30, generator)
        full = ((x @ Q).square() / (truth + ridge)).sum(1).log()
        lam, V = torch.linalg.eigh(X.T @ X)
        lam, pi, ridges = (
            lam.clamp(min=0),
            torch.full((n,), n / N).double(),
            lam.new_tensor([ridge]),
        )
        span = span_of(X)
        alone, tail = (span.outside > 0).double(), null_tail(span, 30, 1 - pi)
        assert 0 < float(alone.sum()) < n
        rows = (X @ V)[:, None]
        all_rows = inverse_inflation(rows, pi, lam, ridges)
        others = inverse_inflation(rows, pi, lam, ridges, alone=alone)
        floored = lam + NullSpace(tail, float(alone.mean()), span.rank).floor(ridge, lam)
        made = (lam, all_rows * lam, floored, others * floored)
        for name, values in zip(off, made, strict=True):
            variances = ((x @ V).square() / (values + ridge)).sum(1)
            off[name] += float((variances.log() - full).abs().mean()) / 120
    best = off.pop("alone apart")
    assert all(other > 1.3 * best for other in off.values()), (best, off)
