"""Seconds add up by stage, also when a stage raises."""

from dataclasses import replace

import pytest
import torch

from laplace_debias.kfac.counts import FitCost, FitReport, report_of


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


def test_a_distance_is_told_with_its_error_or_not_at_all():
    for known in ({"distance": 0.1}, {"standard_error": 0.1}, {}):
        assert "was not estimated" in str(FitReport("auto", 1, 1, 1, 1, 1, **known))
    both = FitReport("auto", 1, 1, 1, 1, 1, distance=0.1, standard_error=0.02)
    assert "At the fit's prior precision predictive" in str(both)
    assert "10.0 % off a full batch's (+- 2.0 %)" in str(both)


def test_a_report_knows_the_prior_precision_of_the_fit():
    made = FitReport("auto", 1, 1, 1, 1, 1, distance=0.1, standard_error=0.02)
    for prior, wanted in ((3.0, 3.0), (torch.tensor([3.0]), 3.0), (torch.ones(2), None)):
        assert report_of("auto", FitCost(), 5, prior, made) == replace(made, prior_precision=wanted)
        assert report_of("single", FitCost(), 5, prior).prior_precision == wanted
