"""Rows: what was kept before costs were is still read, and time makes no row another one."""

from dataclasses import asdict

from laplace_debias.comparison.rows import ComparisonRow


def test_costs_are_no_part_of_a_rows_identity():
    row = ComparisonRow("single", 8, 8, 0, 1.0, {"nll": 0.5})
    timed = ComparisonRow("single", 8, 8, 0, 1.0, {"nll": 0.5}, {"seconds": 3.0})
    assert row == timed != ComparisonRow("single", 8, 8, 1, 1.0, {"nll": 0.5})
    older = {name: value for name, value in asdict(timed).items() if name != "cost"}
    assert ComparisonRow(**older).cost is None
