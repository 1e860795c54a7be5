"""The correction for the inverse, over many draws of rows with steep spectra."""

import pytest
import torch

from laplace_debias.debias.inverse import inverse_inflation, resolvent_inflation

D, N_DRAWS = 20, 200
SPECTRUM = torch.logspace(2, -3, D, dtype=torch.float64)


def test_of_all_data_nothing_is_corrected():
    assert resolvent_inflation(SPECTRUM, SPECTRUM.new_tensor([0.1]), 50, 50).tolist() == [1.0]
    rows = torch.randn(50, 1, D, dtype=torch.float64)
    ones = torch.ones(50, dtype=torch.float64)
    assert inverse_inflation(rows, ones, SPECTRUM, SPECTRUM.new_tensor([0.1])).tolist() == [1.0]


def population(heavy, n=2000):
    """Rows of unequal length with a steep spectrum."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(n, D, generator=generator, dtype=torch.float64) * SPECTRUM.sqrt()
    if heavy:
        scales = torch.rand(n, 1, generator=generator, dtype=torch.float64)
        rows = rows * (0.1 + scales.square())
    return rows / n**0.5


def mean_log_ratio(rows, pi, ridge, kind, n_draws=N_DRAWS):
    """Mean log ratio of the traces of the inverses, drawn over true, and its standard error."""
    S = rows.T @ rows
    truth = (1 / (torch.linalg.eigvalsh(S) + ridge)).sum()
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(n_draws):
        drawn = torch.rand(len(rows), generator=generator, dtype=torch.float64) < pi
        X = rows[drawn] / pi[drawn].sqrt()[:, None]
        lam, Q = torch.linalg.eigh(X.T @ X)
        lam, ridges = lam.clamp(min=0), lam.new_tensor([ridge])
        c = 1.0
        if kind == "leverages":
            c = inverse_inflation((X @ Q)[:, None], pi[drawn], lam, ridges)
        elif kind == "scalar":
            c = resolvent_inflation(lam, ridges, len(X), len(rows))
        found.append(((1 / (c * lam + ridge)).sum() / truth).log())
    found = torch.stack(found)
    return float(found.mean()), float(found.std() / len(found) ** 0.5)


@pytest.mark.parametrize("ridge", [1e-4, 1e-1, 10.0])
@pytest.mark.parametrize("kind", ["scalar", "leverages"])
def test_inverses_of_alike_rows_are_right_at_every_scale(ridge, kind):
    pi = torch.full((2000,), 60 / 2000, dtype=torch.float64)
    biased, _ = mean_log_ratio(population(False), pi, ridge, "none")
    corrected, error = mean_log_ratio(population(False), pi, ridge, kind)
    assert abs(corrected) < max(0.35 * abs(biased), 4 * error)


def test_the_plain_inverse_of_a_draw_fails():
    pi = torch.full((2000,), 60 / 2000, dtype=torch.float64)
    biased, error = mean_log_ratio(population(False), pi, 1e-4, "none")
    assert biased > 0.3 and biased > 10 * error  # a third too uncertain, far beyond chance


def test_rows_drawn_by_their_length_are_corrected_by_their_own_probabilities():
    rows = population(True)
    pi = rows.square().sum(1)
    pi = (80 * pi / pi.sum()).clamp(max=1)
    biased, _ = mean_log_ratio(rows, pi, 1e-4, "none")
    corrected, error = mean_log_ratio(rows, pi, 1e-4, "leverages")
    assert biased > 0.2
    assert abs(corrected) < max(0.4 * biased, 4 * error)


def test_nearly_all_rows_need_nearly_no_correction():
    rows = population(False, n=100)
    pi = torch.full((100,), 0.9, dtype=torch.float64)
    biased, _ = mean_log_ratio(rows, pi, 1e-4, "none")
    corrected, error = mean_log_ratio(rows, pi, 1e-4, "leverages")
    overshoot, _ = mean_log_ratio(rows, pi, 1e-4, "scalar")
    assert abs(corrected) < max(0.35 * abs(biased), 4 * error)
    assert abs(overshoot) < 0.05


def test_several_rows_per_datum_count_as_one_block():
    """Copies of a row are no further rows: the correction is that of the rows themselves."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 1, D, generator=generator, dtype=torch.float64) * SPECTRUM.sqrt()
    pi = torch.full((40,), 1e-3, dtype=torch.float64)
    lam, Q = torch.linalg.eigh(X[:, 0].T @ X[:, 0])
    ridges = lam.new_tensor([1e-3, 1.0])
    one = inverse_inflation(X @ Q, pi, lam, ridges)
    four = inverse_inflation((X @ Q).repeat(1, 4, 1) / 2, pi, lam, ridges)
    torch.testing.assert_close(one, four)
    many = inverse_inflation((X @ Q).repeat(1, 2 * D, 1) / (2 * D) ** 0.5, pi, lam, ridges)
    torch.testing.assert_close(one, many)  # through [d, d] instead of [r, r]


