"""Tools of the research examples."""

import pytest

from examples.research.debiasing_lab import feasible


def test_budgets_that_are_too_large_are_refused_when_none_is_left():
    with pytest.raises(ValueError, match="below 5"):
        feasible([8, 16], 5)
