"""Shares of a training set: which data are a process's own."""

import io
import math
import re
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laplace_debias import Laplace
from laplace_debias.data import loaders
from laplace_debias.data.loaders import bar, deals_out, n_own
from laplace_debias.data.reading import read
from laplace_debias.debias import freeing
from laplace_debias.quadratics import directional_bias


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


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("shown", "terminal", "delay", "expected"),
    [
        (True, False, 3.0, True),
        (False, True, 0.0, False),
        (None, True, 0.0, True),
        (None, True, 60.0, False),  # the call is over before
        (None, False, 0.0, False),
    ],
)
def test_when_it_is_shown(monkeypatch, shown, terminal, delay, expected):
    stream = _Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(loaders, "DELAY", delay)
    assert list(bar([1, 2, 3], "reading", shown=shown)) == [1, 2, 3]
    assert ("reading" in stream.getvalue()) is expected


def test_it_knows_its_total(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    list(bar([1, 2, 3], shown=True))
    with bar(title="cells", shown=True, total=7) as cells:
        cells.update(7)
    assert "3/3" in stream.getvalue()
    assert "7/7" in stream.getvalue()


def test_what_it_runs_over_is_iterated_once():
    class Loader:
        started = 0

        def __iter__(self):
            self.started += 1
            return iter([1, 2])

    loader = Loader()
    assert list(bar(loader, shown=False)) == [1, 2]
    assert loader.started == 1


def test_fits_show_passes_and_data_with_totals(capsys):
    X, y = torch.randn(40, 3), torch.arange(40) % 2
    loader = DataLoader(TensorDataset(X, y), 10, shuffle=True)
    options = {"auto": {"tolerance": None, "n_passes": 16}, "crossfit": {"sampling": "curvature"}}
    for debias, total in (("auto", 56), ("crossfit", None), ("two-batch", 3), ("single", 5)):
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        la = Laplace(net, "classification", "all", "kron", debias=debias, **options.get(debias, {}))
        la.fit(loader, progress_bar=True)
        n, N = re.findall(r"([\d.]+)/([\d.]+) \[", capsys.readouterr().err)[-1]
        assert n == N and (total is None or float(N) == total), debias
        la.fit(loader)  # no terminal
        assert not capsys.readouterr().err


@pytest.mark.parametrize(("rank", "shown"), [(0, True), (1, False)])
def test_rank_0_alone_shows_a_bar(rank, shown, monkeypatch, capsys):
    monkeypatch.setattr(loaders.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(loaders.dist, "get_rank", lambda: rank)
    assert list(loaders.bar([1, 2], "title", shown=True)) == [1, 2]
    assert ("title" in capsys.readouterr().err) == shown


def test_a_fit_s_bar_moves_within_a_mini_batch_and_through_the_decompositions(monkeypatch):
    steps = []
    made = freeing.tqdm.update
    monkeypatch.setattr(freeing.tqdm, "update", lambda self, n=1: steps.append(n) or made(self, n))
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))
    X, y = torch.randn(20, 3), torch.arange(20) % 5
    la = Laplace(net, "classification", "all", "kron", debias=True)
    la.fit([(X[:10], y[:10]), (X[10:], y[10:])], n_data=20, progress_bar=True)
    assert sum(steps) == pytest.approx(3)  # two mini-batches, and the decompositions as one
    assert sum(abs(step - 1 / 4) < 1e-9 for step in steps) == 8  # four vectors in each
    assert sum(0 < step < 1 for step in steps) >= 8 + 3  # A and B of two layers
    assert la.fit_cost.watched is None


def test_quadratics_show_a_bar_by_the_same_habit(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := _Terminal())
    monkeypatch.setattr(loaders, "DELAY", 0.0)
    batches = [(torch.randn(6, 2), torch.randn(6, 1)) for _ in range(2)]
    args = (nn.Linear(2, 1), nn.MSELoss(), batches)
    directional_bias(*args, k=1, chosen=(0,))
    assert "eigenvectors" in stream.getvalue() and "2/2" in stream.getvalue()
    seen = len(stream.getvalue())
    directional_bias(*args, k=1, chosen=(0,), progress_bar=False)
    assert len(stream.getvalue()) == seen
