"""Rounds that are interrupted anywhere, and go on: to the same bits."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.debias import pool_inputs, rounds
from laplace_debias.debias.auto import _Fit
from laplace_debias.debias.drawn import DrawnFactor
from laplace_debias.debias.leverages import BlockGrams
from laplace_debias.debias.options import AutoOptions
from laplace_debias.debias.pool_moments import PoolMoments
from laplace_debias.storage.fingerprints import tensors_hash
from tests import cases


class Stop(Exception):
    """Ends a fit from inside."""


def fit(case, path=None, stream=False, stale=False, **options):
    """A fit in rounds: bits of the posterior, its report, and where the generator stands."""
    X, y = case.data(60)
    torch.manual_seed(5)
    loader = [(X[i : i + 8], y[i : i + 8]) for i in range(0, 60, 8)]
    if not stream:
        loader = DataLoader(TensorDataset(X, y), 8, shuffle=True)
    if stale:
        options["scores"] = torch.rand(60, generator=torch.Generator().manual_seed(2))
    la = Laplace(
        case.model(), "classification", "all", "kron", debias="auto", verify=False,
        generator=torch.Generator().manual_seed(1), **{"tolerance": 0.001, **options},
    )  # fmt: skip
    kept = {"checkpoint": path, "checkpoint_seconds": 0.0} if path else {}
    la.fit(loader, n_data=60, **kept)
    found = [t for block in (*la._fitted.Q, *la._fitted.lam) for t in block]
    report = la.fit_report
    numbers = (report.n_passes, report.n_forward, report.distance, report.reason)
    after = int(torch.randint(2**31, (), generator=la.generator))
    return tensors_hash([*found, la.loss]), numbers, after


PLACES = {
    "the pool": (PoolMoments, "add"),
    "passes": (DrawnFactor, "add"),
    "the end of a round": (DrawnFactor, "close"),
    "certificates": (_Fit, "certificate"),
}


@pytest.fixture
def growing(monkeypatch):
    """A pool that grows from round to round, and rounds that begin small."""
    monkeypatch.setattr(AutoOptions, "pool_size", lambda self, n: n)
    monkeypatch.setattr("laplace_debias.debias.auto.FIRST_ROUND", 10)


@pytest.mark.filterwarnings("ignore:The fit stops")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("case", "more"),
    [
        (cases.MLP, {"n_passes": 70}),  # a full batch would not tell how rounds are averaged
        (cases.MLP, {"stream": True}),
        (cases.MLP, {"stale": True, "n_passes": 90}),
        (cases.CNN, {"n_passes": 70}),
        (cases.CNN, {"n_passes": 70, "tolerance": None}),
        (cases.CNN, {"tolerance": 1e-9}),
    ],
    ids=["map", "stream", "scores", "blocks", "patches of few", "all pairs"],
)
def test_goes_on_from_anywhere(case, more, place, growing, tmp_path, monkeypatch):
    if "tolerance" in more:
        for constant in ("MOST_FOR_PATCHES", "ROWS_PER_DIMENSION"):
            monkeypatch.setattr(pool_inputs, constant, 0)
        monkeypatch.setattr(rounds, "least_patches", lambda *_: 20)
    expected, path = fit(case, **more), tmp_path / "a"
    owner, name = PLACES[place]
    original, calls, stop = getattr(owner, name), [], {"at": 0}

    def counted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == stop["at"]:
            raise Stop
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    assert fit(case, **more) == expected
    n, resumed = len(calls), 0
    for at in sorted({2, 2 * n // 3, n} & set(range(1, n + 1))):
        stop["at"] = at
        calls.clear()
        with pytest.raises(Stop):
            fit(case, path, **more)
        assert path.exists()
        calls.clear()
        monkeypatch.setattr(owner, name, original)
        assert fit(case, path, **more) == expected
        assert not path.exists()
        monkeypatch.setattr(owner, name, counted)
        resumed += 1
    assert resumed > 0


def test_no_more_than_a_round_is_made_again(growing, tmp_path, monkeypatch):
    passes, original = [], rounds.gradient_rows

    def counted(*args, **kwargs):
        passes.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(rounds, "gradient_rows", counted)
    expected = fit(cases.MLP)
    n = len(passes)
    closes, close = [], DrawnFactor.close

    def stopping(self, *args, **kwargs):
        closes.append(1)
        if len(closes) == stop:
            raise Stop
        return close(self, *args, **kwargs)

    stop = 0
    monkeypatch.setattr(DrawnFactor, "close", stopping)
    fit(cases.MLP)
    stop = len(closes)  # the last one
    closes.clear()
    passes.clear()
    with pytest.raises(Stop):
        fit(cases.MLP, tmp_path / "a")
    assert len(passes) == n
    passes.clear()
    assert fit(cases.MLP, tmp_path / "a") == expected
    assert 0 < len(passes) < n


def test_data_that_have_to_pass_alone_do_after_an_interruption(growing, tmp_path, monkeypatch):
    add, close, passes, closes = PoolMoments.add, DrawnFactor.close, rounds.gradient_rows, []

    def uneven(self, *batch):
        add(self, *batch)
        self.uneven = True

    def stopping(self, *args, **kwargs):
        closes.append(1)
        if len(closes) > 3:
            raise Stop
        return close(self, *args, **kwargs)

    monkeypatch.setattr(PoolMoments, "add", uneven)
    monkeypatch.setattr(DrawnFactor, "close", stopping)
    with pytest.raises(Stop):
        fit(cases.MLP, tmp_path / "a")
    alone = []
    monkeypatch.setattr(PoolMoments, "add", add)
    monkeypatch.setattr(DrawnFactor, "close", close)
    monkeypatch.setattr(
        rounds,
        "gradient_rows",
        lambda *a, **more: alone.append(more["alone"]) or passes(*a, **more),
    )
    fit(cases.MLP, tmp_path / "a")
    assert alone and all(alone)


def test_blocks_are_kept_as_blocks(growing, tmp_path, monkeypatch):
    seen, close = [], DrawnFactor.close

    def noted(self, *args, **kwargs):
        close(self, *args, **kwargs)
        seen.extend(type(rows) for rows, _ in self.rows)

    monkeypatch.setattr(DrawnFactor, "close", noted)
    fit(cases.CNN)
    assert BlockGrams in seen  # otherwise the case above shows nothing of them
