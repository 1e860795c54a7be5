"""The result of a comparison: gaps by hand, and what it becomes as text, file or data frame."""

import csv
import io
import math
import sys

import pytest

from laplace_debias.comparison import ComparisonResult, ComparisonRow


def hand_made():
    def row(method, draw, delta, nll):
        size = 4 if method == "two-batch" else 8
        return ComparisonRow(method, 8, size, draw, delta, {"nll": nll})

    rows = [row("plain", 0, None, 2.0)]
    rows += [row("full", 0, 1.0, 1.0), row("full", 0, 2.0, 3.0)]
    rows += [row("single", d, 1.0, v) for d, v in ((0, 1.5), (1, 2.5))]
    rows += [row("single", d, 2.0, v) for d, v in ((0, 3.0), (1, 4.0))]
    rows += [row("two-batch", d, 1.0, v) for d, v in ((0, 0.5), (1, 1.5))]
    rows += [row("two-batch", d, 2.0, v) for d, v in ((0, 3.0), (1, 3.0))]
    return ComparisonResult(tuple(rows), 100, {"seed": 0})


def test_gap_by_hand():
    result = hand_made()
    single, two_batch = (result.gap("nll", method, 8) for method in ("single", "two-batch"))
    assert single.gap == pytest.approx((0.5 + 1.5 + 0 + 1) / 4)
    assert single.bias == pytest.approx((1.0 + 0.5) / 2)
    assert single.spread == pytest.approx(math.sqrt(0.5))
    assert two_batch.gap == pytest.approx((0.5 + 0.5 + 0 + 0) / 4)
    assert two_batch.bias == 0.0
    assert result.gap_ratio("nll") == pytest.approx({8: 0.25 / 0.75})
    assert result.gap_ratio("nll", "two-batch", "two-batch") == {8: 1.0}
    assert result.gap("nll", "plain", 8).gap == pytest.approx(1.0)  # |2 - 1| and |2 - 3|


def test_summary_by_hand():
    (point,) = [
        s for s in hand_made().summary("nll") if (s.method, s.prior_precision) == ("single", 1.0)
    ]
    assert (point.mean, point.min, point.max, point.n_draws) == (2.0, 1.5, 2.5, 2)


def test_json_comes_back(tmp_path):
    result = hand_made()
    text = result.to_json(tmp_path / "new" / "result.json")
    assert text == result.to_json() == (tmp_path / "new" / "result.json").read_text()
    assert ComparisonResult.from_json(text) == result


def test_json_keeps_what_is_not_finite():
    metrics = {"nll": math.inf, "auroc": math.nan, "ece": -math.inf, "brier": 0.1}
    result = ComparisonResult((ComparisonRow("plain", 0, 0, 0, None, metrics),), 9, {"seed": 0})
    text = result.to_json()
    assert "Infinity" not in text and "NaN" not in text
    (row,) = ComparisonResult.from_json(text).rows
    assert row.prior_precision is None and math.isnan(row.metrics["auroc"])
    assert [row.metrics[name] for name in ("nll", "ece", "brier")] == [math.inf, -math.inf, 0.1]


def test_csv_has_a_column_for_every_metric(tmp_path):
    result = hand_made()
    text = result.to_csv(tmp_path / "result.csv")
    assert text == result.to_csv() == (tmp_path / "result.csv").read_text()
    records = list(csv.DictReader(io.StringIO(text)))
    assert len(records) == len(result.rows)
    assert records[0] == {
        "method": "plain", "budget": "8", "batch_size": "8", "draw": "0", "prior_precision": "",
        "nll": "2.0",
    }  # fmt: skip
    assert records[-1] == {
        "method": "two-batch", "budget": "8", "batch_size": "4", "draw": "1",
        "prior_precision": "2.0", "nll": "3.0",
    }  # fmt: skip


def test_data_frame():
    pytest.importorskip("pandas")
    frame = hand_made().to_dataframe()
    assert list(frame.columns) == [
        "method", "budget", "batch_size", "draw", "prior_precision", "nll",
    ]  # fmt: skip
    means = frame.groupby("method")["nll"].mean()
    assert means["single"] == pytest.approx((1.5 + 2.5 + 3 + 4) / 4)
    assert frame["prior_precision"].isna().sum() == 1


def test_a_missing_pandas_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="Expected pandas.*Remedy"):
        hand_made().to_dataframe()


def test_a_result_prints_as_a_table_of_gaps():
    result = hand_made()
    assert str(result) == result.table()
    head, line = (text.split() for text in str(result).splitlines())
    assert head[:5] == ["metric", "budget", "single", "gap", "single"]
    values = [0.75, 0.75, 0.7071, 0.25, 0.0, 0.3536, 0.33]  # gap, bias, spread, twice; the ratio
    assert line == ["nll", "8", *(f"{v:.4f}" for v in values[:-1]), "0.33"]


def test_a_result_without_a_reference_prints_its_means():
    whole = hand_made()
    part = ComparisonResult(whole.select("plain") + whole.select("single"), 100, {})
    lines = [text.split() for text in str(part).splitlines()]
    assert lines == [
        ["method", "budget", "prior_precision", "nll"],
        ["plain", "8", "2.0000"],
        ["single", "8", "1", "2.0000"],
        ["single", "8", "2", "3.5000"],
    ]
    assert "full" in str(ComparisonResult(whole.select("full"), 100, {}))
    assert str(ComparisonResult((), 100, {})).split() == ["method", "budget", "prior_precision"]


def test_result_says_what_is_missing():
    result = hand_made()
    with pytest.raises(ValueError, match="metric among"):
        result.gap("ece", "single", 8)
    with pytest.raises(ValueError, match="one of its budgets"):
        result.gap("nll", "single", 9)
    part = ComparisonResult(result.select("single"), 100, {})
    with pytest.raises(ValueError, match="reference"):
        part.gap_ratio("nll", "single")
