"""Input factors from shifted products against rows that a unit kernel reads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from laplace_debias.debias.eigen import null_tolerance
from laplace_debias.kfac import grams
from laplace_debias.kfac import shifts as shifts_module
from laplace_debias.kfac.engine import kfac_factors
from laplace_debias.kfac.grams import input_mean
from laplace_debias.kfac.shifts import saves_work, shifted_gram, shifts
from laplace_debias.network.unfold import n_positions
from tests.cases_kfac import CASES, make
from tests.oracles_kfac import oracle, rows_of

EXACT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture
def always(monkeypatch):
    """Small layers go the same way as large ones."""
    for name, value in (("_MIN_WORK", 0), ("_MIN_ROWS", 0), ("_MAX_SHARE", 1.0)):
        monkeypatch.setattr(shifts_module, name, value)
    monkeypatch.setattr(grams, "_SLICE_BYTES", 4000)  # several slices, too


@pytest.mark.parametrize(
    "conv, size, options",
    [
        (nn.Conv2d, (9, 8), {"kernel_size": 3, "padding": 1}),
        (nn.Conv2d, (8, 8), {"kernel_size": 3}),
        (nn.Conv2d, (9, 8), {"kernel_size": 3, "padding": 1, "stride": 2}),
        (nn.Conv2d, (11, 9), {"kernel_size": (5, 2), "padding": (0, 3), "stride": (1, 3)}),
        (nn.Conv2d, (11, 9), {"kernel_size": (2, 3), "dilation": (3, 2), "stride": (2, 1)}),
        (nn.Conv2d, (7, 8), {"kernel_size": (4, 3), "padding": "same"}),
        (nn.Conv2d, (7, 8), {"kernel_size": 3, "padding": 2, "padding_mode": "circular"}),
        (nn.Conv2d, (7, 8), {"kernel_size": 3, "padding": 1, "groups": 2}),
        (nn.Conv2d, (4, 4), {"kernel_size": 4, "padding": 1}),  # boxes without a common middle
        (nn.Conv2d, (5, 6), {"kernel_size": 1}),
        (nn.Conv1d, (17,), {"kernel_size": 9, "dilation": 2, "padding": 4, "stride": 2}),
        (nn.Conv1d, (12,), {"kernel_size": 5, "padding": "same", "padding_mode": "reflect"}),
    ],
)
def test_equals_the_rows(always, conv, size, options):
    torch.manual_seed(0)
    layer, x = conv(4, 6, **options).double(), torch.randn(5, 4, *size, dtype=torch.float64)
    rows = rows_of(layer, x).flatten(0, 1)
    A, n_rows = input_mean(layer, x)
    assert n_rows == len(rows)
    torch.testing.assert_close(A, rows.T @ rows / len(rows), **EXACT)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 12),
    k=st.integers(1, 5),
    dilation=st.integers(1, 3),
    pad=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    stride=st.integers(1, 4),
)
def test_every_geometry_in_one_dimension(size, k, dilation, pad, stride):
    if size + sum(pad) <= dilation * (k - 1):
        return  # the kernel does not fit
    x = torch.arange(1.0, size + 1, dtype=torch.float64).reshape(1, 1, size) ** 2
    padded = [0.0] * pad[0] + x.flatten().tolist() + [0.0] * pad[1]
    starts = range(0, len(padded) - dilation * (k - 1), stride)
    rows = torch.tensor([[padded[t + dilation * u] for u in range(k)] for t in starts])
    rows = rows.double()
    gram = shifted_gram(x, (k,), (dilation,), [pad], (stride,), slice_bytes=1)
    torch.testing.assert_close(gram, rows.T @ rows, **EXACT)
    assert n_positions(size, k, dilation, pad, stride) == len(rows)
    pairs = [(u, u + g.delta) for g in shifts(size, k, dilation, pad, stride) for u in g.boxes]
    assert sorted(pairs) == [(u, v) for u in range(k) for v in range(k)]


@pytest.mark.parametrize("case", CASES)
def test_networks_equal_the_oracle(always, case):
    model, x, y = make(case, "classification")
    factors = kfac_factors(model, x, y, likelihood="classification")
    expected = oracle(model, x, y, "classification", torch.ones(len(y)))
    for block, other in zip(factors.blocks, expected, strict=True):
        for M, L in zip(block, other, strict=True):
            torch.testing.assert_close(M, L)


def test_large_layers_are_not_unfolded_and_small_ones_are(monkeypatch):
    def unfolded(*args):
        raise AssertionError("unfolded")

    monkeypatch.setattr(grams, "unfolded", unfolded)
    layer = nn.Conv2d(64, 2, 3, padding=1)
    assert input_mean(layer, torch.ones(16, 64, 8, 8))[1] == 16 * 64
    with pytest.raises(AssertionError, match="unfolded"):
        input_mean(layer, torch.ones(1, 64, 8, 8))
    same = (3, 3), (1, 1), [(1, 1), (1, 1)]
    assert not saves_work(torch.empty(16, 64, 8, 8, device="meta"), *same, (1, 1))
    assert not saves_work(torch.empty(16, 64, 24, 24), *same, (3, 3))  # nothing in common


@pytest.mark.parametrize("n", [1, 3])
def test_rounded_zeros_of_a_rank_deficient_factor_stay_below_the_null_tolerance(always, n):
    """Fewer rows than dimensions, in single precision, with the dominant mean of activations."""
    torch.manual_seed(0)
    layer, x = nn.Conv2d(24, 2, 3, padding=1), (0.3 * torch.randn(n, 24, 8, 8) + 1).relu()
    A, n_rows = input_mean(layer, x)
    mu = torch.linalg.eigvalsh(A.double())
    assert int((mu <= null_tolerance(A) * mu[-1]).sum()) == len(A) - n_rows
