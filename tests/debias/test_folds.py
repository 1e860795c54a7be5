"""Cross-fitted eigenvalues: identities, null space, order, and what held-out data buy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.isotonic import isotonic_regression

from laplace_debias.debias.eigen import null_tolerance
from laplace_debias.debias.folds import (
    crossfit_factor,
    crossfit_spectrum,
    curvatures_along,
    fold_directions,
    isotonic,
    sums_of_others,
)


def gram(rows):
    return rows.T @ rows / len(rows)


def random_rotation(d, generator):
    return torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=generator))[0]


def oracle_eigenvalues(rows, folds):
    """Rank by rank and fold by fold from the rows themselves, for factors of full rank."""
    d, n = rows.shape[1], len(rows)
    lam = [0.0] * d
    for fold in folds:
        rest = torch.tensor([r for r in range(n) if r not in set(fold.tolist())])
        _, vectors = torch.linalg.eigh(gram(rows[rest]))
        for rank in range(d):
            lam[rank] += float((rows[fold] @ vectors[:, rank]).square().sum()) / n
    return torch.tensor(lam, dtype=torch.float64)


@pytest.mark.parametrize("sizes", [[30, 30], [20, 50], [10, 20, 30], [9] * 8])
def test_equals_the_definition(sizes):
    torch.manual_seed(0)
    rows = torch.randn(sum(sizes), 6, dtype=torch.float64) * torch.logspace(0, 1, 6).double()
    folds = torch.arange(sum(sizes)).split(sizes)
    lam, Q = crossfit_factor([gram(rows[f]) for f in folds], sizes, monotone=False)
    torch.testing.assert_close(lam, oracle_eigenvalues(rows, folds))
    mu, _ = torch.linalg.eigh(gram(rows))
    torch.testing.assert_close(Q @ torch.diag(mu) @ Q.T, gram(rows))
    projected, _ = crossfit_factor([gram(rows[f]) for f in folds], sizes)
    expected = isotonic_regression(lam.numpy())
    torch.testing.assert_close(projected, torch.as_tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("n_rows", [3, 50])
@pytest.mark.parametrize("n_folds", [2, 5])
def test_identical_folds_give_the_single_batch_eigenvalues(n_rows, n_folds):
    torch.manual_seed(0)
    E = gram(torch.randn(n_rows, 7, dtype=torch.float64))
    lam, Q = crossfit_factor([E] * n_folds, range(1, n_folds + 1))
    torch.testing.assert_close(lam, torch.linalg.eigvalsh(E).clamp(min=0))
    torch.testing.assert_close(Q @ torch.diag(lam) @ Q.T, E)


@settings(max_examples=40, deadline=None)
@given(d=st.integers(1, 8), sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4))
def test_trace_is_kept_and_order_rises(d, sizes):
    generator = torch.Generator().manual_seed(d + 100 * sum(sizes))
    rows = torch.randn(sum(sizes), d, dtype=torch.float64, generator=generator)
    means = [gram(part) for part in rows.split(sizes)]
    lam, _ = crossfit_factor(means, sizes)
    torch.testing.assert_close(lam.sum(), gram(rows).trace())
    assert (lam.diff() >= 0).all() and (lam >= 0).all()


def test_null_space_rule_is_invariant_under_rotation():
    """Turning the basis of the null space changes neither the curvatures nor the factor."""
    generator = torch.Generator().manual_seed(0)
    d, n = 9, 3
    others = gram(torch.randn(n, d, dtype=torch.float64, generator=generator))
    held_out = gram(torch.randn(20, d, dtype=torch.float64, generator=generator))
    mu, Q = torch.linalg.eigh(others)
    turned = Q.clone()
    turned[:, : d - n] = Q[:, : d - n] @ random_rotation(d - n, generator)
    tol = null_tolerance(others)
    lam, lam_turned = (curvatures_along(held_out, basis, mu, null_tol=tol) for basis in (Q, turned))
    torch.testing.assert_close(lam, lam_turned)
    torch.testing.assert_close(lam.sum(), held_out.trace())
    assert (lam[: d - n] == lam[0]).all()
    factors = [basis @ torch.diag(lam) @ basis.T for basis in (Q, turned)]
    torch.testing.assert_close(*factors)
    plain = [(basis * (held_out @ basis)).sum(0) for basis in (Q, turned)]
    assert not torch.allclose(*plain)  # without the rule the basis would matter


def test_the_whole_estimate_turns_with_its_data():
    """Rank-deficient folds in rotated coordinates give the rotated factor."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(6, 10, dtype=torch.float64, generator=generator)
    R = random_rotation(10, generator)
    estimates = []
    for data in (rows, rows @ R.T):
        lam, Q = crossfit_factor([gram(data[:3]), gram(data[3:])], [3, 3])
        assert (lam[:4] == lam[0]).all() and lam[0] > 0
        estimates.append(Q @ torch.diag(lam) @ Q.T)
    torch.testing.assert_close(estimates[1], R @ estimates[0] @ R.T)


