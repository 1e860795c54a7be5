"""Shares of a training set: which data are a process's own."""

import math

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laplace_debias.data.reading import read
from laplace_debias.data.shares import deals_out, n_own


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("n", "replicas"), [(7, 3), (6, 3), (2, 5), (61, 2)])
def test_own_data_are_the_dataset_once(n, replicas, shuffle):
    data = TensorDataset(torch.arange(n, dtype=torch.float32)[:, None], torch.arange(n))
    seen, repeated = [], 0
    for rank in range(replicas):
        sampler = DistributedSampler(data, replicas, rank, shuffle=shuffle)
        loader = DataLoader(data, 2, sampler=sampler)
        assert deals_out(loader)
        repeated += sum(len(y) for _, y in loader)
        batches = [] if n_own(loader) == 0 else read(loader, torch.device("cpu"))
        for X, y in batches:
            assert torch.equal(X[:, 0].long(), y)
            seen += y.tolist()
    assert sorted(seen) == list(range(n))
    assert repeated == replicas * math.ceil(n / replicas)


def test_a_sampler_that_drops_repeats_nothing():
    data = TensorDataset(torch.zeros(7, 1))
    loader = DataLoader(data, 2, sampler=DistributedSampler(data, 3, 0, drop_last=True))
    assert n_own(loader) == n_own([]) == math.inf
    assert not deals_out(DataLoader(data, 2, shuffle=True))
