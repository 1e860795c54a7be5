"""Rounds of draws from a pool: unbiased, nothing twice, growing, and with scores from training."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias.data.roles import TrainingData
from laplace_debias.debias.options import AutoOptions
from laplace_debias.debias.rounds import Rounds
from laplace_debias.kfac.engine import Engine

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()
X = torch.randn(60, 2, dtype=torch.float64)
Y = torch.arange(60) % 3


def rounds_of(generator=None, n_data=60, **options):
    loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True, generator=generator)
    data = TrainingData(loader, None, n_data, torch.device("cpu"))
    return Rounds(Engine(NET, "classification"), data, AutoOptions(generator=generator, **options))


def exact_B():
    return Engine(NET, "classification").factors(X).B[0]


def mean_of(make, n_draws):
    """Mean estimate of the first layer's B over draws, and its standard error."""
    generator = torch.Generator().manual_seed(0)
    found = torch.stack([make(generator) for _ in range(n_draws)])
    return found.mean(0), found.std(0) / n_draws**0.5


def estimate(rounds):
    (factor,) = [f for f in rounds.factors if f.key[0] is NET[0]]
    return factor.sums.mean(0) * rounds.scale


def assert_unbiased(make, n_draws=150):
    mean, error = mean_of(make, n_draws)
    assert bool(((mean - exact_B()).abs() < 5 * error + 1e-9).all())


def test_two_rounds_are_unbiased():
    def make(generator):
        rounds = rounds_of(generator)
        rounds.grow(60)
        rounds.draw(8)
        rounds.draw(8)
        return estimate(rounds)

    assert_unbiased(make)


def test_a_growing_pool_is_unbiased():
    def make(generator):
        rounds = rounds_of(generator, n_pool=20)
        rounds.grow(1)
        rounds.draw(8)
        object.__setattr__(rounds.options, "n_pool", 40)
        rounds.grow(1)
        assert rounds.pool.size == 40
        rounds.draw(8)
        return estimate(rounds)

    assert_unbiased(make)


def test_old_scores_are_unbiased():
    scores = torch.rand(60, generator=torch.Generator().manual_seed(5))  # nothing to do with it

    def make(generator):
        rounds = rounds_of(generator, scores=scores)
        rounds.grow(1)
        rounds.draw(10)
        rounds.draw(10)
        return estimate(rounds)

    assert_unbiased(make)


def test_scores_of_zero_can_be_drawn_all_the_same():
    """Data that training thought sure may carry curvature by now."""
    scores = torch.zeros(60)
    scores[:30] = 1.0

    def make(generator):
        rounds = rounds_of(generator, scores=scores)
        rounds.grow(1)
        rounds.draw(20)
        return estimate(rounds)

    assert_unbiased(make)


def test_no_pair_is_propagated_twice_and_all_of_them_are_the_full_batch():
    rounds = rounds_of(torch.Generator().manual_seed(0))
    rounds.grow(60)
    seen = []
    while not rounds.exhausted:
        before = rounds._taken.clone() if rounds._taken is not None else torch.zeros(60, 3).bool()
        rounds.draw(50)
        new = rounds._taken & ~before
        assert not bool((new & before).any())
        seen.append(int(new.sum()))
    assert sum(seen) == 180 == rounds.engine.cost.backward
    torch.testing.assert_close(estimate(rounds), exact_B())
    rounds.draw(5)  # nothing is left
    assert rounds.engine.cost.backward == 180


def test_certain_pairs_are_in_no_group_unless_the_pool_is_a_draw_itself():
    for n_data, certain in ((60, True), (600, False)):
        rounds = rounds_of(torch.Generator().manual_seed(0), n_data=n_data)
        rounds.grow(10_000)
        rounds.draw(180)  # all that there are
        assert rounds.whole is certain
        assert bool(((rounds.drawn.groups == -1) == certain).all())


def test_pairs_of_a_datum_share_its_forward_pass():
    rounds = rounds_of(torch.Generator().manual_seed(0))
    rounds.grow(60)
    assert rounds.engine.cost.forward == 60
    rounds.draw(100)
    n_data, n_pairs = int(rounds._taken.any(1).sum()), int(rounds._taken.sum())
    assert n_data < n_pairs  # some data have several pairs
    assert rounds.engine.cost.forward == 60 + n_data
    assert rounds.engine.cost.backward == n_pairs


@pytest.mark.parametrize(
    ("scores", "words"), [(torch.ones(5), "for each of the 60"), (-torch.ones(60), "non-negative")]
)
def test_scores_that_do_not_fit_are_refused(scores, words):
    with pytest.raises(ValueError, match=words):
        rounds_of(scores=scores)


def test_streams_have_no_positions_for_scores():
    data = TrainingData([(X, Y)], None, 60, torch.device("cpu"))
    with pytest.raises(ValueError, match="stream"):
        Rounds(Engine(NET, "classification"), data, AutoOptions(scores=torch.ones(60)))


def test_old_scores_however_small_keep_their_proportions():
    scores = torch.linspace(1e-9, 3e-9, 60)
    stale = rounds_of(scores=scores).stale
    assert float(stale.max() / stale.min()) > 2.9


def test_pairs_without_curvature_are_not_drawn(monkeypatch):
    rounds = rounds_of(torch.Generator().manual_seed(0))
    rounds.grow(60)
    nothing = torch.zeros(60, 3, dtype=torch.float64)
    monkeypatch.setattr(type(rounds.moments), "scores", property(lambda self: nothing.clone()))
    rounds.draw(8)
    assert not len(rounds.drawn.weights) and rounds.exhausted


def test_rounds_count_by_their_precision(monkeypatch):
    """By the number of draws over the square of the trace that is left to chance."""
    rounds = rounds_of(torch.Generator().manual_seed(0))
    rounds.grow(60)
    plain_draw, plain_add, precisions, shares = rounds._draw, rounds.drawn.add, [], []

    def draw(m):
        found, left = plain_draw(m)
        precisions.append(int((found.probabilities < 1).sum()) / left**2)
        return found, left

    def add(probabilities, groups, share, growth, **rest):
        shares.append(share)
        plain_add(probabilities, groups, share, growth, **rest)

    monkeypatch.setattr(rounds, "_draw", draw)
    monkeypatch.setattr(rounds.drawn, "add", add)
    rounds.draw(8)
    rounds.draw(20)
    assert shares == pytest.approx([1.0, precisions[1] / sum(precisions)])
    assert precisions[1] > 2 * precisions[0]  # more draws, and less that is left to chance


class SortsInside(nn.Module):
    """A layer that sees its data in another order, and gives them back in their own."""

    def __init__(self, sorts):
        super().__init__()
        torch.manual_seed(0)
        self.sorts, self.inner, self.outer = sorts, nn.Linear(3, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, x):
        """Sort by the first input, if at all."""
        order = x[:, 0].argsort() if self.sorts else torch.arange(len(x))
        return self.outer(torch.tanh(self.inner(x[order])[order.argsort()]))


def test_drawn_rows_keep_their_weights_if_the_network_sorts_its_data_inside():
    X = 3 * torch.randn(12, 3, generator=torch.Generator().manual_seed(1)).double()
    factors = []
    for sorts in (False, True):
        engine = Engine(SortsInside(sorts), "classification")
        options = AutoOptions(n_passes=12, generator=torch.Generator().manual_seed(0))
        data = TrainingData((X, torch.arange(12) % 3), None, 12, X.device)
        rounds = Rounds(engine, data, options)
        rounds.grow(12)
        rounds.draw(12)
        factors.append(rounds.factors[0].estimate(rounds.scale))
    torch.testing.assert_close(*factors)
