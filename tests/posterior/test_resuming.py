"""Fits that are killed, and go on: to the same bits; checkpoints of other fits are refused."""

import json
import os
import subprocess
import sys

import pytest
import torch

from laplace_debias import Laplace
from tests import cases
from tests.interrupted_fit import DRAWN, PLAIN, fit


@pytest.mark.parametrize("kinds", [PLAIN, tuple(DRAWN)], ids=["plain", "drawn"])
def test_killed_twenty_times_and_ends_with_the_same_bits(kinds, tmp_path):
    command = [sys.executable, "-m", "tests.interrupted_fit", str(tmp_path), "20", *kinds]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run(command, check=True, env=env, timeout=150)
    lives, killed, ended, resumed = json.loads((tmp_path / "lives.json").read_text())
    assert killed == 20 and lives == killed + ended and resumed >= 5
    for number in range(ended):
        kind = kinds[number % len(kinds)]
        found = json.loads((tmp_path / f"{kind}-{number}.json").read_text())
        expected = json.loads(json.dumps(fit(kind)))
        assert found == expected
    assert not list(tmp_path.glob("*.checkpoint"))  # removed at the end


def test_two_processes_that_are_killed_end_with_the_same_bits(tmp_path):
    """One of them or both: the other stops then, and both go on together."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.interrupted_together", str(tmp_path), "3", *PLAIN]
    subprocess.run(command, check=True, env=env, timeout=150)
    went_on = 0
    for kind in PLAIN:
        whole, killed = tmp_path / f"{kind}-0", tmp_path / f"{kind}-3"
        one, two = (
            [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
            for folder in (whole, killed)
        )
        assert one == two and one[0] == one[1]
        assert not [*whole.glob("fit*"), *killed.glob("fit*")]  # removed at the end
        lives, kills, resumed = json.loads((killed / "lives.json").read_text())
        assert kills == 3 < lives
        went_on += sum(n > 0 for n in resumed)
    assert went_on > 0


class Stop(Exception):
    """Ends a fit from inside."""


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """A checkpoint of a two-batch fit, in the middle of its second role."""

    def stopped_at(count, kind="two-batch"):
        calls = []
        from laplace_debias.kfac.engine import Engine

        original = Engine.factors

        def factors(self, *args, **kwargs):
            calls.append(1)
            if len(calls) > count:
                raise Stop
            return original(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Engine, "factors", factors)
            with pytest.raises(Stop):
                fit(kind, tmp_path / "a.checkpoint")
        assert (tmp_path / "a.checkpoint").exists()
        return tmp_path / "a.checkpoint"

    return stopped_at


@pytest.mark.parametrize("count", [1, 14, 15, 16, 29])
def test_goes_on_from_any_mini_batch(count, interrupted):
    assert fit("two-batch", interrupted(count)) == fit("two-batch")


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("crossfit", [1, 5, 14]),
        ("crossfit-inputs", [2, 9, 16]),
        ("crossfit-drawn", [3, 7, 17, 18, 19, 21]),
    ],
)
def test_goes_on_in_any_fold(kind, counts, interrupted):
    expected = fit(kind)
    for count in counts:
        assert fit(kind, interrupted(count, kind)) == expected


def other_model():
    model = cases.MLP.model()
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": other_model()}, "differs in model"),
        ({"fisher": "exact"}, "differs in fisher"),
        ({"kfac_approx": "reduce"}, "differs in kfac_approx"),
        ({"kind": "single"}, "differs in debias"),
        ({"label_smoothing": 0.1}, "differs in objective"),
        ({"memory_budget": 10**9}, "differs in memory_budget"),
        ({"data_seed": 3}, "the data of the interrupted fit"),
    ],
)
def test_a_checkpoint_of_another_fit_is_refused(change, message, interrupted):
    path = interrupted(20)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        fit(**{"kind": "two-batch", "path": path, **change})
    assert path.read_bytes() == before  # nothing lost: the right call can still go on


def test_a_checkpoint_of_another_version_is_refused(interrupted, monkeypatch):
    path = interrupted(20)
    monkeypatch.setattr("laplace_debias.posterior.resuming._FORMAT", 0)
    with pytest.raises(ValueError, match="differs in format"):
        fit("two-batch", path)


def test_a_checkpoint_of_other_folds_is_refused(interrupted):
    path = interrupted(5, "crossfit")
    with pytest.raises(ValueError, match="differs in n_folds"):
        fit("crossfit", path, n_folds=4)
    with pytest.raises(ValueError, match="the data of the interrupted fit"):
        fit("crossfit", path, data_seed=3)


@pytest.mark.filterwarnings("ignore:The fit stops")
def test_a_checkpoint_of_another_prior_is_refused_by_auto(interrupted):
    path = interrupted(5, "auto")
    for change in ("prior_precision", "tolerance"):
        with pytest.raises(ValueError, match=f"differs in {change}"):
            fit("auto", path, **{change: 0.5})
    with pytest.raises(ValueError, match="the data of the interrupted fit"):
        fit("auto", path, data_seed=3)
    assert fit("auto", path) == fit("auto")


def test_what_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "a").write_text("other")
    with pytest.raises(ValueError, match="cannot be read as one"):
        fit("single", tmp_path / "a")
    la = Laplace(cases.MLP.model(), "classification", "all", "kron", debias="single")
    with pytest.raises(ValueError, match="Expected `checkpoint` with override=True and debias in"):
        la.fit(cases.MLP.data(5), override=False, n_data=9, checkpoint=tmp_path / "b")
    more = {"debias": "crossfit", "sampling": "curvature"}
    la = Laplace(cases.MLP.model(), "classification", "all", "kron", **more)
    with pytest.raises(ValueError, match="Expected a DataLoader over a map-style dataset"):
        la.fit([cases.MLP.data(5)], n_data=9, checkpoint=tmp_path / "b")


def test_nothing_is_written_before_its_time(interrupted, tmp_path):
    fit("two-batch", tmp_path / "b", seconds=1000.0)
    assert not (tmp_path / "b").exists()
