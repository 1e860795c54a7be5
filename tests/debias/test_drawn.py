"""Rounds of draws: unbiased, in groups, and exact when everything was drawn."""

import pytest
import torch

from laplace_debias.debias import drawn as drawn_module
from laplace_debias.debias.corrected import corrected_block
from laplace_debias.debias.drawn import DrawnFactor
from laplace_debias.debias.drawn_rows import N_GROUPS, DrawnRows
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
        at = torch.randperm(len(draw), generator=generator)  # mini-batches come in any order
        for part in at.split(5):
            weights = 1 / draw.probabilities[part]
            factor.add(ROWS[draw.data[part]], weights, groups[part], part, first, len(draw))
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
    for counts in ((1.0, 1.0, 1.0, 1.0), (1.5, 0.5, 1.7, 0.3)):
        weights = drawn.weighted(counts)
        total = torch.zeros(4, 4, dtype=torch.float64)
        for rows, at in factor.rows:
            X = rows[:, 0] * weights[at].sqrt()[:, None]
            total += X.T @ X
        parts = [count * group for count, group in zip(counts, factor.sums, strict=True)]
        torch.testing.assert_close(total, sum(parts) / 4)
        torch.testing.assert_close(factor.estimate(3.0, counts), 3 * total)


def test_a_block_without_correction_is_the_plain_one():
    factor, drawn = run((20,), torch.Generator().manual_seed(0))
    spectrum = factor.spectrum(drawn, 2.0)
    block = corrected_block(spectrum, None, 1.0, correct=False)
    dense = block.Q_B @ torch.diag(block.lam_B) @ block.Q_B.T
    torch.testing.assert_close(dense, 2 * factor.sums.mean(0))


def test_all_rows_of_few_draws_are_kept():
    factor, _ = run((28,), torch.Generator().manual_seed(0))
    assert sum(len(rows) for rows, _ in factor.rows) == 28


def test_the_full_batch_foretells_nothing_about_other_data():
    """Three rows in four dimensions: beyond them others may have curvature, if there are others."""
    tails = []
    for probability, groups in ((0.5, torch.tensor([0, 1, 2])), (1.0, torch.full((3,), -1))):
        factor, drawn = DrawnFactor(()), DrawnRows()
        probabilities = torch.full((3,), probability, dtype=torch.float64)
        drawn.add(probabilities, groups, 1.0, 1.0)
        factor.add(ROWS[:3], 1 / probabilities, groups, torch.arange(3), 0, 3)
        factor.close(1.0, 1.0, distinct=True)
        tails.append(len(factor.spectrum(drawn, 1.0).null.tail))
    assert tails[0] > 0 == tails[1]


def test_rarity_is_what_sampling_without_replacement_leaves():
    drawn = DrawnRows()
    probabilities = torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64)
    drawn.add(probabilities, torch.tensor([0, 1, -1]), 1.0, 1.0)
    assert drawn.rarity(1.0) == (0.75 + 0.5) / 2
    assert drawn.rarity(2.0) == (0.875 + 0.75) / 2


def test_the_correction_is_told_the_inclusion_probabilities():
    factor, drawn = run((8,), torch.Generator().manual_seed(3))
    probabilities = factor.spectrum(drawn, 1.0).probabilities
    torch.testing.assert_close(probabilities, 1 / drawn.weights)
    assert float(probabilities.max()) < 1


