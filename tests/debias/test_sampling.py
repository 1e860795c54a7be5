"""Curvature sampling: unbiased draws, streams, and what they buy for the output factors."""

import pytest
import torch
from torch import nn

from laplace_debias.debias.reservoirs import Reservoirs
from laplace_debias.debias.sampling import (
    curvature_order,
    draw_weighted,
    effective_sample_size,
    sampling_probabilities,
)
from laplace_debias.kfac.engine import kfac_factors
from laplace_debias.network.loss import curvature_scores


@pytest.fixture(scope="module")
def trained():
    """A small classifier fitted until most of its pool of 150 data carries no curvature."""
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(150, 4, generator=generator)
    y = (x[:, 0] + 0.3 * x[:, 1] > 0).long() + (x[:, 2] > 2).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model, x = model.double(), x.double()
    outputs = model(x).detach()
    exact = [kfac_factors(model, x[n : n + 1], likelihood="classification") for n in range(len(x))]
    per_datum = [torch.stack([f.blocks[layer][0] for f in exact]) for layer in range(2)]
    return model, x, outputs, per_datum


def stream(scores, m, generator):
    """A draw from a stream that comes in batches of 40."""
    reservoirs = Reservoirs(m, uniform=0.1, generator=generator)
    kept = torch.full((m,), -1)
    for start in range(0, len(scores), 40):
        slots, positions = reservoirs.update(scores[start : start + 40])
        kept[slots] = positions + start
    draw = reservoirs.draw()
    assert torch.equal(draw.indices, kept)
    return draw


