"""Factors kept as rows: the same sums as their matrices."""

import itertools

import pytest
import torch
from torch import nn

from laplace_debias.kfac import few_rows
from laplace_debias.kfac.engine import Engine
from laplace_debias.kfac.few_rows import (
    RowSum,
    add_gram_,
    added,
    are_few,
    as_matrix,
    averaged,
    dimension,
    is_rows,
    mirror_,
    scaled,
    total_of,
)
from tests.cases import CNN, GROUPED, MLP, TOKENS

D = 9


def some(r, seed=0):
    return torch.randn(r, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("r, s", list(itertools.product([0, 1, 4, 5], [1, 3, 9])))
def test_sums_and_means_equal_those_of_matrices(r, s):
    one, two = some(r), some(s, 1)
    A, B = one.T @ one, two.T @ two
    kept = [M if are_few(*M.shape) else as_matrix(M) if is_rows(M) else M.T @ M for M in (one, two)]
    total = added(*kept)
    assert is_rows(total) == are_few(r + s, D) and dimension(total) == D
    torch.testing.assert_close(as_matrix(total), A + B)
    torch.testing.assert_close(as_matrix(total_of([*kept, kept[1]])), A + 2 * B)
    torch.testing.assert_close(as_matrix(averaged(*kept, 0.3)), 0.7 * A + 0.3 * B)
    torch.testing.assert_close(as_matrix(scaled(kept[0], 3.0)), 3 * A)


def test_a_sum_becomes_a_matrix_when_there_are_too_many_rows():
    total, parts = RowSum(D, torch.empty(0, dtype=torch.float64), few=True), []
    for k in range(4):
        assert is_rows(total.result()) == (2 * 2 * k < D)
        parts.append(some(2, k))
        total.add(parts[-1])
        X = torch.cat(parts)
        torch.testing.assert_close(as_matrix(total.result()), X.T @ X)


@pytest.mark.parametrize("approx", ["expand", "reduce", "backpack"])
@pytest.mark.parametrize("case", [MLP, CNN, GROUPED, TOKENS], ids=lambda case: case.name)
def test_the_engine_gives_rows_that_make_up_its_factors(case, approx):
    model = case.model()
    X, y = case.data(1)
    engine = Engine(model, case.likelihood, kfac_approx=approx)
    rows, full = engine.factors(X, y, few_rows=True), engine.factors(X, y)
    kept = [M for block in rows.blocks for M in block]
    assert any(is_rows(M) for M in kept)
    for M, expected in zip(kept, (M for block in full.blocks for M in block), strict=True):
        torch.testing.assert_close(as_matrix(M), expected, rtol=1e-12, atol=1e-14)
    both = rows + rows
    for M, expected in zip(
        (M for block in both.blocks for M in block),
        (M for block in (full + full).blocks for M in block),
        strict=True,
    ):
        torch.testing.assert_close(as_matrix(M), expected, rtol=1e-12, atol=1e-14)


def test_scales_and_shifts_of_normalisations_are_kept_as_rows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 12), nn.LayerNorm(12), nn.Linear(12, 3)).double()
    X, y = torch.randn(2, 5).double(), torch.tensor([0, 2])
    engine = Engine(model, "classification")
    rows, full = engine.factors(X, y, few_rows=True), engine.factors(X, y)
    names = dict(zip(rows.names, rows.B, strict=True))
    assert is_rows(names["1.weight"]) and is_rows(names["1.bias"])
    for M, expected in zip(rows.B, full.B, strict=True):
        torch.testing.assert_close(as_matrix(M), expected)


@pytest.mark.parametrize("d", [3, 5, 6, 11])
def test_halves_give_the_whole_product(d, monkeypatch):
    monkeypatch.setattr(few_rows, "_HALVE_ABOVE", 2)
    rows = torch.randn(7, d, generator=torch.Generator().manual_seed(0)).double()
    before = torch.randn(d, d, generator=torch.Generator().manual_seed(1)).double()
    before = before + before.T
    out = before.clone()
    add_gram_(out, rows, alpha=0.5, beta=2.0)
    torch.testing.assert_close(mirror_(out), 2 * before + 0.5 * rows.T @ rows)
    fresh = torch.full((d, d), float("nan"), dtype=torch.float64)
    add_gram_(fresh, rows, beta=0.0)
    torch.testing.assert_close(mirror_(fresh), rows.T @ rows)
