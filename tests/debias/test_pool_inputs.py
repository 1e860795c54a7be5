"""Input factors of a pool, of few data's patches and all data's pixels, against all patches."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from laplace_debias.debias import pool_inputs
from laplace_debias.debias.pool_inputs import PoolInputs, least_patches
from laplace_debias.debias.pool_moments import PoolMoments
from laplace_debias.debias.transport import carried, pixel_block
from laplace_debias.kfac.engine import Engine
from laplace_debias.kfac.factors import Factors


@pytest.fixture(autouse=True)
def few_pay(monkeypatch):
    """No layer is cheap."""
    for name in ("MOST_MULTIPLICATIONS", "MOST_FOR_PATCHES", "ROWS_PER_DIMENSION"):
        monkeypatch.setattr(pool_inputs, name, 0.0)


def cnn():
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 3, 1), nn.Flatten(), nn.Linear(12, 3)
    return Engine(nn.Sequential(*layers).double(), "classification")


def passed(engine, x, size, n_patches):
    """The pool's inputs after mini-batches of some size."""
    inputs, seen = PoolInputs(n_patches, engine.pixels_per_patch), 0
    for part in x.split(size):
        wanted, pixels = inputs.wanted(seen)
        new = engine.factors(part, inputs=wanted, outputs=False, pixels=pixels)
        inputs.add(new, pixels)
        seen += len(part)
    return inputs


