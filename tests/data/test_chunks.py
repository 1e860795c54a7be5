"""Data as chunks: all of them, in their order, again and again."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias.data.chunks import Chunks, gather, partition

X, Y = torch.arange(14.0).view(7, 2), torch.arange(7)


@pytest.mark.parametrize("chunk_size", [None, 1, 3, 99])
@pytest.mark.parametrize(
    "data",
    [(X, Y), [(X[:4], Y[:4]), (X[4:], Y[4:])], DataLoader(TensorDataset(X, Y), 5)],
    ids=["pair", "list", "loader"],
)
def test_chunks_hold_all_data_in_order_every_time(data, chunk_size):
    chunks = Chunks(data, chunk_size)
    for _ in range(2):
        parts = list(chunks)
        assert torch.equal(torch.cat([x for x, _ in parts]), X)
        assert torch.equal(torch.cat([y for _, y in parts]), Y)
        assert chunk_size is None or max(len(y) for _, y in parts) <= chunk_size
    assert chunks.n_data == 7
    assert all(torch.equal(one, two) for one, two in zip(gather(data), (X, Y), strict=True))


def test_mappings_are_cut_like_tensors():
    parts = list(Chunks(({"input_ids": X, "positions": 2 * X}, Y), 4))
    assert [len(y) for _, y in parts] == [4, 3]
    assert torch.equal(parts[1][0]["positions"], 2 * X[4:])
    whole, y = gather(parts)
    assert torch.equal(whole["input_ids"], X) and torch.equal(y, Y)


def test_mini_batches_are_disjoint_of_one_size_and_as_many_as_fit():
    generator = torch.Generator().manual_seed(0)
    batches = partition((X, Y), 2, generator=generator)
    assert [len(y) for _, y in batches] == [2, 2, 2]
    drawn = torch.cat([y for _, y in batches]).tolist()
    assert len(set(drawn)) == 6 and drawn != sorted(drawn)
    assert all(torch.equal(x, X[y]) for x, y in batches)  # inputs stay with their targets
    again = partition((X, Y), 2, generator=torch.Generator().manual_seed(0))
    assert torch.cat([y for _, y in again]).tolist() == drawn
    first = partition((X, Y), 2, n_batches=2)
    assert [y.tolist() for _, y in first] == [[0, 1], [2, 3]]


def test_errors_say_what_to_do():
    with pytest.raises(TypeError, match="iterated many times, got the iterator list_iterator"):
        Chunks(iter([(X, Y)]))
    with pytest.raises(ValueError, match="chunk_size >= 1, got 0"):
        Chunks((X, Y), 0)
    with pytest.raises(ValueError, match="7 inputs and 3 targets"):
        Chunks((X, Y[:3]))
    with pytest.raises(ValueError, match="at least one datum"):
        Chunks([])
    for size in (0, 8):
        with pytest.raises(ValueError, match=rf"1 <= batch_size <= 7 .*got {size}"):
            partition((X, Y), size)
