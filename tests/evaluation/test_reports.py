"""Reports: bins by hand, and every way out of them."""

from __future__ import annotations

import csv
import io
import json
import math
import sys

import pytest
import torch

from laplace_debias.evaluation.reports import (
    ClassificationReport,
    OODReport,
    RegressionReport,
    ReliabilityBins,
    adaptive_bins,
    equal_width_bins,
)

BINS = ReliabilityBins((0.0, 0.5), (0.5, 1.0), (0.4, 0.9), (0.4, 0.7), (1, 3))
REPORT = ClassificationReport(
    n_data=4,
    accuracy=0.75,
    nll=math.inf,
    ece=0.15,
    adaptive_ece=0.12,
    classwise_ece=0.1,
    brier=0.5,
    aurc=0.05,
    mean_entropy=0.3,
    bins=BINS,
    adaptive_bins=BINS,
    ood=OODReport(auroc=0.8, fpr95=0.4, mean_entropy=0.6, n_data=7),
)
REGRESSION = RegressionReport(
    n_data=2, nll=1.0, crps=0.3, rmse=0.5, sharpness=0.4, coverage={0.5: 0.5, 0.9: 1.0}
)


def test_calibration_error_by_hand():
    assert BINS.calibration_error == pytest.approx((1 * 0.0 + 3 * 0.2) / 4)
    assert len(BINS) == 2


def test_equal_width_bins_by_hand():
    confidences = torch.tensor([0.55, 0.5, 0.75, 0.99, 0.2])
    bins = equal_width_bins(confidences, torch.tensor([1, 0, 1, 0, 1]), 4)
    assert bins.count == (1, 0, 2, 2)
    assert bins.confidence == pytest.approx((0.2, 0.0, 0.525, 0.87))
    assert bins.accuracy == pytest.approx((1.0, 0.0, 0.5, 0.5))
    assert bins.lower == pytest.approx((0.0, 0.25, 0.5, 0.75))
    assert bins.upper == pytest.approx((0.25, 0.5, 0.75, 1.0))


def test_exactly_one_has_its_own_bin():
    assert len(equal_width_bins(torch.tensor([0.99]), torch.tensor([1]), 15)) == 15
    assert len(equal_width_bins(torch.tensor([1.0]), torch.tensor([1]), 15)) == 16


def test_adaptive_bins_have_equal_mass():
    confidences = torch.linspace(0.5, 1, 103)
    bins = adaptive_bins(confidences, torch.ones(103), 10)
    assert max(bins.count) - min(bins.count) == 1
    assert sum(bins.count) == 103
    assert list(bins.lower) == sorted(bins.lower)
    assert len(adaptive_bins(confidences[:3], torch.ones(3), 10)) == 3


@pytest.mark.parametrize("report", [REPORT, REGRESSION])
def test_every_way_out(report, tmp_path):
    scalars = report.scalars()
    path = tmp_path / "new folder" / "report.json"
    text = report.to_json(path)
    assert path.read_text() == text == report.to_json()
    loaded = json.loads(text, parse_constant=pytest.fail)  # NaN and Infinity are not JSON
    assert loaded["n_data"] == report.n_data
    table = tmp_path / "report.csv"
    assert report.to_csv(table) == table.read_text() == report.to_csv()
    (row,) = csv.DictReader(io.StringIO(report.to_csv()))
    assert {name: float(value) for name, value in row.items()} == scalars
    assert str(report) == report.table()
    assert [line.split()[0] for line in str(report).splitlines()] == list(scalars)
    with pytest.raises(AttributeError):
        report.nll = 0.0


def test_scalars_by_name():
    assert REPORT.scalars() == {
        "n_data": 4,
        "accuracy": 0.75,
        "nll": math.inf,
        "ece": 0.15,
        "adaptive_ece": 0.12,
        "classwise_ece": 0.1,
        "brier": 0.5,
        "aurc": 0.05,
        "mean_entropy": 0.3,
        "ood_auroc": 0.8,
        "ood_fpr95": 0.4,
        "ood_mean_entropy": 0.6,
        "ood_n_data": 7,
    }
    assert REGRESSION.scalars()["coverage_90"] == 1.0


def test_json_holds_everything():
    loaded = json.loads(REPORT.to_json())
    assert loaded["nll"] == "inf" and loaded["accuracy"] == 0.75
    assert loaded["ood"] == {"auroc": 0.8, "fpr95": 0.4, "mean_entropy": 0.6, "n_data": 7}
    assert loaded["bins"]["count"] == [1, 3]
    assert json.loads(REGRESSION.to_json())["coverage"] == {"0.5": 0.5, "0.9": 1.0}


def test_data_frame():
    pandas = pytest.importorskip("pandas")
    frame = REPORT.to_dataframe()
    assert isinstance(frame, pandas.DataFrame) and len(frame) == 1
    assert frame.iloc[0].to_dict() == REPORT.scalars()


def test_data_frame_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"Expected pandas.*Remedy.*laplace-debias\[pandas\]"):
        REPORT.to_dataframe()
