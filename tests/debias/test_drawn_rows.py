"""Weights of draws: what is drawn, what is known, and what groups see."""

import pytest
import torch

from laplace_debias.debias.drawn_rows import N_GROUPS, DrawnRows


def test_weights_of_two_rounds_are_those_of_their_average():
    rows = DrawnRows()
    rows.add(torch.tensor([0.5, 0.25]), torch.tensor([0, 1]), share=1.0, growth=1.0)
    rows.add(torch.tensor([0.1]), torch.tensor([2]), share=0.75, growth=2.0)
    # the first round's in a pool that has doubled, a quarter of the average; known in the second's
    assert rows.weights.tolist() == [0.25 * 2 * 2 + 0.75, 0.25 * 2 * 4 + 0.75, 7.5]


def test_groups_share_what_is_certain_and_average_to_the_whole():
    rows = DrawnRows()
    groups = torch.tensor([0, 1, 2, 3, -1])
    rows.add(torch.tensor([0.5, 0.5, 0.5, 0.5, 1.0]), groups, share=1.0, growth=1.0)
    alone = [tuple(4.0 * (i == group) for i in range(N_GROUPS)) for group in range(N_GROUPS)]
    each = torch.stack([rows.weighted(counts) for counts in alone])
    torch.testing.assert_close(each.mean(0), rows.weights)
    assert each[:, -1].tolist() == [1.0] * N_GROUPS
    assert rows.weighted((0.5, 1.5, 1.25, 0.75)).tolist() == [1.0, 3.0, 2.5, 1.5, 1.0]
    assert rows.counts((0.5, 1.5, 1.25, 0.75)).tolist() == [0.5, 1.5, 1.25, 0.75, 1.0]


def test_what_drawing_without_replacement_saves():
    rows = DrawnRows()
    assert rows.rarity(1.0) == 0.0
    rows.add(torch.tensor([0.5, 1.0]), torch.tensor([0, -1]), share=1.0, growth=1.0)
    assert rows.rarity(1.0) == 0.5  # half of the noise of a draw of every second pair is left
    assert rows.rarity(10.0) == pytest.approx(0.95)
