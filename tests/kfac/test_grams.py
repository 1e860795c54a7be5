"""Gram matrices from rows: halves, slices, ways to sum positions; against plain loops."""

import pytest
import torch
from torch import nn

from laplace_debias.kfac import few_rows, grams
from laplace_debias.kfac.engine import kfac_factors
from laplace_debias.kfac.grams import InputGram, OutputGram, input_mean
from tests.cases_kfac import make
from tests.oracles_kfac import oracle, rows_of


def test_large_gram_matrices_and_sliced_unfolding(monkeypatch):
    """The halved Gram matrix and the sliced copy give what one plain product gives."""
    monkeypatch.setattr("laplace_debias.kfac.few_rows._HALVE_ABOVE", 5)
    monkeypatch.setattr("laplace_debias.kfac.grams._SLICE_BYTES", 4000)
    model, x, y = make("conv2d", "classification")
    factors = kfac_factors(model, x, y, likelihood="classification")
    expected = oracle(model, x, y, "classification", torch.ones(6))
    for block, exact in zip(factors.blocks, expected, strict=True):
        for M, L in zip(block, exact, strict=True):
            torch.testing.assert_close(M, L)


LAYERS = {
    "linear": (lambda: nn.Linear(3, 2), (4, 3)),
    "tokens": (lambda: nn.Linear(3, 2), (4, 5, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, dilation=2, padding=1), (4, 2, 9)),
    "grouped": (lambda: nn.Conv2d(4, 6, 2, stride=2, groups=2), (4, 4, 6, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (4, 2, 3, 4, 3)),
}


@pytest.mark.parametrize("slice_bytes", [1, 2**26])
@pytest.mark.parametrize("name", LAYERS)
def test_the_mean_over_rows(name, slice_bytes, monkeypatch):
    monkeypatch.setattr(grams, "_SLICE_BYTES", slice_bytes)
    torch.manual_seed(0)
    layer, x = LAYERS[name][0]().double(), torch.randn(LAYERS[name][1]).double()
    rows = rows_of(layer, x).flatten(0, 1)
    A, count = input_mean(layer, x)
    assert count == len(rows)
    torch.testing.assert_close(A, rows.T @ rows / len(rows))


@pytest.mark.parametrize("approx", few_rows.KFAC_APPROXES)
@pytest.mark.parametrize("name", LAYERS)
def test_ways_to_sum_positions(name, approx):
    """The table in the module's docstring, datum by datum, with two calls as further positions."""
    torch.manual_seed(0)
    layer, shape = LAYERS[name][0]().double(), LAYERS[name][1]
    calls = [torch.randn(shape).double() for _ in range(2)]
    outputs = [torch.randn_like(layer(x)) for x in calls]
    rows = torch.cat([rows_of(layer, x) for x in calls], 1)  # [n, T, d_in]
    linear = isinstance(layer, nn.Linear)
    g = torch.cat(  # [n, T, d_out]
        [(o if linear else o.movedim(1, -1)).reshape(4, -1, len(layer.weight)) for o in outputs], 1
    )
    n, T = rows.shape[:2]
    A, B = 0.0, 0.0
    for i in range(n):
        if approx == "reduce":
            A = A + torch.outer(rows[i].mean(0), rows[i].mean(0)) / n
        else:
            A = A + rows[i].T @ rows[i] / (n * T if approx == "expand" else n)
        total = g[i].sum(0)
        B = B + (g[i].T @ g[i] if approx == "expand" else torch.outer(total, total))
    inputs, output = InputGram(approx), OutputGram(layer, rows, approx)
    for x in calls:
        inputs.add(layer, x)
    output.add(outputs, n)
    torch.testing.assert_close(inputs.result(n), A)
    torch.testing.assert_close(output.result(), B)
    output.add(outputs, n)  # another backward vector
    torch.testing.assert_close(output.result(), 2 * B)


def test_merged_positions_are_refused_by_name():
    gram = InputGram("reduce", "head.weight")
    gram.add(nn.Linear(2, 1), torch.ones(6, 2))
    with pytest.raises(ValueError, match="'head.weight' to see its 3 data.*6.*Remedy"):
        gram.result(n=3)
    with pytest.raises(ValueError, match="'head'"):
        OutputGram(nn.Linear(2, 1), torch.ones(1), "backpack", "head").add([torch.ones(6, 1)], 3)


def test_the_last_slice_of_an_unfolded_input_may_be_smaller(monkeypatch):
    torch.manual_seed(0)
    layer, x = nn.Conv2d(2, 3, 3, stride=3).double(), torch.randn(7, 2, 9, 9).double()
    monkeypatch.setattr("laplace_debias.kfac.grams.saves_work", lambda *_: False)
    rows = rows_of(layer, x).flatten(0, 1)
    for n_data in (1, 2, 3, 7):  # per slice
        monkeypatch.setattr("laplace_debias.kfac.grams._SLICE_BYTES", n_data * 9 * 18 * 8)
        A, n_rows = input_mean(layer, x)
        assert n_rows == len(rows) == 63
        torch.testing.assert_close(A, rows.T @ rows / 63)
