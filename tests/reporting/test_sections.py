"""The prose of the sections says what the numbers are."""

import matplotlib

matplotlib.use("agg")

import re  # noqa: E402

import pytest  # noqa: E402

from tests.reporting.test_report import reports  # noqa: E402, F401


def test_the_recommended_row_is_marked(reports):  # noqa: F811
    found = reports["classification"]
    (row,) = re.findall('<tr class="chosen"><td>(.*?)</td>', found.path.read_text())
    assert row.split(",")[0] == found.recommendation.method


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_numbers_in_the_text_are_the_results(reports, kind):  # noqa: F811
    found = reports[kind]
    text = found.path.read_text()
    worst = max(f.overestimation for f in found.expected_bias.factors if f.trusted)
    assert f"{worst:.2f} times" in text
    assert f"NLL {found.tuning.best:.4f}" in text
    assert ("at its best temperature" in text) is (kind == "classification")
    assert f"the {list(found.predicted)[1]} posterior is best at" in text
    curve = found.predicted["plain"].risk_coverage()
    assert f"plain {curve.at(0.8):.3g}" in text
    assert ("promised" not in text) and ("Coverage of central" in text) is (kind == "regression")