def test_held_out_curvatures_are_unbiased_and_those_of_the_same_data_are_not():
    """Against the true covariance along the same directions, over 400 draws."""
    generator = torch.Generator().manual_seed(0)
    d, m, n_draws = 8, 12, 400
    Sigma = torch.diag(torch.logspace(-1, 1, d, dtype=torch.float64))
    root = Sigma.sqrt()
    errors = {"held out": [], "same data": []}
    for _ in range(n_draws):
        folds = [
            gram(torch.randn(m, d, dtype=torch.float64, generator=generator) @ root)
            for _ in range(2)
        ]
        mu, Q = torch.linalg.eigh(folds[0])
        truth = (Q * (Sigma @ Q)).sum(0)
        errors["held out"].append(curvatures_along(folds[1], Q, mu, null_tol=0.0) - truth)
        errors["same data"].append(mu - truth)
    z = {}
    for name, values in errors.items():
        values = torch.stack(values)
        z[name] = values.mean(0) / (values.std(0) / n_draws**0.5)
    assert z["held out"].abs().max() < 3.5
    assert z["same data"][-1] > 10 and z["same data"][0] < -10


def test_crossfit_beats_two_batches_and_one_batch_in_error():
    """Frobenius error of the factor itself, mean over 100 draws of the same 24 rows for all."""
    generator = torch.Generator().manual_seed(0)
    d, m = 12, 24
    Sigma = torch.diag(torch.logspace(-2, 1, d, dtype=torch.float64))
    error = {"crossfit": 0.0, "raw": 0.0, "two-batch": 0.0}
    for _ in range(100):
        rows = torch.randn(m, d, dtype=torch.float64, generator=generator) @ Sigma.sqrt()
        folds = [gram(rows[: m // 2]), gram(rows[m // 2 :])]
        _, Q = torch.linalg.eigh(folds[0])
        estimates = {"two-batch": ((Q * (folds[1] @ Q)).sum(0), Q)}
        estimates["crossfit"] = crossfit_factor(folds, [1, 1])
        estimates["raw"] = crossfit_factor(folds, [1, 1], monotone=False)
        for name, (lam, Q) in estimates.items():
            error[name] += float((Q @ torch.diag(lam) @ Q.T - Sigma).norm())
    assert error["crossfit"] <= error["raw"] < error["two-batch"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=20))
def test_isotonic_is_the_projection(values):
    values = torch.tensor(values, dtype=torch.float64)
    expected = torch.as_tensor(isotonic_regression(values.numpy()), dtype=torch.float64)
    torch.testing.assert_close(isotonic(values), expected)


def test_single_precision_factors_and_errors():
    torch.manual_seed(0)
    folds = [gram(torch.randn(9, 4)) for _ in range(2)]
    lam, Q = crossfit_factor(folds, [9, 9])
    assert lam.dtype == Q.dtype == torch.float64
    bad = folds[0].clone()
    bad[1, 1] = float("nan")
    with pytest.raises(ValueError, match="finite.*A of 0.weight"):
        crossfit_factor([folds[0], bad], [9, 9], name="A of 0.weight")
    with pytest.raises(ValueError, match="two folds"):
        crossfit_factor(folds[:1], [9])
    with pytest.raises(ValueError, match="one shape"):
        crossfit_factor([folds[0], folds[1][:2, :2]], [9, 9])
    with pytest.raises(ValueError, match="positive number of data"):
        crossfit_factor(folds, [9, 0])


def test_directions_of_large_factors_in_single_precision_change_nothing(monkeypatch):
    """Rank-deficient and tiny factors too; and float64 takes over where LAPACK gives up."""
    torch.manual_seed(0)
    scales = torch.logspace(0, -2, 80)
    for n_rows, size in ((30, 1.0), (200, 1e-12)):
        folds = [gram((torch.randn(n_rows, 80) + 0.3) * scales) * size for _ in range(2)]
        expected, _ = crossfit_factor(folds, [1, 1])
        with monkeypatch.context() as patch:
            patch.setattr("laplace_debias.debias.folds.SINGLE_FROM", 1)
            lam, _ = crossfit_factor(folds, [1, 1])
            torch.testing.assert_close(lam, expected, rtol=1e-3, atol=1e-6 * float(expected[-1]))
            assert not torch.equal(lam, expected)

            plain = torch.linalg.eigh

            def fail(matrix, plain=plain):
                if matrix.dtype == torch.float32:
                    raise torch.linalg.LinAlgError("no")
                return plain(matrix)

            patch.setattr(torch.linalg, "eigh", fail)
            assert torch.equal(crossfit_factor(folds, [1, 1])[0], expected)


@pytest.mark.parametrize("ratio", [1, 10, 1e3, 1e6])
@pytest.mark.parametrize("large", [0, 1, 2])
def test_null_space_of_the_other_folds_survives_a_large_held_out_fold(ratio, large):
    """Two folds of low rank, one of full rank and many more data: as if the two stood alone."""
    gen = torch.Generator().manual_seed(0)
    d, sizes = 8, [1.0, 1.0, 1.0]
    rows = [torch.randn(m, d, generator=gen, dtype=torch.float64) for m in (2, 2, 2)]
    rows[large] = torch.randn(40, d, generator=gen, dtype=torch.float64)
    means = [r.T @ r / len(r) for r in rows]
    sizes[large] = ratio
    *_, lam = crossfit_spectrum(means, sizes, monotone=False)
    expected = torch.zeros(d, dtype=torch.float64)
    for k in range(3):
        # the null space by its known rank, which no rounding can hide
        rest = sum(sizes[j] * means[j] for j in range(3) if j != k)
        rank = 4 if k == large else d
        Q = torch.linalg.svd(rest).U.flip(-1)  # ascending
        along = (Q * (means[k] @ Q)).sum(0)
        along[: d - rank] = along[: d - rank].mean()
        expected += sizes[k] / sum(sizes) * along
    torch.testing.assert_close(lam, expected, rtol=1e-7, atol=1e-10)


def test_sums_of_others_add_up_and_take_nothing_away():
    terms = [torch.tensor(v, dtype=torch.float64) for v in (1e16, 1.0, 2.0)]
    assert sum(terms) - terms[0] != 3, "what subtracting would give"
    assert float(next(sums_of_others(terms))) == 3
    for K in (2, 3, 5):
        powers = [torch.tensor(2.0**k) for k in range(K)]
        expected = [2.0**K - 1 - 2.0**k for k in range(K)]
        assert [float(total) for total in sums_of_others(powers)] == expected


def test_large_factors_in_single_precision_keep_their_scale(monkeypatch):
    monkeypatch.setattr("laplace_debias.debias.folds.SINGLE_FROM", 2)
    M = 1e5 * gram(torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).double())
    mu, Q = fold_directions(M, torch.float32)
    torch.testing.assert_close(mu, torch.linalg.eigvalsh(M), rtol=1e-5, atol=0)
    torch.testing.assert_close((Q * mu) @ Q.T, M, rtol=1e-4, atol=1e-4 * float(M.max()))


def test_small_curvatures_of_many_data_are_no_null_space_in_single_precision():
    """A steep spectrum below single precision's zero, from more data than dimensions."""
    generator = torch.Generator().manual_seed(0)
    d, n = 30, 90
    scale = torch.logspace(0, -4, d, dtype=torch.float64)  # eigenvalues fall over eight orders
    rows = torch.randn(2 * n, d, dtype=torch.float64, generator=generator) * scale
    exact, _ = crossfit_factor([gram(part) for part in rows.split(n)], [n, n])
    folds = [gram(part).float() for part in rows.split(n)]
    found, _ = crossfit_factor(folds, [n, n])
    averaged, _ = crossfit_factor(folds, [n, n], null_tol=null_tolerance(folds[0]))
    off, far_off = (float((lam / exact).log().abs().max()) for lam in (found, averaged))
    assert off < 0.5 < 1.5 < far_off
    few, _ = crossfit_factor(folds, [20, 20])  # said to be of fewer data than dimensions
    assert torch.equal(few, crossfit_factor(folds, [20, 20], null_tol=null_tolerance(folds[0]))[0])
