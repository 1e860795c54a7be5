"""Draws: equal shares without overlap, nested over budgets, and the whole set in any order."""

import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from laplace_debias.comparison import compare
from laplace_debias.comparison.draws import (
    check_budgets,
    draw_generator,
    draw_loaders,
    whole_loader,
)

N = 40
LOADER = DataLoader(range(N), batch_size=7, sampler=SubsetRandomSampler(range(10)))


def positions(loader):
    return torch.cat(list(loader)).tolist()


def test_roles_share_a_draw_without_overlap():
    (whole,) = draw_loaders(LOADER, 16, 1, draw_generator(0, 3))
    first, second = draw_loaders(LOADER, 16, 2, draw_generator(0, 3))
    assert positions(first) + positions(second) == positions(whole)
    assert len(set(positions(whole))) == 16 and len(positions(first)) == 8
    assert {len(batch) for batch in whole} == {7, 2}


def test_larger_budgets_contain_smaller_ones():
    small, large = (positions(draw_loaders(LOADER, M, 1, draw_generator(5, 1))[0]) for M in (8, 24))
    assert large[:8] == small


def test_draws_and_seeds_differ():
    draws = {
        tuple(positions(draw_loaders(LOADER, 8, 1, draw_generator(seed, draw))[0]))
        for seed in range(3)
        for draw in range(-1, 4)
    }
    assert len(draws) == 15


def test_every_datum_is_drawn_equally_often():
    counts = torch.zeros(N)
    for draw in range(400):
        counts[positions(draw_loaders(LOADER, 10, 1, draw_generator(0, draw))[0])] += 1
    # binomial with mean 100 and standard deviation 8.7: five of them
    assert counts.sum() == 4000 and (counts - 100).abs().max() < 44


def test_the_whole_set_is_read_whatever_the_sampler():
    assert positions(whole_loader(LOADER)) == list(range(N))
    shuffled = positions(whole_loader(LOADER, torch.Generator().manual_seed(0)))
    assert sorted(shuffled) == list(range(N)) != shuffled
    assert shuffled == positions(whole_loader(LOADER, torch.Generator().manual_seed(0)))
    batched = DataLoader(range(N), batch_sampler=[[0, 1], [2]])
    assert [len(batch) for batch in whole_loader(batched)] == [N]


@pytest.mark.parametrize(
    ("loader", "budgets", "n_draws", "match"),
    [
        (LOADER, (7,), 1, "even budgets between 2 and N = 40, got 7. Remedy"),
        (LOADER, (8, 42), 1, "got 42"),
        (LOADER, (0,), 1, "got 0"),
        (LOADER, (8,), 0, "n_draws >= 1, got 0. Remedy"),
        ([1, 2], (8,), 1, "map-style dataset.*got list. Remedy"),
    ],
)
def test_impossible_draws(loader, budgets, n_draws, match):
    assert check_budgets(LOADER, (2, N), 1) == N
    with pytest.raises(ValueError, match=match):
        check_budgets(loader, budgets, n_draws)


def test_a_comparison_fits_other_data_in_every_draw():
    gen = torch.Generator().manual_seed(0)
    X = torch.randn(N, 3, generator=gen)
    model, y = torch.nn.Linear(3, 3), torch.arange(N) % 3
    train = DataLoader(TensorDataset(X, y), batch_size=N)
    result = compare(
        model, train, (X, y), methods=("single", "two-batch", "crossfit"), budgets=(8,), n_draws=4,
        prior_precisions=(1.0,),
    )  # fmt: skip
    for method in ("single", "two-batch", "crossfit"):
        assert len({row.metrics["nll"] for row in result.select(method)}) == 4