DRAWS = {
    "independent": lambda s, f, m, g: draw_weighted(s, m, uniform=0.1, generator=g),
    "systematic": lambda s, f, m, g: draw_weighted(
        s, m, uniform=0.1, order=curvature_order(f), generator=g
    ),
    "stream": lambda s, f, m, g: stream(s, m, g),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_output_factors_are_unbiased(trained, kind):
    """2,000 draws against the pool's exact mean; unit weights on the same draws fail the test."""
    _, _, outputs, per_datum = trained
    scores = curvature_scores(outputs)
    generator = torch.Generator().manual_seed(1)
    n_draws, m = 2000, 8
    draws = [DRAWS[kind](scores, outputs, m, generator) for _ in range(n_draws)]
    for B in per_datum:
        z = {}
        for name in ("weighted", "unweighted"):
            estimates = []
            for draw in draws:
                w = draw.weights if name == "weighted" else torch.ones_like(draw.weights)
                estimates.append(torch.einsum("j,jab->ab", w, B[draw.indices]) / m)
            estimates = torch.stack(estimates)
            error = (estimates.mean(0) - B.mean(0)) / (estimates.std(0) / n_draws**0.5)
            z[name] = error.abs().max()
        assert z["weighted"] < 4.5
        assert z["unweighted"] > 20


def test_curvature_sampling_and_order_reduce_the_variance(trained):
    """Variance of the mean trace of B over 600 draws of 8 data."""
    _, _, outputs, per_datum = trained
    scores, trace = curvature_scores(outputs), per_datum[0].diagonal(dim1=1, dim2=2).sum(1)
    generator = torch.Generator().manual_seed(2)
    variance = {}
    for name, (s, order) in {
        "uniform": (torch.ones_like(scores), None),
        "curvature": (scores, None),
        "systematic": (scores, curvature_order(outputs)),
    }.items():
        draws = [draw_weighted(s, 8, order=order, generator=generator) for _ in range(600)]
        variance[name] = torch.stack([(d.weights * trace[d.indices]).mean() for d in draws]).var()
    assert variance["curvature"] < variance["uniform"] / 2
    assert variance["systematic"] < variance["curvature"]


def test_weights_reach_the_factors(trained):
    """Weighted factors of a draw are the weighted sum of the data's own factors."""
    model, x, outputs, per_datum = trained
    draw = draw_weighted(curvature_scores(outputs), 20, generator=torch.Generator().manual_seed(3))
    factors = kfac_factors(
        model, x[draw.indices], likelihood="classification", weights=draw.weights
    )
    for (B, _), each in zip(factors.blocks, per_datum, strict=True):
        torch.testing.assert_close(B, torch.einsum("j,jab->ab", draw.weights, each[draw.indices]))


def test_sampled_factors_are_unbiased(trained):
    """Factors from one backward pass per datum, over 500 repeats, against the exact ones."""
    model, x, outputs, per_datum = trained
    unsure = curvature_scores(outputs).topk(10).indices  # where every label has its chance
    generator = torch.Generator().manual_seed(0)
    kwargs = {"likelihood": "classification", "fisher": "mc", "inputs": False}
    repeats = [kfac_factors(model, x[unsure], generator=generator, **kwargs) for _ in range(500)]
    for layer, each in enumerate(per_datum):
        B = torch.stack([f.blocks[layer][0] for f in repeats])
        error, noise = (B.mean(0) - each[unsure].sum(0)).abs(), B.std(0) / 500**0.5
        assert (error <= 4 * noise + 1e-12).all()  # some entries do not vary


@pytest.mark.parametrize("kind", DRAWS)
def test_draws_are_reproducible_and_leave_the_global_generator_alone(trained, kind):
    outputs = trained[2]
    scores = curvature_scores(outputs)
    state = torch.get_rng_state()
    draws = [DRAWS[kind](scores, outputs, 9, torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(draws[0].indices, draws[1].indices)
    assert torch.equal(draws[0].weights, draws[1].weights)
    other = DRAWS[kind](scores, outputs, 9, torch.Generator().manual_seed(6))
    assert not torch.equal(draws[0].indices, other.indices)
    assert torch.equal(state, torch.get_rng_state())


def test_a_second_draw_measures_without_bias_along_directions_of_the_first():
    """Halves of one systematic draw exclude each other's data; separate draws do not."""
    generator = torch.Generator().manual_seed(0)
    n, d = 300, 6
    V = torch.randn(n, d, generator=generator, dtype=torch.float64)
    scores = torch.rand(n, generator=generator, dtype=torch.float64) ** 4 + 1e-4
    B = torch.einsum("n,ni,nj->ij", scores, V, V) / n

    def factor(rows, weights):
        return torch.einsum("n,ni,nj->ij", weights * scores[rows], V[rows], V[rows]) / len(rows)

    def ratio(one, two):
        q = torch.linalg.eigh(factor(*one)).eigenvectors[:, -1]
        return (q @ factor(*two) @ q / (q @ B @ q)).item()

    order, separate, halves = scores.argsort(), [], []
    for _ in range(1500):
        draws = [draw_weighted(scores, 8, order=order, generator=generator) for _ in range(2)]
        separate.append(ratio(*((draw.indices, draw.weights) for draw in draws)))
        draw = draw_weighted(scores, 16, order=order, generator=generator)
        one, two = ((draw.indices[k::2], draw.weights[k::2]) for k in range(2))
        halves += [ratio(one, two), ratio(two, one)]
    mean, error = torch.tensor(separate).mean(), torch.tensor(separate).std() / 1500**0.5
    assert abs(mean - 1) < 3 * error < 0.06
    assert torch.tensor(halves).mean() < 0.92


def test_zero_scores_are_never_drawn_without_uniform_share():
    scores = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    for order in (None, torch.tensor([4, 3, 2, 1, 0])):
        drawn = torch.cat(
            [
                draw_weighted(scores, 5, uniform=0.0, order=order, generator=generator).indices
                for _ in range(200)
            ]
        )
        assert set(drawn.tolist()) == {1, 3}


def test_effective_sample_size():
    assert effective_sample_size(torch.ones(7)) == pytest.approx(7)
    assert effective_sample_size(torch.tensor([0.0, 2.0, 0.0])) == pytest.approx(1)


def test_errors_say_what_to_do():
    ones = torch.ones(4)
    with pytest.raises(ValueError, match="sample uniformly"):
        draw_weighted(torch.zeros(4), 2)
    with pytest.raises(ValueError, match="got nan for datum 1"):
        draw_weighted(torch.tensor([1.0, float("nan"), 1.0]), 2)
    with pytest.raises(ValueError, match="got inf for datum 0"):
        Reservoirs(1).update(torch.tensor([float("inf")]))
    with pytest.raises(ValueError, match="got -1.0 for datum 0"):
        sampling_probabilities(torch.tensor([-1.0, 2.0]))
    with pytest.raises(ValueError, match="pool of 4, got 5"):
        draw_weighted(ones, 5)
    with pytest.raises(ValueError, match=r"order of shape \[4\]"):
        draw_weighted(ones, 2, order=torch.arange(3))
    with pytest.raises(ValueError, match=r"\[0, 1\], got 1.5"):
        draw_weighted(ones, 2, uniform=1.5)
    with pytest.raises(ValueError, match=r"shape \[n\]"):
        draw_weighted(ones[:, None], 2)
    with pytest.raises(ValueError, match="positive number of reservoirs"):
        Reservoirs(0)
    reservoirs = Reservoirs(3)
    reservoirs.update(ones[:2])
    with pytest.raises(ValueError, match="at least 3 data, got 2"):
        reservoirs.draw()
    reservoirs = Reservoirs(2)
    reservoirs.update(torch.zeros(4))
    with pytest.raises(ValueError, match="got 4 zeros"):
        reservoirs.draw()
    with pytest.raises(ValueError, match="likelihood"):
        curvature_scores(torch.zeros(2, 2), "reward")
    with pytest.raises(ValueError, match="3 zeros. Remedy: pass scores"):
        effective_sample_size(torch.zeros(3))