def data(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    size = torch.randn(n, 2, 1, 1, generator=g, dtype=torch.float64).exp()
    return size * torch.randn(n, 2, 3, 3, generator=g, dtype=torch.float64)


def test_patches_of_few_are_carried_to_the_pixels_of_all(monkeypatch):
    monkeypatch.setattr(pool_inputs, "LEAST_DATA", 12)
    engine, x = cnn(), data(20)
    inputs = passed(engine, x, 4, n_patches=8)
    whole = engine.factors(x, outputs=False).A
    few = engine.factors(x[:8], outputs=False).A[0]
    torch.testing.assert_close(inputs.A[0], carried(few, pixel_block(whole[0], 2)))
    # one pixel per patch, 4 positions: from 12 data; and one row per datum: from all
    torch.testing.assert_close(inputs.A[2], engine.factors(x[:12], outputs=False).A[2])
    torch.testing.assert_close(inputs.A[4], whole[4])
    shares = [inputs.share(i, 20) for i in (0, 2, 4)]
    assert shares == [8 / 20, 12 / 20, 1.0]


def test_of_all_data_nothing_is_carried():
    engine, x = cnn(), data(20)
    inputs = passed(engine, x, 4, n_patches=20)
    for one, two in zip(inputs.A, engine.factors(x, outputs=False).A, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two)
    assert inputs.share(0, 20) == 1.0


def sized(n, side, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, side, side, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("sides", [(3, 6), (6, 3)])
def test_images_of_unequal_sizes_count_by_their_patches(sides):
    """The first mini-batch does not tell how many rows the others have."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    engine, few, rest = Engine(net, "classification"), sized(8, sides[0], 0), sized(8, sides[1], 1)
    inputs, seen = PoolInputs(8, engine.pixels_per_patch), 0
    for part in (*few.split(4), *rest.split(4)):
        wanted, pixels = inputs.wanted(seen)
        inputs.add(engine.factors(part, inputs=wanted, outputs=False, pixels=pixels), pixels)
        seen += len(part)
    rows, others = (8 * (side - 1) ** 2 for side in sides)
    assert inputs.share(0, 16) == rows / (rows + others)


def test_a_layer_that_no_datum_reaches_has_no_noise():
    engine = Engine(nn.Conv2d(2, 3, 2).double(), "classification")
    inputs = PoolInputs(1, engine.pixels_per_patch)
    for _ in range(3):
        inputs.add(engine.factors(data(4), outputs=False), set())
    for part in (*inputs.parts, inputs.pixels):
        object.__setattr__(part, "n_rows", (0, 0))
    assert inputs.noises(12, 20) == [[None, None]] and inputs.share(0, 12) == 1.0


def test_bad_numbers_are_found_where_they_are():
    inputs = passed(cnn(), data(20), 4, n_patches=8)
    inputs.pixels.A[0][0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN or Inf .* of '0.weight'"):
        inputs.decomposed()


def test_reduced_positions_have_no_patches():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 3)).double()
    engine, x = Engine(net, "classification", kfac_approx="reduce"), data(20)
    moments = PoolMoments(engine, n_patches=8)
    for part in x.split(4):
        moments.add(part, torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(moments.inputs.A[0], engine.factors(x, outputs=False).A[0])
    assert moments.inputs.pixels is None


def test_enough_patches_are_seen(monkeypatch):
    """16 rows of 4 entries for each of the first half's images: 4 per datum, 64 multiplications."""
    engine = Engine(nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten()).double(), "classification")
    inputs = PoolInputs(10, engine.pixels_per_patch)
    x = torch.randn(4, 1, 3, 3, dtype=torch.float64)
    every, cut = (True, set()), ({"0.weight", "0.bias"}, {"0.weight"})
    for _ in range(2):
        assert inputs.wanted(100) == every  # either half has to begin
        inputs.add(engine.factors(x, outputs=False), set())
    assert [inputs.wanted(n) for n in (9, 10)] == [every, cut]
    monkeypatch.setattr(pool_inputs, "ROWS_PER_DIMENSION", 15)  # of 4 dimensions, 4 rows a datum
    assert [inputs.wanted(n) for n in (14, 15)] == [every, cut]
    monkeypatch.setattr(pool_inputs, "LEAST_DATA", 12)  # at most
    assert [inputs.wanted(n) for n in (11, 12)] == [every, cut]
    monkeypatch.setattr(pool_inputs, "MOST_FOR_PATCHES", 20 * 64.0)
    assert [inputs.wanted(n) for n in (19, 20)] == [every, cut]
    inputs.parts[0] = replace(inputs.parts[0], n=400)  # of further data, no patches were seen
    assert [inputs.wanted(n) for n in (19, 20)] == [every, cut]


def test_positions_without_patches_see_more(monkeypatch):
    engine = Engine(nn.Sequential(nn.Conv1d(2, 1, 1), nn.Flatten()).double(), "classification")
    inputs = PoolInputs(1, engine.pixels_per_patch)
    for _ in range(2):
        inputs.add(engine.factors(torch.randn(2, 2, 3).double(), outputs=False), set())
    monkeypatch.setattr(pool_inputs, "LEAST_DATA", 8)
    assert [inputs.wanted(n) for n in (7, 8)] == [(True, set()), ({"0.bias"}, set())]
    monkeypatch.setattr(pool_inputs, "MOST_MULTIPLICATIONS", 9 * 12.0)  # 2 x 2 x 3 a datum
    assert [inputs.wanted(n) for n in (8, 9)] == [(True, set()), ({"0.bias"}, set())]


def test_mini_batches_go_to_the_smaller_half():
    engine = Engine(nn.Linear(3, 2).double(), "classification")
    inputs = PoolInputs()
    for n in (6, 2, 2, 5, 5):
        inputs.add(engine.factors(torch.ones(n, 3).double(), outputs=False), set())
    assert [part.n for part in inputs.parts] == [11, 9]  # 6 + 5, and 2 + 2 + 5


def test_decompositions_are_kept_until_the_pool_grows():
    engine, x = cnn(), data(8)
    inputs = passed(engine, x, 4, n_patches=99)
    first = inputs.decomposed()
    assert inputs.decomposed() is first and first[1] is None
    Q, lam = first[0]
    torch.testing.assert_close(Q * lam @ Q.T, inputs.A[0])
    inputs.add(engine.factors(x, outputs=False), set())
    assert inputs.decomposed() is not first


def noise_and_error(n_pool, n_patches, n_data, draws=300):
    """Mean squares of what is said to be off, and of what is, of the first convolution's A."""
    engine, population = cnn(), data(n_data, seed=1)
    g, said, true = torch.Generator().manual_seed(0), [], []
    whole = engine.factors(population, outputs=False).A[0]
    for _ in range(draws):
        x = population[torch.randperm(n_data, generator=g)[:n_pool]]
        inputs = passed(engine, x, n_patches // 2, n_patches)
        parts = [noise[0] for noise in inputs.noises(n_pool, n_data) if noise[0] is not None]
        said.append(sum(part.square().sum() for part in parts))
        true.append((inputs.A[0] - whole).square().sum())
    return float(torch.stack(said).mean()), float(torch.stack(true).mean())


@pytest.mark.parametrize(
    ("n_pool", "n_patches", "n_data"),
    [(200, 200, 400), (400, 100, 400), (400, 240, 400), (200, 60, 400)],
    ids=["a pool", "patches", "many patches", "both"],
)
def test_halves_tell_how_far_the_input_factors_are_off(n_pool, n_patches, n_data):
    said, true = noise_and_error(n_pool, n_patches, n_data)
    assert 0.75 < said / true < 1.35


def test_carried_factors_are_nearer_and_said_to_be(monkeypatch):
    _, true = noise_and_error(400, 100, 400)
    monkeypatch.setattr(pool_inputs, "carried", lambda A, G, name: A)
    said, few = noise_and_error(400, 100, 400)
    assert true < few / 2  # and what is not carried does not pass
    assert 0.75 < said / few < 1.35


def test_nothing_is_left_to_chance_in_a_whole_training_set():
    inputs = passed(cnn(), data(20), 4, n_patches=20)
    assert inputs.noises(20, 20) == [[None] * 6]
    one = PoolInputs()
    one.add(cnn().factors(data(4), outputs=False), set())
    assert one.noises(4, 20) == [[None] * 6]  # one mini-batch has no halves


@pytest.mark.parametrize(
    ("tolerance", "n_passes", "n"),
    [(None, 36, 256), (None, 600, 300), (0.05, None, 256), (0.01, None, 484), (0.01, 9999, 484)],
)
def test_more_passes_and_tighter_tolerances_take_more_patches(tolerance, n_passes, n):
    assert least_patches(tolerance, n_passes) == n


def test_data_without_patches_count_for_nothing():
    inputs, eye = PoolInputs(), torch.eye(2).double()
    old = replace(Factors.from_blocks(["w"], [[eye, 2 * eye]], 4, 2), n_rows=(16,))
    inputs.parts = [old]
    new = replace(old, A=(None,))
    filled = inputs.filled(new, 0)
    assert filled.n_rows == (0,) and torch.equal((old + filled).A[0], 2 * eye)
    assert inputs.filled(new, 1) is new  # nothing to add to