def test_neighbours_that_are_alike_need_less_correction():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(20, 1, 6, generator=generator, dtype=torch.float64)
    alike = X.repeat_interleave(2, 0)  # each row beside itself
    apart = torch.cat([X, X])
    pi = torch.full((40,), 1e-3, dtype=torch.float64)
    lam, Q = torch.linalg.eigh(alike[:, 0].T @ alike[:, 0])
    ridges = lam.new_tensor([1e-3])
    near, far = (inverse_inflation(rows @ Q, pi, lam, ridges) for rows in (alike, apart))
    assert float(near - 1) < 0.7 * float(far - 1)


def test_many_ridges_are_interpolated():
    X = torch.randn(60, 1, D, dtype=torch.float64) * SPECTRUM.sqrt()
    pi = torch.full((60,), 1e-3, dtype=torch.float64)
    lam, Q = torch.linalg.eigh(X[:, 0].T @ X[:, 0])
    ridges = torch.logspace(-4, 4, 40, dtype=torch.float64)
    many = inverse_inflation(X @ Q, pi, lam, ridges)
    exact = torch.cat([inverse_inflation(X @ Q, pi, lam, ridge[None]) for ridge in ridges])
    torch.testing.assert_close(many, exact, rtol=0.02, atol=0)


def test_without_curvature_nothing_is_inflated():
    rows, lam = torch.zeros(4, 1, 3), torch.zeros(3)
    assert inverse_inflation(rows, torch.full((4,), 0.1), lam, torch.ones(2)).tolist() == [1, 1]


def test_without_rows_or_curvature_nothing_is_corrected():
    rows, ridges = torch.randn(5, 1, D, dtype=torch.float64), SPECTRUM.new_tensor([0.1, 1.0])
    rare = torch.full((5,), 1e-3, dtype=torch.float64)
    assert inverse_inflation(rows[:0], rare[:0], SPECTRUM, ridges).tolist() == [1.0, 1.0]
    assert inverse_inflation(rows, rare, torch.zeros_like(SPECTRUM), ridges).tolist() == [1.0, 1.0]


def few_draws():
    rows = population(False)[:60]
    lam, Q = torch.linalg.eigh(rows.T @ rows)
    return (rows @ Q)[:, None], torch.full((60,), 0.03, dtype=torch.float64), lam.clamp(min=0)


def test_many_ridges_are_interpolated_from_the_first_to_the_last():
    arguments = few_draws()
    ridges = torch.logspace(-6, 1, 200, dtype=torch.float64)
    found = inverse_inflation(*arguments, ridges)
    direct = torch.cat([inverse_inflation(*arguments, ridge[None]) for ridge in ridges])
    assert float(direct[0] - direct[-1]) > 0.1
    torch.testing.assert_close(found, direct, rtol=0.03, atol=0)
    torch.testing.assert_close(found[[0, -1]], direct[[0, -1]], rtol=1e-6, atol=0)


def test_more_directions_than_rows_inflate_as_much_as_is_allowed():
    lam, ridge = torch.full((4,), 1e6, dtype=torch.float64), torch.full((1,), 1e-3).double()
    assert float(resolvent_inflation(lam, ridge, 2, 1e9)) == pytest.approx(50, rel=1e-3)


def test_few_ridges_are_solved_one_by_one():
    arguments = few_draws()
    ridges = torch.tensor([1e-6, 3e-3, 10.0], dtype=torch.float64)
    found = inverse_inflation(*arguments, ridges)
    direct = torch.cat([inverse_inflation(*arguments, ridge[None]) for ridge in ridges])
    torch.testing.assert_close(found, direct, rtol=1e-9, atol=0)


def test_c_is_the_fixed_point():
    """At c, the leverages of the corrected rows give c again."""
    rows, probabilities, lam = few_draws()
    c = float(inverse_inflation(rows, probabilities, lam, lam.new_tensor([1e-5])))
    assert c > 1.1
    Z = (rows * (c / (c * lam + 1e-5)).sqrt())[:, 0]
    H = (Z @ Z.T).square()
    h = (Z * Z).sum(1)
    effect = 1 - H.diagonal(1).sum() / (0.5 * (h[1:].square() + h[:-1].square())).sum()
    again = 1 + float(effect * (0.97 * h / (1 - h)).mean())
    assert abs(again - c) < 1e-4 * c


def test_draws_that_count_more_often_count_more_in_c():
    """The fixed point is a mean weighted by counts; rows that are alone add nothing to it."""
    X = population(False)[:60]
    counts = torch.where(torch.arange(60) % 2 == 0, 1.8, 0.2).double()
    alone = (torch.arange(60) < 5).double()
    X = X * counts.sqrt()[:, None]
    lam, Q = torch.linalg.eigh(X.T @ X)
    pi, ridge = 0.03 / counts, lam.new_tensor([1e-5])
    c = inverse_inflation((X @ Q)[:, None], pi, lam, ridge, counts=counts, alone=alone)
    Z = (X @ Q) * (c / (c * lam + 1e-5)).sqrt()
    H = (Z @ Z.T).square() / counts / counts[:, None]  # alike or not, however often they count
    effect = 1 - H.diagonal(1).sum() / (0.5 * (H.diagonal()[1:] + H.diagonal()[:-1])).sum()
    h = Z.square().sum(1).clamp(max=0.98)
    used = (counts * (1 - alone) * (1 - pi) * h / (1 - h)).sum() / counts.sum()
    assert float(c) > 1.1
    assert float(c) == pytest.approx(1 + float(effect * used), rel=1e-4)
