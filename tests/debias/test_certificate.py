"""The estimated distance: its parts against dense matrices, and its report."""

import math

import pytest
import torch
from torch import nn

from laplace_debias.debias.certificate import (
    LEFT_OUT,
    SPLITS,
    TILT,
    TILTED,
    errors_and_bias,
    estimated_distance,
    evenly_split,
    log_deviations,
    probe_gradients,
)
from laplace_debias.debias.corrected import corrected_block
from laplace_debias.debias.drawn import DrawnFactor
from laplace_debias.debias.drawn_rows import ALIKE, DrawnRows
from laplace_debias.debias.eigen import EigenFactors
from laplace_debias.kfac.counts import FitReport
from laplace_debias.kfac.engine import Engine


def spd(d, seed):
    X = torch.randn(2 * d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return X.T @ X


@pytest.fixture
def posterior():
    """Factors of a weight and a bias, and gradients at five probes."""
    factors = [(spd(3, 0), spd(2, 1)), (spd(3, 2), None)]
    J = [torch.randn(5, 3, d, dtype=torch.float64) for d in (2, 1)]
    return factors, J, torch.tensor([0.7, 1.3], dtype=torch.float64)


def blocks_of(factors):
    found = []
    for B, A in factors:
        lam_B, Q_B = torch.linalg.eigh(B)
        lam_A, Q_A = (None, None) if A is None else torch.linalg.eigh(A)
        found.append(EigenFactors(Q_B, lam_B, Q_A, lam_A))
    return found


def along_A(factors, J):
    return [
        g if A is None else g @ torch.linalg.eigh(A)[1]
        for (_, A), g in zip(factors, J, strict=True)
    ]


def dense(factors, J, ridges):
    total = 0
    for (B, A), g, ridge in zip(factors, J, ridges, strict=True):
        P = B if A is None else torch.kron(B, A)
        P = P + ridge * torch.eye(len(P), dtype=P.dtype)
        flat = g.flatten(1)
        total = total + (flat * torch.linalg.solve(P, flat.T).T).sum(1)
    return 0.5 * total.log()


def test_deviations_equal_the_dense_ones(posterior):
    factors, J, ridges = posterior
    found = log_deviations(blocks_of(factors), along_A(factors, J), ridges)
    torch.testing.assert_close(found, dense(factors, J, ridges))


def test_gradients_are_those_of_the_output_in_a_direction():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    engine = Engine(net, "classification")
    X, v = torch.randn(4, 2, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    J = probe_gradients(engine, X, v)
    for i in range(4):
        net.zero_grad()
        (net(X[i : i + 1])[0] @ v[i]).backward()
        for part, p in zip(J, net.parameters(), strict=True):
            torch.testing.assert_close(part[i], p.grad.reshape(len(p), -1))
    assert engine.cost.backward == 0  # probes serve no factor


def test_splits_are_the_three_ways_to_halve_four_groups():
    halves = {frozenset(map(frozenset, split)) for split in SPLITS}
    pairs = ((0, 1), (0, 2), (0, 3))
    assert halves == {frozenset(map(frozenset, ((p, q), {1, 2, 3} - {q}))) for p, q in pairs}
    for split, counts in zip(SPLITS, zip(TILTED[0::2], TILTED[1::2], strict=True), strict=True):
        for half, c in zip(split, counts, strict=True):
            assert {g for g in range(4) if c[g] > 1} == set(half) and sum(c) == 4
            assert max(c) - 1 == pytest.approx(TILT) and 1 - min(c) == pytest.approx(TILT)


def test_each_group_is_left_out_once():
    for left, counts in enumerate(LEFT_OUT):
        assert counts[left] == 0 and sum(counts) == pytest.approx(4)
        assert {c for i, c in enumerate(counts) if i != left} == {4 / 3}


@pytest.mark.parametrize("corrected", [True, False])
def test_errors_and_bias_that_are_known_are_found(corrected):
    """Theta = linear + b / n^p: errors are linear in the counts, b with the number of draws."""
    g = torch.Generator().manual_seed(0)
    slopes, b = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((4, 7), (7,)))
    linear = [torch.tensor(c, dtype=torch.float64) @ slopes / 4 for c in (*TILTED, *LEFT_OUT)]
    theta = slopes.mean(0) + b
    grown = b * (4 / 3) ** (2 if corrected else 1)
    fewer = torch.stack(linear[6:]) + grown
    errors, bias = errors_and_bias(theta, torch.stack(linear[:6]), fewer, corrected=corrected)
    for error, (one, other) in zip(errors, SPLITS, strict=True):
        expected = (slopes[list(one)].mean(0) - slopes[list(other)].mean(0)) / 2
        torch.testing.assert_close(error, expected)
    torch.testing.assert_close(bias, b)
    grown = b * (1 + TILT**2) ** (2 if corrected else 1)
    tilted = torch.stack(linear[:6]) + grown
    torch.testing.assert_close(errors_and_bias(theta, tilted, corrected=corrected)[1], b)


def test_halves_of_hardly_more_draws_than_dimensions_err_more_than_the_whole():
    """36 draws in 16 dimensions: halves foretell a far too large error, tilted ones do not."""
    d, n, N, ridge = 16, 36, 4000, 1e-4
    g = torch.Generator().manual_seed(0)
    spectrum = torch.logspace(0, -2, d, dtype=torch.float64)
    X = torch.randn(N, d, generator=g, dtype=torch.float64) * spectrum.sqrt()
    J = [torch.randn(16, d, 1, generator=g, dtype=torch.float64) * spectrum.sqrt()[:, None]]
    lam, Q = torch.linalg.eigh(X.T @ X)
    ridges = torch.tensor([ridge * N], dtype=torch.float64)
    full = log_deviations([EigenFactors(Q, lam)], J, ridges)
    truth, found, of_halves = 0.0, 0.0, 0.0
    for _ in range(30):
        rows = X[torch.randperm(N, generator=g)[:n]]
        pi, groups = torch.full((n,), n / N, dtype=torch.float64), torch.arange(n) % 4
        factor, drawn = DrawnFactor(()), DrawnRows()
        drawn.add(pi, groups, 1.0, 1.0)
        factor.add(rows[:, None], 1 / pi, groups, torch.arange(n), 0, n)
        factor.close(1.0, 1.0, distinct=True)

        def theta(counts, factor=factor, drawn=drawn):
            block = corrected_block(factor.spectrum(drawn, 1.0, counts), None, float(ridges))
            return log_deviations([block], J, ridges)

        whole = theta(ALIKE)
        truth += float((whole - full).abs().mean())
        tilted, left_out = (torch.stack([theta(c) for c in all_]) for all_ in (TILTED, LEFT_OUT))
        errors, bias = errors_and_bias(whole, tilted, left_out)
        found += estimated_distance(errors / 3**0.5, bias, 256)[0]
        halves = [[2.0 * (i in half) for i in range(4)] for split in SPLITS for half in split]
        cut = torch.stack([theta(c) for c in halves])
        errors, bias = (cut[0::2] - cut[1::2]) / 2, (cut.mean(0) - whole) / 3
        of_halves += estimated_distance(errors / 3**0.5, bias, 256)[0]
    assert 0.8 < found / truth < 1.7
    assert of_halves / truth > 2


def test_errors_of_known_size_are_found():
    """With k independent parts of size s / sqrt(k) the mean is that of a normal's size, by c_4."""
    errors = torch.full((3, 50), 0.1 / 3**0.5, dtype=torch.float64)
    mean, deviation = estimated_distance(errors, torch.zeros(50), n_draws=100_000)
    assert mean == pytest.approx(0.1 * (2 / math.pi) ** 0.5 / 0.921318, rel=0.03)
    assert deviation > 0.8 * mean
    assert deviation == pytest.approx(0.1 * (3 - 1.1027**2) ** 0.5, rel=0.3)  # of |t_3|
    biased, _ = estimated_distance(errors, torch.full((50,), 1.0), n_draws=10_000)
    assert biased == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("n_probes", [1, 20])
def test_the_estimate_is_right_on_average_and_the_bound_holds(n_probes):
    """Groups of known noise: mean estimate over mean truth, and how often the truth is below."""
    generator = torch.Generator().manual_seed(3)
    size = torch.rand(n_probes, generator=generator, dtype=torch.float64) + 0.5
    truths, estimates, below = [], [], []
    for _ in range(2000):
        groups = torch.randn(4, n_probes, generator=generator, dtype=torch.float64) * size
        pairs = [(groups[list(a)].mean(0) - groups[list(b)].mean(0)) / 2 for a, b in SPLITS]
        errors = torch.stack(pairs) / 3**0.5
        estimate, error = estimated_distance(errors, torch.zeros(n_probes), 300)
        truths.append(float(groups.mean(0).abs().mean()))
        estimates.append(estimate)
        below.append(truths[-1] <= estimate + 2 * error)
    assert sum(estimates) / sum(truths) == pytest.approx(1.0, abs=0.06)
    assert sum(below) / len(below) > 0.9


@pytest.mark.parametrize(("n_probes", "share"), [(8, 0.95), (32, 1.0)])
def test_splits_of_independent_draws_stay_as_they_are(n_probes, share):
    """Chance alone hardly brings the errors down: less than 5 % on average with eight probes."""
    generator = torch.Generator().manual_seed(4)
    errors = torch.randn(2000, 3, n_probes, generator=generator, dtype=torch.float64)
    kept = torch.stack([evenly_split(e) for e in errors])
    assert bool((kept.abs() <= errors.abs()).all())
    assert float(kept.square().mean() / errors.square().mean()) >= share - 1e-3


def test_the_error_of_draws_along_a_line_is_not_taken_for_that_of_neighbours():
    """Means over evenly spread points on a circle of smooth functions, whose true means are 0."""
    generator, n = torch.Generator().manual_seed(5), 32
    truths, plain, even = [], [], []
    k = torch.arange(1, 97, dtype=torch.float64)
    for _ in range(200):
        phases = torch.rand(40, 1, 96, generator=generator, dtype=torch.float64)
        x = torch.arange(n, dtype=torch.float64)[:, None] / n
        f = (k**-2 * torch.cos(2 * math.pi * (k * x + phases))).sum(2)  # [probes, draws]
        groups = torch.stack([f[:, g::4].mean(1) for g in range(4)])
        errors = torch.stack(
            [(groups[list(a)].mean(0) - groups[list(b)].mean(0)) / 2 for a, b in SPLITS]
        )
        truths.append(float(f.mean(1).abs().mean()))
        zeros, scale = torch.zeros(len(f)), 3**-0.5
        plain.append(estimated_distance(errors * scale, zeros, 64)[0])
        even.append(estimated_distance(evenly_split(errors) * scale, zeros, 64)[0])
    ratios = [sum(found) / sum(truths) for found in (plain, even)]
    assert ratios[1] < 0.8 * ratios[0]
    assert ratios[1] > 1  # still on the safe side


def test_a_report_has_three_lines_and_says_when_it_does_not_know():
    known = ({"passes": 1.0}, 0.031, 0.012, "spent", 0.1)
    lines = str(FitReport("auto", 64, 2000, 32, 5000, 2000, *known)).splitlines()
    assert len(lines) == 3
    assert "3.1 %" in lines[1] and "1.2 %" in lines[1] and "spent" in lines[2]
    assert "prior precision 0.1 " in lines[1]
    assert "not estimated" in str(FitReport("single", 64, 64, 0, 5000, 0))
