"""Results as JSON, CSV and data frames, and the files they are written to."""

import csv
import dataclasses
import json
import math
import sys

import pytest
import torch

from laplace_debias.storage.export import (
    ExportedResult,
    number_from_json,
    rows_to_csv,
    rows_to_dataframe,
    text_table,
    tidy,
    to_json_text,
    write_text,
)

NUMBERS = [0.1, -2.5e-300, math.inf, -math.inf, math.nan]


def test_text_is_returned_and_written_where_a_path_is_given(tmp_path):
    path = tmp_path / "new" / "folder" / "result.txt"
    assert write_text("é\r\n", path) == "é\r\n" == path.read_bytes().decode()
    assert write_text("é", None) == "é"
    assert [p.name for p in path.parent.iterdir()] == ["result.txt"]


def test_json_is_of_the_standard_and_numbers_come_back():
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    content = json.loads(to_json_text({"values": tuple(NUMBERS)}), parse_constant=refuse)
    assert content == {"values": [0.1, -2.5e-300, "inf", "-inf", None]}
    torch.testing.assert_close(
        torch.tensor([number_from_json(value) for value in content["values"]], dtype=torch.double),
        torch.tensor(NUMBERS, dtype=torch.double),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


def test_json_takes_dataclasses_tensors_and_nesting():
    @dataclasses.dataclass(frozen=True)
    class Inner:
        name: str
        value: float

    content = [Inner("a", math.nan), {"b": torch.tensor([[1.0], [math.inf]]), "c": (True, None, 3)}]
    assert json.loads(to_json_text(content)) == [
        {"name": "a", "value": None},
        {"b": [[1.0], ["inf"]], "c": [True, None, 3]},
    ]


def test_csv_has_a_header_and_quotes_what_needs_it(tmp_path):
    path = tmp_path / "rows.csv"
    text = rows_to_csv(("name", "nll"), [("a, b", 0.5), ("c", math.inf), ("d", None)], path)
    assert path.read_text() == text
    assert list(csv.DictReader(text.splitlines())) == [
        {"name": "a, b", "nll": "0.5"},
        {"name": "c", "nll": "inf"},
        {"name": "d", "nll": ""},
    ]


def test_data_frame_has_the_columns_and_rows():
    pytest.importorskip("pandas")
    frame = rows_to_dataframe(("method", "nll"), iter([("plain", 0.5), ("single", 0.25)]))
    assert list(frame.columns) == ["method", "nll"]
    assert frame["nll"].dtype == float
    assert frame.to_dict("records") == [
        {"method": "plain", "nll": 0.5},
        {"method": "single", "nll": 0.25},
    ]


def test_missing_pandas_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"Expected pandas.*Remedy: `pip install"):
        rows_to_dataframe(("a",), [(1,)])


def test_tidy_rows_name_their_entries():
    values = torch.arange(6.0).reshape(2, 3)
    header, rows = tidy({"size": (8, 32), "k": range(3)}, {"x": values, "y": -values})
    assert header == ["size", "k", "x", "y"]
    assert rows[0] == [8, 0, 0.0, 0.0] and rows[4] == [32, 1, 4.0, -4.0] and len(rows) == 6
    with pytest.raises(ValueError, match="zip"):
        tidy({"size": (8, 32)}, {"x": values})


def test_tables_are_aligned_and_cut():
    lines = text_table(["i", "value"], [[i, i / 7] for i in range(50)], limit=3).splitlines()
    assert lines[0] == "i     value" and lines[2] == "1  0.142857"
    assert lines[-1] == "... 47 more rows" and len(lines) == 5
    assert text_table(["i"], [[1]], limit=1).splitlines() == ["i", "1"]


def test_a_result_that_says_its_rows_has_every_way_out(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Losses(ExportedResult):
        values: tuple

        def rows(self):
            return ["step", "loss"], [[i, v] for i, v in enumerate(self.values)]

    result = Losses((0.5, math.nan))
    assert json.loads(result.to_json(tmp_path / "a.json")) == {"values": [0.5, None]}
    assert (tmp_path / "a.json").read_text() == result.to_json()
    assert result.to_csv(tmp_path / "a.csv") == "step,loss\n0,0.5\n1,nan\n"
    assert (tmp_path / "a.csv").read_text() == result.to_csv()
    assert str(result).splitlines() == ["step  loss", "   0   0.5", "   1   nan"]
    pandas = pytest.importorskip("pandas")
    assert isinstance(result.to_dataframe(), pandas.DataFrame)
    assert list(result.to_dataframe()["step"]) == [0, 1]
