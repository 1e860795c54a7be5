"""Fits in rounds within a budget of memory: rows, probes and the pool are counted as well."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.data.pool import Pool
from laplace_debias.data.roles import TrainingData
from laplace_debias.debias.drawn_rows import Room
from laplace_debias.debias.pool_moments import PoolMoments
from laplace_debias.debias.room import _Need, _Trial, room_for, room_within
from laplace_debias.kfac.engine import Engine
from laplace_debias.network.live_bytes import LiveBytes


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


def normalised():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=4), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3),
        nn.ReLU(), nn.Flatten(), nn.Linear(256, 5),
    )  # fmt: skip


def perceptron():
    return nn.Sequential(
        nn.AvgPool2d(3), nn.Flatten(), nn.Linear(192, 40), nn.Tanh(), nn.Linear(40, 100), nn.Tanh(),
        nn.Linear(100, 5),
    )  # fmt: skip


def images(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 3, 24, 24, generator=generator)
    return X, torch.randint(5, (n,), generator=generator)


def fitted(make, data, budget, known, n_data=96, counted=True, **options):
    """A fit, and the peak of its live bytes."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    la = Laplace(
        make().eval(),
        "classification",
        "all",
        "kron",
        debias="auto",
        generator=generator,
        **options,
    )
    with LiveBytes(known) if counted else nullcontext() as live:
        la.fit(data, n_data=n_data, memory_budget=budget)
    return la, live.peak if counted else None


@pytest.mark.parametrize(
    ("make", "mega", "share", "rounds"),
    [(convolutions, 4, 0.5, 1), (normalised, 16, 0.9, 1), (perceptron, 4, 1.0, 2)],
)
def test_a_whole_fit_stays_within_its_budget(make, mega, share, rounds):
    """Also over several rounds; without a budget the same fit takes more."""
    batches = [images(48, seed) for seed in range(2)]
    known = [t for batch in batches for t in batch]
    options = {"tolerance": None if rounds == 1 else 1e-7, "n_passes": 32 + 32 * rounds}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the passes are spent before the tolerance is reached
        free, most = fitted(make, batches, None, known, **options)
        bound, peak = fitted(make, batches, mega * 2**20, known, **options)
    assert peak <= mega * 2**20
    assert peak < share * most
    assert bound.fit_report.n_passes == options["n_passes"]
    x = images(4, 9)[0]
    one, two = (la(x, link_approx="probit") for la in (bound, free))
    torch.testing.assert_close(one, two, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_patches_of_few_and_pixels_of_all_stay_within_the_budget(dtype, monkeypatch):
    """Input factors take most, and halves of the pool are carried."""
    for name in ("LEAST_PATCHES", "MOST_FOR_PATCHES", "ROWS_PER_DIMENSION"):
        monkeypatch.setattr(f"laplace_debias.debias.pool_inputs.{name}", 1)
    batches = [(x.to(dtype), y) for x, y in (images(24, seed) for seed in range(4))]
    known = [t for batch in batches for t in batch]
    options = {"tolerance": None, "n_passes": 32, "n_data": 200}

    def make():
        layers = nn.Conv2d(3, 64, 3, stride=4), nn.ReLU(), nn.Conv2d(64, 4, 3), nn.ReLU()
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 5)).to(dtype)

    with pytest.raises(ValueError, match="`memory_budget` of at least") as error:
        room_within(Engine(make(), "classification"), batches[0][0], 1, 200)
    least = int(str(error.value).split("at least ")[1].split(" ")[0].replace(",", ""))
    _, peak = fitted(make, batches, least, known, **options)
    assert 0.3 * least < peak <= least


def test_the_noise_of_carried_input_factors_is_counted(monkeypatch):
    """Of several layers, in double precision."""
    for name in ("MOST_FOR_PATCHES", "ROWS_PER_DIMENSION"):
        monkeypatch.setattr(f"laplace_debias.debias.pool_inputs.{name}", 0)
    layers = [nn.Conv2d(24, 24, 3, padding=1, bias=False) for _ in range(4)]  # A takes 0.37 MB
    net = nn.Sequential(*layers, nn.Conv2d(24, 3, 2), nn.Flatten()).double()
    engine, x = Engine(net, "classification"), torch.randn(12, 24, 2, 2, dtype=torch.float64)
    need = _Need(engine, _Trial.of(engine, x, 1, "input_ids"), x[0].nbytes, False)
    moments, y = PoolMoments(engine, 1), torch.zeros(3, dtype=torch.long)
    with LiveBytes([x]) as live:
        for part in x.split(3):
            moments.add(part, y)
        moments.inputs.decomposed()
        plain, of_patches = moments.inputs.noises(12, 100)
    assert plain[0] is not None and of_patches[0] is not None
    assert live.peak <= need.inputs + need.decomposing < 1.1 * live.peak


