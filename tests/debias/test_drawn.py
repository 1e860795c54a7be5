"""Rounds of draws: unbiased, in groups, and exact when everything was drawn."""

import torch

from laplace_debias.debias.drawn import N_GROUPS, DrawnFactor, DrawnRows, corrected_block
from laplace_debias.debias.pairs import draw_pairs

ROWS = torch.randn(30, 1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ROWS = ROWS * torch.linspace(0.2, 2, 30, dtype=torch.float64)[:, None, None]
DENSE = ROWS[:, 0].T @ ROWS[:, 0]


def run(sizes, generator, distinct=True):
    """Rounds of these sizes over all 30 rows, by their squared lengths."""
    factor, drawn, precision = DrawnFactor(()), DrawnRows(), 0.0
    scores = ROWS.square().sum((1, 2))[:, None].clone()
    for m in sizes:
        draw = draw_pairs(scores, m, torch.arange(30), generator)
        free = draw.probabilities < 1
        turns = free.long().cumsum(0) + torch.randint(N_GROUPS, (), generator=generator)
        groups = torch.where(free, turns % N_GROUPS, -1)
        left = float(scores.sum() - scores[draw.data[~free]].sum())
        new = int(free.sum()) / left**2 if bool(free.any()) else float("inf")
        share = 1.0 if new == float("inf") else new / (new + precision)
        precision += new
        first = len(drawn.weights)
        drawn.add(draw.probabilities, groups, share, 1.0)
        at = torch.arange(len(draw))
        factor.add(ROWS[draw.data], 1 / draw.probabilities, groups, at, first, len(draw))
        factor.close(share, 1.0, distinct=distinct)
        scores[draw.data] = 0.0
    return factor, drawn


def test_rounds_and_groups_are_unbiased():
    generator = torch.Generator().manual_seed(0)
    found = torch.stack([run((8, 8), generator)[0].sums for _ in range(1500)])
    for estimate in (found.mean(1), found[:, 0], found[:, 3]):  # all groups, or one alone
        error = estimate.std(0) / len(estimate) ** 0.5
        assert bool(((estimate.mean(0) - DENSE).abs() < 5 * error + 1e-9).all())


def test_rounds_that_ignore_what_is_known_are_biased():
    """Without the known sum, a second round without replacement misses what the first has."""
    generator = torch.Generator().manual_seed(0)
    found = torch.stack([run((8, 8), generator, distinct=False)[0].sums for _ in range(300)])
    assert float(found.mean((0, 1)).trace()) < 0.9 * float(DENSE.trace())


def test_everything_drawn_is_exact():
    factor, drawn = run((8, 8, 30), torch.Generator().manual_seed(0))
    for group in factor.sums:
        torch.testing.assert_close(group, DENSE)
    torch.testing.assert_close(factor.known, DENSE)
    torch.testing.assert_close(drawn.weights, torch.ones(30, dtype=torch.float64))


def test_the_rows_weights_are_those_of_the_sum():
    factor, drawn = run((8, 8), torch.Generator().manual_seed(3))
    for groups in ((0, 1, 2, 3), (0, 2)):
        chosen, weights = drawn.of(groups)
        total = torch.zeros(4, 4, dtype=torch.float64)
        for rows, at in factor.rows:
            keep = chosen[at]
            X = rows[keep, 0] * weights[at[keep]].sqrt()[:, None]
            total += X.T @ X
        torch.testing.assert_close(total, factor.sums[list(groups)].mean(0))


def test_a_block_without_correction_is_the_plain_one():
    factor, drawn = run((20,), torch.Generator().manual_seed(0))
    spectrum = factor.spectrum(drawn, range(4), 2.0)
    block = corrected_block(spectrum, None, 1.0, correct=False)
    dense = block.Q_B @ torch.diag(block.lam_B) @ block.Q_B.T
    torch.testing.assert_close(dense, 2 * factor.sums.mean(0))


def test_a_corrected_block_is_larger_and_a_kronecker_product():
    factor, drawn = run((12,), torch.Generator().manual_seed(0))
    spectrum = factor.spectrum(drawn, range(4), 100.0)
    A = (torch.eye(3, dtype=torch.float64), torch.tensor([1e-10, 1.0, 2.0], dtype=torch.float64))
    plain = corrected_block(spectrum, A, 1e-3, correct=False)
    block = corrected_block(spectrum, A, 1e-3)
    assert bool((block.table >= plain.table).all())
    torch.testing.assert_close(block.lam_A[0], A[1][0], rtol=0.15, atol=0)  # its ridge is large
    assert float(block.lam_A[2] / A[1][2]) > 1.1
