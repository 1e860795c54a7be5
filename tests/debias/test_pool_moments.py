"""Sums over a pool, against one pass over all of it."""

import torch
from torch import nn

from laplace_debias.debias import pool_inputs, pool_moments, pool_news
from laplace_debias.debias.pool_moments import PoolMoments
from laplace_debias.kfac import sums
from laplace_debias.kfac.engine import Engine

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(20) % 2


def moments_of(*sizes):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    moments = PoolMoments(Engine(net, "classification"))
    for x, y in zip(X.split(sizes), Y.split(sizes), strict=True):
        moments.add(x, y)
    return net, moments


def test_mini_batches_add_up_to_the_pool():
    net, moments = moments_of(7, 7, 6)
    _, whole = moments_of(20)
    for one, two in zip(moments.inputs.A, whole.inputs.A, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two)
    torch.testing.assert_close(moments.outputs, net(X).detach())
    torch.testing.assert_close(moments.loss, whole.loss)
    torch.testing.assert_close(moments.features, net[:2](X).detach())
    assert moments.one_row == [True] * 4


def conv_moments(x, n_patches, size=4):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).double()
    moments = PoolMoments(Engine(net, "classification"), n_patches)
    for part in x.split(size):
        moments.add(part, torch.zeros(len(part), dtype=torch.long))
    return moments


def test_few_data_with_many_positions_are_not_many_with_one_row(monkeypatch):
    """8 of 32 images have 4 patches each: as many rows as there are data."""
    for name in ("MOST_FOR_PATCHES", "ROWS_PER_DIMENSION"):
        monkeypatch.setattr(pool_inputs, name, 0.0)
    moments = conv_moments(torch.randn(32, 1, 3, 3, dtype=torch.float64), 8)
    assert moments.inputs.n_rows[0] == moments.size == 32
    assert moments.one_row == [False, True, True, True]  # a bias has one row


def test_it_is_complete_as_long_as_no_mini_batch_came_without_patches(monkeypatch):
    for name in ("MOST_FOR_PATCHES", "ROWS_PER_DIMENSION"):
        monkeypatch.setattr(pool_inputs, name, 0.0)
    x = torch.randn(20, 1, 3, 3, dtype=torch.float64)
    whole, last, cut = (conv_moments(x, n) for n in (99, 17, 16))
    assert whole.complete and last.complete and not cut.complete
    assert last.inputs.share(0, 20) == 1.0 and cut.inputs.share(0, 20) == 16 / 20
    cut.counted(4)  # mini-batches of all processes
    last.counted(4)
    assert not last.complete and not cut.complete


def test_halves_differ_by_the_noise_of_the_pool():
    """Half the difference of two halves varies as the error of the whole."""
    generator = torch.Generator().manual_seed(0)
    squares, errors = [], []
    for _ in range(200):
        moments = PoolMoments(Engine(nn.Linear(2, 2).double(), "classification"))
        for _ in range(2):
            x = torch.randn(25, 2, generator=generator, dtype=torch.float64)
            moments.add(x, torch.zeros(25, dtype=torch.long))
        squares.append(moments.inputs.noises(50, 10**9)[0][0].square())
        errors.append((moments.inputs.A[0] - torch.eye(2)).square())
    ratio = torch.stack(squares).mean(0) / torch.stack(errors).mean(0)
    torch.testing.assert_close(ratio, torch.ones(2, 2, dtype=torch.float64), rtol=0.3, atol=0)


def test_probes_are_data_and_far_inputs_from_a_seed_of_their_own():
    _, moments = moments_of(20)
    before = torch.get_rng_state()
    x, directions = moments.probes()
    assert torch.equal(before, torch.get_rng_state())
    assert len(x) == 32 and directions.shape == (32, 2)
    torch.testing.assert_close(x[:16], X[:16])
    assert directions.sum(0).tolist() == [16, 16] and set(directions.flatten().tolist()) == {0, 1}
    assert float(x[16:].std()) > 1.5 * float(X.std())


def test_what_all_processes_have_passed_goes_to_the_smaller_half():
    moments = PoolMoments(Engine(nn.Linear(3, 2), "classification"))
    for n in (6, 2, 2, 5, 5):
        moments.counted(n)
    assert moments._sizes == [11, 9] and moments.size == 20


class GroupOfOne:
    """A process that is alone in its group."""

    rank, size = 0, 1

    def gather(self, own):
        """What it has itself."""
        return [own]

    def sum_(self, tensor):
        """Nothing to add."""
        return tensor


def test_rows_per_datum_are_those_of_a_process_without_a_group(monkeypatch):
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 3)).double()
    x, y = torch.randn(4, 1, 3, 3, dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    alone = PoolMoments(Engine(net, "classification"))
    alone.add(x, y)
    for module in (pool_moments, pool_news, sums):
        monkeypatch.setattr(module, "processes", GroupOfOne)
    together = PoolMoments(Engine(net, "classification"))
    together.begin_with(x)
    together.add(x, y)
    together.counted(4)
    together.exchange(torch.arange(4), "x")
    assert together.inputs.per_datum == alone.inputs.per_datum == [4.0, 1.0, 1.0, 1.0]
