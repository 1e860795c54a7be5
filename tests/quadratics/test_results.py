"""Every result has the same ways out: JSON, CSV, a data frame and a table."""

from __future__ import annotations

import csv
import io
import json

import pytest
import torch

from laplace_debias.debias.bias import curvature_bias
from laplace_debias.quadratics.batch_sizes import BatchSizeBias
from laplace_debias.quadratics.bias import DirectionalBias
from laplace_debias.quadratics.overlaps import EigenspaceOverlaps
from laplace_debias.quadratics.report import CurvatureBiasReport
from laplace_debias.quadratics.studies import BiasSeries
from laplace_debias.quadratics.trajectory import TrajectoryMetrics

SHAPE = (2, 3, 4)
A, B, C = (torch.arange(24.0).reshape(SHAPE) + 100 * i for i in range(3))
BIAS = DirectionalBias("cg", "ggn", 8, (2, 0), A, B)
RESULTS = {
    "bias": (BIAS, ("chosen", "mini_batch", "direction", "slope", "curvature"), 24),
    "sizes": (BatchSizeBias((8, 16), (BIAS, BIAS)), ("batch_size", "chosen"), 48),
    "overlaps": (
        EigenspaceOverlaps("ggn", 8, torch.rand(2, 2, 3, 3), torch.rand(2, 3)),
        ("mini_batch", "other_mini_batch", "direction", "other_direction", "overlap"),
        36,
    ),
    "report": (
        CurvatureBiasReport("ggn", 100, 7, (8, 32), 0.1, A, B, C),
        ("batch_size", "draw", "direction", "same", "other", "full"),
        24,
    ),
    "series": (
        BiasSeries("epoch", ("1", "2"), torch.tensor([1.0, 2.0]), 8, A, B),
        ("label", "draw", "direction", "slope_error", "curvature_error"),
        24,
    ),
    "trajectory": (
        TrajectoryMetrics(torch.tensor([1.0, 0.5]), torch.tensor([0.5, float("nan")])),
        ("iterate", "loss", "accuracy"),
        2,
    ),
    "layers": (
        curvature_bias(["w"], [[torch.tensor([0.0, 4.0])]], [[torch.tensor([1.0, 2.0])]], 0.5),
        ("name", "n_directions", "n_end", "top_biased"),
        1,
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_every_way_out(name, tmp_path):
    result, columns, n_rows = RESULTS[name]
    json.loads(result.to_json(tmp_path / "a.json"), parse_constant=pytest.fail)
    assert (tmp_path / "a.json").read_text() == result.to_json()
    assert result.to_csv(tmp_path / "a.csv") == (tmp_path / "a.csv").read_text()
    header, *rows = csv.reader(io.StringIO(result.to_csv()))
    assert tuple(header[: len(columns)]) == columns and len(rows) == n_rows
    assert len(str(result).splitlines()) > min(n_rows, 2)
    pytest.importorskip("pandas")
    assert len(result.to_dataframe()) == n_rows


def test_values_stand_beside_what_they_belong_to():
    header, rows = BIAS.rows()
    entry = dict(zip(header, rows[1 * 12 + 2 * 4 + 3], strict=True))
    assert entry == {
        "chosen": 0,
        "mini_batch": 2,
        "direction": 3,
        "slope": A[1, 2, 3].item(),
        "curvature": B[1, 2, 3].item(),
    }
    header, rows = RESULTS["sizes"][0].rows()
    assert rows[24][:2] == [16, 2] and rows[24][2:] == BIAS.rows()[1][0][1:]
