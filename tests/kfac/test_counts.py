"""Seconds add up by stage, also when a stage raises."""

import pytest

from laplace_debias.kfac.counts import FitCost


def test_stages_add_up(monkeypatch):
    times = iter([0.0, 2.0, 10.0, 13.0, 20.0, 20.5])
    monkeypatch.setattr("laplace_debias.kfac.counts.time.perf_counter", lambda: next(times))
    cost = FitCost()
    with cost.stage("passes"):
        pass
    with pytest.raises(ZeroDivisionError), cost.stage("passes"):
        raise ZeroDivisionError
    with cost.stage("decompositions"):
        pass
    assert cost.seconds == {"passes": 5.0, "decompositions": 0.5}
    assert (cost.forward, cost.backward) == (0, 0)
