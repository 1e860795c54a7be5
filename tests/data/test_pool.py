"""Pools: positions of a map-style loader, and streams cut into segments."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from laplace_debias.data.map_style import MapStyle, is_map_style
from laplace_debias.data.pool import Pool, segments
from laplace_debias.data.roles import TrainingData


class Stream(IterableDataset):
    """Data without positions."""

    def __iter__(self):
        """Yield them."""
        yield from range(4)


def test_what_can_be_fetched_again():
    assert is_map_style(DataLoader(range(4), 2))
    assert not is_map_style(DataLoader(Stream(), 2))
    assert not is_map_style(DataLoader(range(4), batch_size=None))
    assert not is_map_style([torch.zeros(2)])


def test_the_pool_is_one_epoch_of_the_loaders_own_sampler():
    loader = DataLoader(range(20), 4, shuffle=True, generator=torch.Generator().manual_seed(3))
    pool = MapStyle(loader)
    again = DataLoader(range(20), 4, shuffle=True, generator=torch.Generator().manual_seed(3))
    assert pool.positions == list(again.sampler)
    assert torch.cat(list(pool.read())).tolist() == pool.positions
    inside = MapStyle(DataLoader(range(20), 4, sampler=SubsetRandomSampler([3, 7, 11])))
    assert sorted(inside.positions) == [3, 7, 11]


def test_limit_and_batch_size():
    pool = MapStyle(DataLoader(range(20), 6, sampler=SequentialSampler(range(20))), limit=8)
    assert (len(pool), pool.batch_size) == (8, 6)
    assert [batch.tolist() for batch in pool.read()] == [[0, 1, 2, 3, 4, 5], [6, 7]]
    assert [len(batch) for batch in pool.read(at_once=2)] == [8]


def test_rows_are_rows_of_the_pool_in_the_order_asked_for_and_collated_as_the_loader_does():
    X = torch.arange(10.0)
    loader = DataLoader(
        TensorDataset(X), 2, sampler=[9, 4, 6, 1], collate_fn=lambda items: [i[0] for i in items]
    )
    batches = list(MapStyle(loader).read([3, 0, 0]))
    assert [[float(x) for x in batch] for batch in batches] == [[1.0, 9.0], [9.0]]


@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    batches=st.lists(st.integers(1, 6), min_size=1, max_size=6),
)
def test_segments_are_consecutive_and_of_the_sizes_asked_for(sizes, batches):
    n = sum(batches)
    y = torch.arange(n)
    stream = [(10 * part, part) for part in y.split(batches)]
    found = {}
    for number, X, part in segments(stream, sizes, "x"):
        assert torch.equal(X, 10 * part)
        found.setdefault(number, []).extend(part.tolist())
    rest, expected = y.tolist(), {}
    for number, size in enumerate(sizes):
        expected[number], rest = rest[:size], rest[size:]
    expected[len(sizes)] = rest
    assert {k: v for k, v in found.items() if v} == {k: v for k, v in expected.items() if v}


def test_segments_of_mappings():
    stream = [({"x": torch.arange(3), "scale": 2.0}, torch.arange(3))]
    pieces = [(i, X["x"].tolist(), X["scale"]) for i, X, _ in segments(stream, [1], "x")]
    assert pieces == [(0, [0], 2.0), (1, [1, 2], 2.0)]


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_draws_nothing_from_the_global_generator_if_one_is_given(workers):
    loader = DataLoader(range(4), 2, num_workers=workers)
    state = torch.get_rng_state()
    pool = MapStyle(loader, generator=torch.Generator().manual_seed(0))
    assert len(list(pool.read())) == 2
    assert torch.equal(torch.get_rng_state(), state)


def test_a_pool_grows_and_is_fetched_again_by_number():
    X, y = torch.arange(20.0)[:, None], torch.arange(20)
    sources = {
        "map": DataLoader(TensorDataset(X, y), batch_size=4),
        "stream": iter([(X[i : i + 4], y[i : i + 4]) for i in range(0, 20, 4)]),
    }
    for loader in sources.values():
        pool = Pool(TrainingData(loader, None, 20, torch.device("cpu")))
        first = torch.cat([labels for _, labels in pool.grow(6)])
        assert pool.size == len(first) >= 6 and not pool.ended
        more = torch.cat([labels for _, labels in pool.grow(100)])
        assert torch.cat([first, more]).tolist() == list(range(20))
        assert pool.ended
        assert list(pool.grow(200)) == []
        rows = torch.tensor([17, 3, 3, 0, 12])
        found = torch.empty(5, dtype=torch.long)
        for at, (x, labels) in pool.fetch(rows):
            found[at] = labels
            assert x[:, 0].tolist() == labels.tolist()
        assert found.tolist() == rows.tolist()


def test_a_stream_of_different_shapes_is_fetched_in_parts_that_fit():
    batches = [(torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(2, 5), torch.ones(2))]
    pool = Pool(TrainingData(batches, None, 4, torch.device("cpu")))
    assert len(list(pool.grow(4))) == 2
    parts = {tuple(x.shape): at.tolist() for at, (x, _) in pool.fetch(torch.tensor([3, 0, 1]))}
    assert parts == {(1, 5): [0], (2, 3): [1, 2]}