def test_rows_of_many_rounds_are_thinned(monkeypatch):
    """The rows that are kept stay below what there is room for, and the fit does not suffer."""
    from laplace_debias.debias import auto, room, rounds

    kept = []
    close = rounds.DrawnFactor.close

    def noted(self, *args, **more):
        close(self, *args, **more)
        kept.append((sum(rows.numel() for rows, _ in self.rows), self.most))

    monkeypatch.setattr(rounds.DrawnFactor, "close", noted)
    monkeypatch.setattr(room, "room_within", lambda *_, **__: Room(numbers=1000, n_probes=4))
    monkeypatch.setattr(auto, "FIRST_ROUND", 16)
    X, y = images(96)
    options = {"tolerance": 1e-7, "n_passes": 64, "counted": False}
    with pytest.warns(UserWarning, match="n_passes=64"):
        la, _ = fitted(perceptron, [(X, y)], 2**40, [X, y], **options)
    assert all(n <= most == 1000 or n <= 16 * 100 for n, most in kept)
    monkeypatch.undo()
    monkeypatch.setattr(auto, "FIRST_ROUND", 16)
    with pytest.warns(UserWarning, match="n_passes=64"):
        free, _ = fitted(perceptron, [(X, y)], None, [X, y], **options)
    one, two = (fit(X[:4], link_approx="probit") for fit in (la, free))
    torch.testing.assert_close(one, two, rtol=0.05, atol=2e-3)


def test_a_pool_that_may_not_grow_ends_the_fit():
    """All pairs of a part of the data are used: more rounds would tell nothing."""
    X, y = images(192)
    loader = DataLoader(TensorDataset(X.mean((2, 3)), y), batch_size=16)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5))
    with pytest.warns(UserWarning, match=r"limited .* to 32 of 192 data"):
        Laplace(net, "classification", "all", "kron", debias="auto", tolerance=1e-6, n_pool=32).fit(
            loader
        )
    la = Laplace(net, "classification", "all", "kron", debias="auto", tolerance=1e-6)
    with pytest.warns(UserWarning, match=r"limited .* to \d+ of 192 data"):
        la.fit(loader, memory_budget=90_000)
    assert 64 <= la.fit_report.n_pool < 192


def test_what_cannot_be_kept_is_named_before_the_fit():
    X, y = images(48)
    la = Laplace(perceptron(), "classification", "all", "kron", debias="auto")
    with pytest.raises(ValueError, match=r"at least [\d,]+ bytes for debias='auto', got") as error:
        la.fit([(X, y)], n_data=192, memory_budget=3 * 2**19)
    assert "'2.weight'" in str(error.value) and "Remedy" in str(error.value)
    with pytest.raises(AttributeError):
        la.fit_report.n_passes  # noqa: B018  nothing was fitted


def test_a_larger_budget_has_more_room():
    engine, X = Engine(convolutions(), "classification"), images(48)[0]
    rooms = [room_within(engine, X, mega * 2**20, 10_000) for mega in (4, 16, 64)]
    for small, large in zip(rooms[:-1], rooms[1:], strict=True):
        assert all(a <= b for a, b in zip(small, large, strict=True)) and small != large
    few = room_within(engine, X, 16 * 2**20, 10_000, keeps_data=True)
    assert few.n_pool < rooms[1].n_pool
    assert engine.cost.forward == engine.cost.backward == 0


def test_forward_passes_take_as_many_data_as_there_is_room_for():
    torch.manual_seed(0)
    X, y = images(32)
    engine = Engine(convolutions().eval(), "classification")
    most = 40 * 2**20
    for budget in (most, most // 4):
        engine.budget, engine.chunk = budget, None
        room = room_for(engine, Pool(TrainingData((X, y), None, 32, X.device)))
        assert engine.chunk == room.n_forward
    assert 0 < room.n_forward < 32
