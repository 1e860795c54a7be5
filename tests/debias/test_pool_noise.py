"""What a pool leaves to chance, against dense derivatives and many pools."""

import torch
from torch import nn

from laplace_debias.debias import pool_noise
from laplace_debias.debias.certificate import log_deviations
from laplace_debias.debias.eigen import EigenFactors
from laplace_debias.debias.pool_moments import PoolMoments
from laplace_debias.debias.pool_noise import input_noise, output_noise, pool_noises
from laplace_debias.kfac.engine import Engine
from tests.debias.test_certificate import along_A, blocks_of, dense, posterior, spd

__all__ = ["posterior"]  # a fixture


def test_noise_of_the_input_factors_is_the_derivative(posterior):
    factors, J, ridges = posterior
    delta = spd(2, 5) - spd(2, 6)
    found = input_noise(blocks_of(factors), [delta, None], along_A(factors, J), ridges)
    (B, A), bias = factors
    step = 1e-6
    sides = [dense([(B, A + s * step * delta), bias], J, ridges) for s in (1, -1)]
    torch.testing.assert_close(found, (sides[0] - sides[1]) / (2 * step), rtol=1e-5, atol=1e-8)


def test_noise_at_many_outputs_is_the_derivative_on_average(monkeypatch):
    """Random signs: unbiased, and not exact, so that the average tells."""
    g = torch.Generator().manual_seed(0)
    J = torch.randn(400, 24, 5, generator=g, dtype=torch.float64)[:1].expand(400, -1, -1)
    B, A, ridges = spd(24, 1), spd(5, 2), torch.tensor([0.1], dtype=torch.float64)
    delta = spd(5, 3) - spd(5, 4)
    blocks, along = blocks_of([(B, A)]), along_A([(B, A)], [J])
    found = input_noise(blocks, [delta], along, ridges)
    monkeypatch.setattr(pool_noise, "MOST_SUMS", 24)
    exact = input_noise(blocks, [delta], along, ridges)
    error = float(found.std() / len(found) ** 0.5)
    assert error > 0 and abs(float(found.mean() - exact[0])) < 3 * error
    assert float(found.std()) < 0.5 * abs(float(exact[0]))


def test_noise_of_the_outputs_is_half_of_what_lies_between_both_sides(posterior):
    factors, J, ridges = posterior
    halves, rare = (spd(3, 7), spd(3, 8)), 0.36
    found = output_noise(
        blocks_of(factors), [True, False], halves, rare, along_A(factors, J), ridges
    )
    (_, A), bias = factors
    H, D = (halves[0] + halves[1]) / 2, 0.6 * (halves[0] - halves[1]) / 2
    one, two = (dense([(H + s * D, A), bias], J, ridges) for s in (1, -1))
    torch.testing.assert_close(found, (one - two) / 2)


def test_a_pool_tells_what_it_leaves_to_chance_of_a_last_layer():
    """100 of 200 data, whose inputs are alike: what varies is the outputs' Hessian."""
    torch.manual_seed(0)
    net = nn.Linear(2, 3, bias=False).double()
    size = torch.randn(200, 1, dtype=torch.float64)
    x = torch.cat([size, size], 1).sign() + 0.01 * torch.randn(200, 2, dtype=torch.float64)
    x = x * (torch.arange(200)[:, None] % 5 / 2)
    y, ridges = torch.zeros(200, dtype=torch.long), torch.ones(1, dtype=torch.float64)
    J = [torch.randn(6, 3, 2, dtype=torch.float64)]
    A = torch.linalg.eigh(x.T @ x / 200)

    def deviations(moments):
        H = 200 * moments.engine.mean_hessian(moments.outputs)
        lam, Q = torch.linalg.eigh(H)
        blocks = [EigenFactors(Q, lam.clamp(min=0), A[1], A[0])]
        return blocks, log_deviations(blocks, [J[0] @ A[1]], ridges)

    def pool(rows):
        moments = PoolMoments(Engine(net, "classification"))
        for part in rows.split(50):
            moments.add(x[part], y[part])
        return moments

    _, truth = deviations(pool(torch.arange(200)))
    said, errors = [], []
    for seed in range(200):
        rows = torch.randperm(200, generator=torch.Generator().manual_seed(seed))[:100]
        moments = pool(rows)
        blocks, theta = deviations(moments)
        *_, noise = pool_noises(moments, 200, blocks, [J[0] @ A[1]], ridges)
        said.append(noise.square())
        errors.append((theta - truth).square())
    ratio = torch.stack(said).mean() / torch.stack(errors).mean()
    assert 0.7 < float(ratio) < 1.4
    assert list(pool_noises(pool(torch.arange(200)), 200, [], [], ridges)) == []
