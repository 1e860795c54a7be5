"""The way that costs least, and the exact one where it costs little more."""

import pytest

from laplace_debias.predictive.choice import cheapest_method


@pytest.mark.parametrize(
    ("C", "k", "S", "diagonal", "top", "shared", "way"),
    [
        (10, 1, 100, True, True, True, "exact"),
        (100, 1, 100, True, True, True, "exact"),  # 400 against 5 x 80
        (101, 1, 100, True, True, True, "top"),
        (400, 1, 100, False, True, True, "exact"),  # no covariances by top; 2,000 against 5 x 400
        (1000, 1, 100, False, True, True, "samples"),
        (1000, 14, 20, True, False, True, "samples"),  # three nodes: 240
        (1000, 14, 20, True, False, False, "exact"),  # a prior per layer: 14 x 80
        (1000, 14, 40, True, True, False, "top"),
    ],
)
def test_choice(C, k, S, diagonal, top, shared, way):
    assert cheapest_method(C, k, S, diagonal=diagonal, top=top, shared=shared) == way
