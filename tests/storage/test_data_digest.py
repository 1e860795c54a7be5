"""The digest of data sees every datum, not the order, and leaves all randomness as it was."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from laplace_debias.storage.data_digest import data_hash

N = 200
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 4
WHOLE = TensorDataset(X, Y)


class Augmented(Dataset):
    """Data that differ from reading to reading, by a source of randomness."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        """Return the number of data."""
        return N

    def __getitem__(self, i):
        """Return a datum with noise."""
        return X[i] + self.draw(), Y[i]


def changed(i, tensor=X):
    other = tensor.clone()
    other[i] += 1
    return other


@pytest.mark.parametrize("i", [0, 1, N // 2, N - 1])
def test_every_datum_and_every_target_counts(i):
    whole = data_hash(DataLoader(WHOLE, 16))
    assert whole.startswith("200 data, ")
    assert data_hash(DataLoader(TensorDataset(changed(i), Y), 16)) != whole
    assert data_hash(DataLoader(TensorDataset(X, changed(i, Y)), 16)) != whole
    assert data_hash([(changed(i), Y)]) != data_hash([(X, Y)])


def test_mini_batches_and_shuffling_do_not_count():
    whole = data_hash(DataLoader(WHOLE, 16))
    generator = torch.Generator().manual_seed(3)
    for other in (
        (X, Y),
        [(X[:7], Y[:7]), (X[7:], Y[7:])],
        DataLoader(WHOLE, 33),
        DataLoader(WHOLE, 16, shuffle=True),
        DataLoader(WHOLE, 16, shuffle=True, generator=generator),
        DataLoader(WHOLE, sampler=SubsetRandomSampler(range(N)), batch_size=5),
        DataLoader(WHOLE, batch_sampler=BatchSampler(RandomSampler(WHOLE), 9, drop_last=False)),
        DataLoader(Subset(WHOLE, range(N)), 16),
        DataLoader(WHOLE, 64, num_workers=1),
    ):
        assert data_hash(other) == whole


def test_which_data_are_read_counts():
    part = data_hash(DataLoader(Subset(WHOLE, range(100)), 16))
    assert part != data_hash(DataLoader(WHOLE, 16))
    assert data_hash(DataLoader(WHOLE, 16, sampler=SubsetRandomSampler(range(100)))) == part
    assert data_hash(DataLoader(WHOLE, 16, sampler=SubsetRandomSampler(range(1, 101)))) != part
    assert data_hash(DataLoader(WHOLE, 16, drop_last=True)).startswith("192 data")
    assert data_hash([(X.double(), Y)]) != data_hash([(X, Y)])
    assert data_hash([(X.view(N, 3, 1), Y)]) != data_hash([(X, Y)])
    assert data_hash([(X, Y.roll(1))]) != data_hash([(X, Y)])


def test_a_fixed_order_counts():
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1)).tolist()
    assert data_hash(DataLoader(WHOLE, 16, sampler=order)) != data_hash(DataLoader(WHOLE, 16))
    expected = data_hash((X[order], Y[order]))
    assert data_hash(DataLoader(WHOLE, 16, sampler=order)) == expected


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(()),
        random.random,
        np.random.rand,
        lambda: (torch.rand(()) < 0.2).float(),
    ],
    ids=["torch", "random", "numpy", "rarely"],
)
def test_augmentation_is_found_out(draw):
    loader = DataLoader(Augmented(draw), 16)
    with pytest.raises(ValueError, match="Expected 'train' to be the same data.*Remedy.*data_id="):
        data_hash(loader, "train")
    with pytest.raises(ValueError, match="second reading.*data_id="):
        data_hash(Rereading(draw))


class Rereading:
    """Mini-batches without a dataset that differ from reading to reading."""

    def __init__(self, draw):
        self.draw = draw

    def __iter__(self):
        """Yield one mini-batch of many noisy data."""
        yield torch.stack([x + self.draw() for x in X]).float(), Y


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(WHOLE, 16, sampler=WeightedRandomSampler(torch.ones(N), 50)),
        DataLoader(WHOLE, 16, sampler=RandomSampler(WHOLE, num_samples=50)),
        DataLoader(WHOLE, 16, shuffle=True, drop_last=True),
    ],
    ids=["weighted", "subsets", "drop_last"],
)
def test_other_data_in_every_epoch_are_found_out(loader):
    with pytest.raises(ValueError, match="same data in every epoch.*Remedy.*data_id="):
        data_hash(loader)


def test_data_that_are_read_once_are_refused():
    with pytest.raises(ValueError, match="can be read again, got the iterator.*Remedy"):
        data_hash(iter([(X, Y)]))


def states(*generators):
    return (
        [torch.get_rng_state(), *(generator.get_state() for generator in generators)],
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )


def same(one, two):
    tensors = zip(one[0], two[0], strict=True)
    return all(torch.equal(a, b) for a, b in tensors) and one[1:] == two[1:]


def test_no_random_state_moves():
    generators = [torch.Generator().manual_seed(i) for i in range(3)]

    class Drawing(Augmented):
        generator = None

    drawing = Drawing(lambda: 0.0)
    drawing.generator = generators[2]
    drawing.draw = lambda: 0 * torch.rand((), generator=generators[2])
    loaders = [
        DataLoader(WHOLE, 16, shuffle=True),
        DataLoader(WHOLE, 16, shuffle=True, generator=generators[0]),
        DataLoader(WHOLE, 16, sampler=RandomSampler(WHOLE, generator=generators[1])),
        DataLoader(Subset(Subset(drawing, range(90)), range(50)), 16),
        DataLoader(WHOLE, 64, shuffle=True, num_workers=1),
    ]
    before = states(*generators)
    for loader in loaders:
        data_hash(loader)
    assert same(states(*generators), before)
    for draw in (random.random, np.random.rand, lambda: torch.rand(())):
        with pytest.raises(ValueError):  # also when something raises
            data_hash(DataLoader(Augmented(draw), 16, shuffle=True, generator=generators[0]))
    assert same(states(*generators), before)


def test_a_shuffling_loader_gives_what_it_would_have_given():
    def epoch(look):
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(WHOLE, 16, shuffle=True, generator=generator)
        if look:
            data_hash(loader)
        return torch.cat([x for x, _ in loader])

    assert torch.equal(epoch(look=True), epoch(look=False))


def test_data_are_read_once_and_a_few_twice():
    class Counting(Augmented):
        reads = 0

        def __getitem__(self, i):
            Counting.reads += 1
            return X[i], Y[i]

    data_hash(DataLoader(Counting(None), 16, shuffle=True))
    assert Counting.reads == N + 2 * 64


def test_streams_and_mappings():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(WHOLE)

    assert data_hash(DataLoader(Stream(), 16)) == data_hash((X, Y))
    mapping = {"input": X, "labels": Y}
    assert data_hash([mapping]) == data_hash(mapping) != data_hash((X, Y))
    assert data_hash({"input": X, "labels": changed(-1, Y)}) != data_hash(mapping)
    halves = [{"input": x, "labels": y} for x, y in zip(X.split(90), Y.split(90), strict=True)]
    assert data_hash(halves) == data_hash(mapping)


def test_text_numbers_and_arrays():
    texts = [f"text {i}" for i in range(10)]
    small = list(zip(texts, range(10), strict=True))
    by_three, by_four = (data_hash(DataLoader(small, size)) for size in (3, 4))
    assert by_three == by_four and by_three.startswith("10 data")
    assert data_hash(DataLoader([*small[:-1], ("other", 9)], 3)) != by_three
    assert data_hash([(X.numpy(), Y.numpy())]) == data_hash([(X, Y)])
    bare = data_hash([X[:50], X[50:90], X[90:]])
    assert bare == data_hash([X]) and bare.startswith("200 data")
    with pytest.raises(ValueError, match="got object. Remedy: let `collate_fn`.*data_id="):
        data_hash([(object(), Y)])


def test_an_empty_set_has_a_digest():
    assert data_hash([]).startswith("0 data") and data_hash([]) != data_hash([X[:0]])


def test_few_shuffled_data_never_depend_on_chance():
    """Two shuffles of three data agree in one of six cases; the digest must not."""
    data = TensorDataset(torch.arange(6.0).view(3, 2), torch.arange(3))
    expected = data_hash(DataLoader(data, 2))
    for seed in range(40):
        torch.manual_seed(seed)
        assert data_hash(DataLoader(data, 2, shuffle=True)) == expected
