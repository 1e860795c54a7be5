"""Draws of (datum, class) pairs: vectors, probabilities, unbiasedness and variance."""

import pytest
import torch

from laplace_debias.debias.pairs import (
    draw_pairs,
    inclusion_probabilities,
    pair_order,
    pair_scores,
    pair_vectors,
    pairs_of_data,
    spread_order,
)

F = 3 * torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def all_vectors(f, likelihood="classification"):
    n, C = f.shape
    classes = torch.arange(C).repeat(n)
    return pair_vectors(f.repeat_interleave(C, 0), classes, likelihood).view(n, C, C)


@pytest.mark.parametrize("likelihood", ["classification", "regression", "bernoulli"])
def test_vectors_of_a_datum_make_its_hessian(likelihood):
    V = all_vectors(F, likelihood)
    p = F.softmax(-1)
    dense = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    if likelihood == "regression":
        dense = torch.eye(4, dtype=p.dtype).expand(40, 4, 4)
    if likelihood == "bernoulli":
        dense = torch.diag_embed(F.sigmoid() * (-F).sigmoid())
    torch.testing.assert_close(V.mT @ V, dense)
    torch.testing.assert_close(V.square().sum(-1), pair_scores(F, likelihood))


def test_scores_of_sure_data_are_not_rounded_away():
    scores = pair_scores(torch.tensor([[0.0, 40.0]], dtype=torch.float64))
    p = torch.exp(torch.tensor(-40.0, dtype=torch.float64))
    torch.testing.assert_close(scores[0, 0], 2 * p, rtol=1e-8, atol=0)


@pytest.mark.parametrize("m", [1, 7, 50, 159])
def test_probabilities_sum_to_the_number_of_draws(m):
    scores = pair_scores(F).flatten()
    pi = inclusion_probabilities(scores, m)
    assert float(pi.sum()) == pytest.approx(m)
    assert float(pi.max()) <= 1
    free = pi < 1
    ratio = pi[free] / scores[free]
    torch.testing.assert_close(ratio, ratio[:1].expand(len(ratio)))
    assert bool((scores[~free] >= scores[free].max()).all())


def test_all_pairs_are_certain_where_they_are_few():
    assert inclusion_probabilities(torch.tensor([2.0, 0.0, 1.0]), 5).tolist() == [1, 0, 1]


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="at least one draw"):
        inclusion_probabilities(torch.ones(3), 0)
    with pytest.raises(ValueError, match="non-negative"):
        inclusion_probabilities(torch.tensor([1.0, -1.0]), 1)


@pytest.mark.parametrize("m", [1, 8, 60, 160])
def test_no_pair_is_drawn_twice_and_never_too_many(m):
    scores, order = pair_scores(F), pair_order(F, F)
    for seed in range(20):
        draw = draw_pairs(scores, m, order, torch.Generator().manual_seed(seed))
        pairs = draw.data * 4 + draw.classes
        assert len(pairs.unique()) == len(pairs)
        assert m - 1 <= len(draw) <= m


def test_every_pair_is_drawn_as_often_as_its_probability_says():
    scores, order = pair_scores(F), pair_order(F, F)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(160, dtype=torch.float64)
    for _ in range(4000):
        draw = draw_pairs(scores, 20, order, generator)
        counts[draw.data * 4 + draw.classes] += 1
    pi = inclusion_probabilities(scores.flatten(), 20)
    error = (pi * (1 - pi) / 4000).sqrt()
    assert bool(((counts / 4000 - pi).abs() < 5 * error + 1e-3).all())


def estimates(W, V, n_draws, uniform):
    """Estimates of the pool's factor sum_i (W v_i) (W v_i)^T behind a layer."""
    scores, order = pair_scores(F), pair_order(F, F)
    if uniform:
        scores = torch.ones_like(scores)
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(n_draws):
        draw = draw_pairs(scores, 24, order, generator)
        g = V[draw.data, draw.classes] @ W.T / draw.probabilities.sqrt()[:, None]
        found.append(g.T @ g)
    return torch.stack(found)


def test_unbiased_for_the_pools_factor_with_a_fraction_of_the_uniform_variance():
    W = torch.randn(6, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    V = all_vectors(F)
    rows = V.flatten(0, 1) @ W.T
    dense = rows.T @ rows
    ours, uniform = (estimates(W, V, 1500, u) for u in (False, True))
    for found in (ours, uniform):
        error = found.std(0) / len(found) ** 0.5
        assert bool(((found.mean(0) - dense).abs() < 5 * error + 1e-9).all())
    variance = [float((found - dense).square().sum((1, 2)).mean()) for found in (ours, uniform)]
    assert variance[0] < 0.2 * variance[1]


def test_an_order_is_a_permutation_with_near_neighbours():
    X = torch.rand(300, 2, generator=torch.Generator().manual_seed(0))
    order = spread_order(X)
    assert order.sort().values.tolist() == list(range(300))
    step = (X[order][1:] - X[order][:-1]).norm(dim=1).mean()
    assert step < 0.3 * (X[1:] - X[:-1]).norm(dim=1).mean()


def test_pairs_that_tell_the_same_classes_apart_are_neighbours():
    f = torch.tensor([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0], [5.0, 0.0, 0.0]])
    order = pair_order(f, f).tolist()
    places = [order.index(0 * 3 + 1), order.index(1 * 3 + 0), order.index(2 * 3 + 1)]  # {0, 1}
    assert max(places) - min(places) == 2


def test_draws_of_a_datum_are_found_together():
    data = torch.randint(20, (60,), generator=torch.Generator().manual_seed(0))
    parts = pairs_of_data(data)
    assert sorted(torch.cat([part.flatten() for part in parts]).tolist()) == list(range(60))
    for part in parts:
        assert bool((data[part] == data[part[:, :1]]).all())
        assert all(int((data == data[row[0]]).sum()) == part.shape[1] for row in part)
        assert bool((part[:, 0].diff() > 0).all())
