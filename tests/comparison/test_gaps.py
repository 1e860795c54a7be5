"""Gap, bias and spread by hand."""

import math

import pytest

from laplace_debias.comparison.gaps import measure_gap


def test_gap_bias_and_spread_by_hand():
    curves = {1.0: [1.5, 2.5], 2.0: [2.0, 4.0]}
    found = measure_gap("single", 8, curves, {1.0: 1.0, 2.0: 3.0, 9.0: 7.0})
    assert (found.method, found.budget) == ("single", 8)
    assert found.gap == pytest.approx((0.5 + 1.5 + 1 + 1) / 4)
    assert found.bias == pytest.approx((1.0 + 0.0) / 2)
    assert found.spread == pytest.approx((math.sqrt(0.5) + math.sqrt(2)) / 2)


def test_one_draw_has_no_spread_and_its_gap_is_its_bias():
    found = measure_gap("single", 8, {1.0: [0.5], 2.0: [5.0]}, {1.0: 1.0, 2.0: 3.0})
    assert found.spread == 0.0 and found.gap == found.bias == pytest.approx(1.25)


def test_the_reference_is_needed_everywhere():
    with pytest.raises(ValueError, match=r"of 'ours', got none at \[2.0\]. Remedy"):
        measure_gap("ours", 8, {1.0: [1.0], 2.0: [1.0]}, {1.0: 1.0})
