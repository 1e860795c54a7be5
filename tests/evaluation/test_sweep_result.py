"""What a sweep returns: the best point, and every way out."""

from __future__ import annotations

import csv
import io
import json
import math
import warnings

import pytest
import torch

from laplace_debias.evaluation.sweep_result import SweepResult


def test_nan_points_are_reported_and_never_chosen():
    nan = float("nan")
    grid = torch.tensor([0.1, 1.0, 10.0, 100.0])
    result = SweepResult(grid, {"nll": (nan, 0.5, 0.4, 0.6)}, {"nll": False}, 1, "probit")
    with pytest.warns(UserWarning, match="NaN at grid points"):
        assert result.best("nll").item() == 10.0
    assert result.nan_points("nll") == (0,)
    empty = SweepResult(grid, {"nll": (nan,) * 4}, {"nll": False}, 1, "probit")
    with pytest.raises(ValueError, match="NaN"):
        empty.best("nll")


def test_best_follows_the_direction_and_warns_on_the_edge():
    grid = torch.tensor([0.1, 1.0, 10.0])
    values = {"nll": (0.3, 0.2, 0.4), "accuracy": (0.3, 0.2, 0.4)}
    result = SweepResult(grid, values, {"nll": False, "accuracy": True}, 1, "probit")
    assert result.best("nll").item() == 1.0
    with pytest.warns(UserWarning, match="edge.*larger"):
        assert result.best("accuracy").item() == 10.0
    unsorted = SweepResult(grid[[1, 0, 2]], {"nll": (0.1, 0.2, 0.3)}, {"nll": False}, 1, "probit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert unsorted.best("nll").item() == 1.0
    with pytest.raises(ValueError, match="ece"):
        result.best("ece")


def test_a_metric_without_direction_has_no_best():
    grid = torch.tensor([0.1, 1.0, 10.0])
    values = {"mean_entropy": (0.1, 0.2, 0.3)}
    result = SweepResult(grid, values, {"mean_entropy": None}, 1, "probit")
    with pytest.raises(ValueError, match="Expected a metric that says.*'mean_entropy'.*Remedy"):
        result.best("mean_entropy")


def test_tables_and_files(tmp_path):
    grid = torch.tensor([0.1, 1.0])
    result = SweepResult(grid, {"nll": (0.3, float("nan"))}, {"nll": False}, 7, "probit")
    assert len(str(result).splitlines()) == 3
    rows = list(csv.reader(io.StringIO(result.to_csv(tmp_path / "sweep.csv"))))
    assert rows[0] == ["prior_precision", "nll"] and float(rows[1][1]) == 0.3
    content = json.loads(result.to_json(tmp_path / "sweep.json"))
    assert content["values"]["nll"] == [0.3, None] and content["n_data"] == 7
    assert (tmp_path / "sweep.csv").read_text() == result.to_csv()
    assert json.loads((tmp_path / "sweep.json").read_text()) == content


def test_data_frame():
    pandas = pytest.importorskip("pandas")
    result = SweepResult(torch.tensor([0.5, 1.0]), {"nll": (0.3, 0.2)}, {"nll": False}, 7, "probit")
    frame = result.to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.to_dict("list") == {"prior_precision": [0.5, 1.0], "nll": [0.3, 0.2]}


def test_layerwise_columns_and_infinities():
    layerwise = SweepResult(torch.ones(2, 3), {"nll": (1.0, 2.0)}, {"nll": False}, 7, None)
    assert layerwise.to_csv().startswith("prior_precision_0,prior_precision_1")
    assert "layer-wise 1" in str(layerwise)
    infinite = SweepResult(torch.ones(1), {"nll": (math.inf,)}, {"nll": False}, 7, None)
    assert json.loads(infinite.to_json(), parse_constant=pytest.fail)["values"]["nll"] == ["inf"]
    assert list(csv.reader(io.StringIO(infinite.to_csv())))[1] == ["1.0", "inf"]


@pytest.mark.parametrize(("link", "softens"), [("probit", True), (None, False)])
def test_the_upper_edge_speaks_of_the_plain_network_and_its_temperature(link, softens):
    grid = torch.tensor([1.0, 10.0])
    result = SweepResult(grid, {"nll": (0.5, 0.4)}, {"nll": False}, 4, link)
    with pytest.warns(UserWarning, match="larger values") as found:
        assert result.best("nll") == 10
    assert ("temperature below 1 (`la.logit_temperature`" in str(found[0].message)) == softens


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_a_flat_upper_edge_is_the_plain_network(order):
    grid, nll = torch.tensor([1.0, 10.0, 100.0])[order], [(0.9, 0.403, 0.4)[i] for i in order]
    result = SweepResult(grid, {"nll": tuple(nll)}, {"nll": False}, 4, "probit")
    with pytest.warns(UserWarning, match="plain network is better than any") as found:
        assert result.best("nll") == 100
    assert "extend" not in str(found[0].message)