@pytest.mark.parametrize("r", [3, 9])  # fewer rows than dimensions, and more: kept as blocks
def test_blocks_of_several_rows_are_summed_and_rotated_as_their_rows(r):
    """Sums, and leverages' blocks in the eigenbasis, against plain loops over draws."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, r, 4, generator=generator, dtype=torch.float64)
    pi = torch.tensor([0.5, 1.0, 0.2, 0.25, 0.4, 0.1], dtype=torch.float64)
    groups = torch.tensor([0, -1, 1, 2, 3, 0])
    factor, drawn = DrawnFactor(()), DrawnRows()
    drawn.add(pi, groups, 1.0, 1.0)
    for part in torch.tensor([4, 0, 2, 5, 1, 3]).split(4):
        factor.add(rows[part], 1 / pi[part], groups[part], part, 0, 6)
    factor.close(1.0, 1.0, distinct=True)
    dense = [x.T @ x for x in rows]
    torch.testing.assert_close(factor.known, sum(dense))
    for group in range(N_GROUPS):
        counts = [1.0 if g < 0 else N_GROUPS * float(g == group) for g in groups]
        total = sum(k * G / p for k, G, p in zip(counts, dense, pi, strict=True))
        torch.testing.assert_close(factor.sums[group], total)
    spectrum = factor.spectrum(drawn, 3.0, (1.5, 1.5, 0.5, 0.5))
    weights = [9.0, 3.0, 22.5, 6.0, 3.75, 45.0]
    assert spectrum.probabilities.tolist() == pytest.approx([1 / w for w in weights])
    assert spectrum.counts.tolist() == [1.5, 1.0, 1.5, 0.5, 0.5, 1.5]
    kept = spectrum.rows.mT @ spectrum.rows if r == 3 else spectrum.rows.G
    for G, block, weight in zip(kept, dense, weights, strict=True):
        torch.testing.assert_close(G, weight * spectrum.Q.T @ block @ spectrum.Q)
    assert spectrum.linked.tolist() == [True] * 5
    assert spectrum.alone.tolist() == [0.0] * 6 and not len(spectrum.null.tail)


def test_a_part_of_the_draws_is_kept_in_runs_of_neighbours(monkeypatch):
    monkeypatch.setattr(drawn_module, "MOST_NUMBERS", 24 * 4)
    rows = torch.randn(200, 1, 4, dtype=torch.float64)
    factor, drawn = DrawnFactor(()), DrawnRows()
    groups = torch.arange(200) % N_GROUPS
    drawn.add(torch.full((200,), 0.1, dtype=torch.float64), groups, 1.0, 1.0)
    factor.add(rows, torch.full((200,), 10.0), groups, torch.arange(200), 0, 200)
    factor.close(1.0, 1.0, distinct=True)
    at = factor.rows[0][1]
    assert len(at) == 24 and bool((at.view(3, 8).diff(dim=1) == 1).all())
    linked = factor.spectrum(drawn, 1.0).linked
    assert linked.tolist() == [True] * 7 + [False] + [True] * 7 + [False] + [True] * 7
    torch.testing.assert_close(factor.known, rows[:, 0].T @ rows[:, 0])  # sums see all


def test_sequences_of_different_lengths_have_rows_of_zeros():
    """As rows padded by hand."""
    generator = torch.Generator().manual_seed(0)
    long, short = (torch.randn(3, r, 6, generator=generator, dtype=torch.float64) for r in (3, 2))
    padded = torch.cat([short, torch.zeros(3, 1, 6, dtype=torch.float64)], 1)
    pi, groups = torch.full((6,), 0.2, dtype=torch.float64), torch.arange(6) % N_GROUPS
    found = []
    for other in (short, padded):
        factor, drawn = DrawnFactor(()), DrawnRows()
        drawn.add(pi, groups, 1.0, 1.0)
        for rows, at in ((long, torch.arange(3)), (other, torch.arange(3, 6))):
            factor.add(rows, 1 / pi[at], groups[at], at, 0, 6)
        factor.close(1.0, 1.0, distinct=True)
        found.append(corrected_block(factor.spectrum(drawn, 1.0), None, 1e-3).lam_B)
    torch.testing.assert_close(*found)


def test_blocks_of_tilted_draws_are_those_of_every_second_run():
    generator = torch.Generator().manual_seed(0)
    rows, n = torch.randn(32, 5, 3, generator=generator, dtype=torch.float64), 32
    pi, groups = torch.full((n,), 0.2, dtype=torch.float64), torch.arange(n) % N_GROUPS
    factor, drawn = DrawnFactor(()), DrawnRows()
    drawn.add(pi, groups, 1.0, 1.0)
    factor.add(rows, 1 / pi, groups, torch.arange(n), 0, n)
    factor.close(1.0, 1.0, distinct=True)
    whole, tilted = (factor.spectrum(drawn, 1.0, c) for c in ((1,) * 4, (1.5, 0.5, 1.5, 0.5)))
    assert len(whole.probabilities) == 32 and len(tilted.probabilities) == 16
    assert tilted.linked.tolist() == [True] * 7 + [False] + [True] * 7
    assert whole.linked.all()


def test_what_is_alone_without_a_group_is_seen():
    """Two draws of group 0 share a dimension with none: without them nothing, without 1, one."""
    X = torch.randn(12, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    X[:, 0, 2] = 0.0
    X[0, 0, 2], X[1, 0, 2] = 1.0, 2.0
    pi, groups = torch.full((12,), 0.2, dtype=torch.float64), torch.arange(12) % N_GROUPS
    factor, drawn = DrawnFactor(()), DrawnRows()
    drawn.add(pi, groups, 1.0, 1.0)
    factor.add(X, 1 / pi, groups, torch.arange(12), 0, 12)
    factor.close(1.0, 1.0, distinct=True)
    assert not factor.loses_span(drawn, (1, 1, 1, 1))
    assert factor.loses_span(drawn, (4 / 3, 0, 4 / 3, 4 / 3))
    assert not factor.loses_span(drawn, (4 / 3, 4 / 3, 0, 4 / 3))
