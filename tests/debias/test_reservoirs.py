"""Reservoirs: the draw from a stream has the probabilities and weights of a draw from a pool."""

import pytest
import torch

from laplace_debias.debias.reservoirs import Reservoirs
from laplace_debias.debias.sampling import sampling_probabilities


def test_stream_draws_each_item_with_its_probability():
    scores = torch.tensor([0.0, 1.0, 2.0, 0.0, 5.0, 0.5])
    generator = torch.Generator().manual_seed(0)
    m, n_draws = 6, 1500
    counts = torch.zeros(6, dtype=torch.float64)
    for _ in range(n_draws):
        reservoirs = Reservoirs(m, uniform=0.2, generator=generator)
        for part in scores.split(2):
            reservoirs.update(part)
        counts += torch.bincount(reservoirs.draw().indices, minlength=6)
    q = sampling_probabilities(scores, uniform=0.2)
    total = m * n_draws
    z = (counts - total * q) / (total * q * (1 - q)).sqrt()
    assert z.abs().max() < 4


def test_weights_are_one_over_n_times_the_probability():
    """And so sums over the stream are estimated without bias, zero scores included."""
    scores = torch.tensor([0.0, 1.0, 2.0, 0.0, 5.0, 0.5])
    values = torch.tensor([3.0, -1.0, 0.5, 2.0, 1.0, -4.0]).double()
    q = sampling_probabilities(scores, uniform=0.2)
    generator = torch.Generator().manual_seed(0)
    means = []
    for _ in range(1500):
        reservoirs = Reservoirs(4, uniform=0.2, generator=generator)
        reservoirs.update(scores[:4])
        reservoirs.update(scores[4:])
        draw = reservoirs.draw()
        torch.testing.assert_close(draw.weights, 1 / (6 * q[draw.indices]))
        means.append((draw.weights * values[draw.indices]).mean())
    means = torch.stack(means)
    assert abs(means.mean() - values.mean()) < 4 * means.std() / 1500**0.5


def test_the_caller_is_told_which_items_to_keep():
    generator = torch.Generator().manual_seed(0)
    reservoirs, kept = Reservoirs(5, generator=generator), {}
    for start in range(0, 40, 8):
        slots, positions = reservoirs.update(torch.rand(8, generator=generator))
        assert len(set(slots.tolist())) == len(slots) and (positions < 8).all()
        kept.update(zip(slots.tolist(), (positions + start).tolist(), strict=True))
    assert [kept[slot] for slot in range(5)] == reservoirs.draw().indices.tolist()


def test_reservoirs_do_not_depend_on_each_other():
    generator = torch.Generator().manual_seed(0)
    scores = torch.tensor([1.0, 1.0, 1.0])
    pairs = torch.zeros(3, 3)
    for _ in range(3000):
        reservoirs = Reservoirs(2, generator=generator)
        reservoirs.update(scores)
        one, two = reservoirs.draw().indices.tolist()
        pairs[one, two] += 1
    z = (pairs - 3000 / 9) / (3000 / 9 * 8 / 9) ** 0.5  # with replacement: all pairs alike
    assert z.abs().max() < 4


@pytest.mark.parametrize(
    ("m", "message"), [(0, "positive number of reservoirs"), (3, "at least 3")]
)
def test_too_few(m, message):
    with pytest.raises(ValueError, match=message):
        reservoirs = Reservoirs(m)
        reservoirs.update(torch.ones(2))
        reservoirs.draw()


def test_reservoirs_toss_their_coins_apart():
    """Whether a reservoir ignores the scores says nothing about the others."""
    generator = torch.Generator().manual_seed(0)
    pairs, n_draws = torch.zeros(2, 2, dtype=torch.float64), 3000
    for _ in range(n_draws):
        reservoirs = Reservoirs(2, uniform=0.5, generator=generator)
        reservoirs.update(torch.tensor([1.0, 0.0]))
        one, two = reservoirs.draw().indices.tolist()
        pairs[one, two] += 1
    q = torch.tensor([0.75, 0.25], dtype=torch.float64)
    expected = torch.outer(q, q)
    z = (pairs - n_draws * expected) / (n_draws * expected * (1 - expected)).sqrt()
    assert z.abs().max() < 4


def test_the_uniform_share_is_checked():
    with pytest.raises(ValueError, match="got 1.5"):
        Reservoirs(2, uniform=1.5)
