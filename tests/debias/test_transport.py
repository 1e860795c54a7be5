"""Carried input factors, against square roots by scipy and products of whole matrices."""

import pytest
import torch
from scipy.linalg import sqrtm
from torch import nn

from laplace_debias.debias.transport import carried, pixel_block, transport
from laplace_debias.kfac.grams import input_mean


def spd(n, seed, rank=None):
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(rank or 3 * n, n, generator=g, dtype=torch.float64)
    return X.T @ X / len(X)


def root(M):
    return torch.tensor(sqrtm(M.numpy()).real)


def test_the_map_is_that_of_optimal_transport():
    own, target = spd(5, 0), spd(5, 1)
    S, rest = transport(own, target, 1e-12)
    inverse = torch.linalg.inv(root(own))
    torch.testing.assert_close(S, inverse @ root(root(own) @ target @ root(own)) @ inverse)
    torch.testing.assert_close(S @ own @ S, target)
    torch.testing.assert_close(S, S.T)
    torch.testing.assert_close(rest, torch.zeros_like(rest))
    # no other map between the two moves less (all of them are S times a rotation of own)
    turned, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))
    other = S @ root(own) @ turned @ inverse
    torch.testing.assert_close(other @ own @ other.T, target)
    moved = [
        float(torch.trace((T - torch.eye(5)) @ own @ (T - torch.eye(5)).T)) for T in (S, other)
    ]
    assert moved[0] < moved[1]


def test_the_same_covariance_moves_nothing():
    own = spd(4, 0)
    torch.testing.assert_close(transport(own, own, 1e-12)[0], torch.eye(4, dtype=torch.float64))
    A = spd(12, 1)
    torch.testing.assert_close(carried(A, pixel_block(A, 4)), A)


def test_every_pixel_of_a_patch_is_mapped_alike():
    c, k = 3, 5
    A, G = spd(c * k, 0), spd(c, 1)
    S, _ = transport(pixel_block(A, c), G, 1e-12)
    whole = torch.kron(S, torch.eye(k, dtype=torch.float64))
    found = carried(A, G)
    torch.testing.assert_close(found, whole @ A @ whole.T)
    torch.testing.assert_close(pixel_block(found, c), G)
    assert carried(A.float(), G.float()).dtype == torch.float32


def test_channels_that_were_silent_keep_their_curvature():
    c, k = 4, 9
    A = torch.zeros(c, k, c, k, dtype=torch.float64)
    A[:2, :, :2] = spd(2 * k, 0).view(2, k, 2, k)
    G = spd(c, 1)
    found = carried(A.view(c * k, c * k), G)
    blocks = found.view(c, k, c, k)
    for u in range(k):  # two channels were silent: all pixels get what is known of these
        torch.testing.assert_close(blocks[2:, u, 2:, u], G[2:, 2:])
    torch.testing.assert_close(blocks[:2, k // 2, :2, k // 2], G[:2, :2])
    assert float(blocks[2:, 0, :, 1].abs().max()) == 0.0  # neighbours are taken for uncorrelated
    assert float(torch.linalg.eigvalsh(found)[0]) > -1e-12


def images(n, generator):
    """Smooth images of three channels, whose brightness, contrast and hue vary."""
    noise = torch.randn(n, 3, 20, 20, generator=generator, dtype=torch.float64)
    x = nn.functional.avg_pool2d(noise, 3, 1, 1)
    size = torch.randn(n, 3, 1, 1, generator=generator, dtype=torch.float64).mul(0.6).exp()
    return x * size + torch.randn(n, 3, 1, 1, generator=generator, dtype=torch.float64) * 0.3


def errors(n_draws=40):
    """Mean |log ratio| of the variances of random directions, of few images and carried."""
    g, layer = torch.Generator().manual_seed(0), nn.Conv2d(3, 2, 3, padding=1).double()
    x = images(400, g)
    whole = input_mean(layer, x)[0]
    G, u = pixel_block(whole, 3), torch.randn(50, len(whole), generator=g, dtype=torch.float64)
    precision = 0.01 * whole.trace() / len(whole)

    def log_variance(A):
        return (u @ torch.linalg.inv(A + precision * torch.eye(len(A))) * u).sum(1).log()

    found = []
    for _ in range(n_draws):
        A = input_mean(layer, x[torch.randperm(400, generator=g)[:20]])[0]
        truth = log_variance(whole)
        found.append([float((log_variance(M) - truth).abs().mean()) for M in (A, carried(A, G))])
    return torch.tensor(found).mean(0)


def test_few_images_carried_to_the_pixels_of_many_are_twice_as_near():
    few, moved = errors()
    assert moved < few / 2
    assert few > 0.05  # the few images alone do not pass


def test_what_is_silent_in_the_middle_alone_stays_as_it_is():
    """No pixel in the middle has the second channel, its neighbours have."""
    c, k = 2, 3
    blocks = spd(c * k, 0).view(c, k, c, k)
    blocks[1, 1] = blocks[:, :, 1, 1] = 0.0
    G = torch.diag(torch.tensor([2.0, 0.0], dtype=torch.float64))
    found = carried(blocks.view(c * k, c * k), G).view(c, k, c, k)
    torch.testing.assert_close(found[1, :, 1], blocks[1, :, 1])
    torch.testing.assert_close(found[0, :, 0], blocks[0, :, 0] * 2 / blocks[0, 1, 0, 1])


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_rounded_zeros_are_zeros_at_every_scale(scale):
    """Three channels always have the same value in the few data, in single precision."""
    g = torch.Generator().manual_seed(0)
    x = (
        torch.randn(50, 1, 8, 8, generator=g).expand(50, 3, 8, 8)
        * torch.tensor([1.0, 0.7, 1.3])[:, None, None]
    )
    A = input_mean(nn.Conv2d(3, 2, 3), x)[0] * scale
    G = (spd(3, 1) * scale).float()
    line = torch.tensor([1.0, 0.7, 1.3], dtype=torch.float64)
    line = torch.outer(line, line) / line.square().sum()
    silent = torch.eye(3, dtype=torch.float64) - line
    middle = pixel_block(carried(A, G), 3).double() / scale
    expected = line @ G.double() @ line + silent @ G.double() @ silent
    torch.testing.assert_close(middle, expected / scale, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_no_scale_is_special(scale):
    A, G = spd(12, 0), spd(4, 1)
    torch.testing.assert_close(carried(scale * A, scale * G), scale * carried(A, G))
