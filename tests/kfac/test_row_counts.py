"""Rows behind the factors against dense factors of every single datum."""

import dataclasses

import pytest
import torch
from torch import nn

from laplace_debias.kfac.engine import Engine, kfac_factors
from laplace_debias.kfac.row_counts import RowCounter, input_rows, output_rows
from tests.kfac.test_approximations import NETWORKS, dense, problem


def effective(matrices):
    """Effective numbers of rows and of data, from the definitions."""
    trace = sum(E.trace() for E in matrices)
    rows = trace**2 / sum((E @ E).trace() for E in matrices)
    return float(rows), float(trace**2 / sum(E.trace() ** 2 for E in matrices))


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("approx", ["expand", "reduce", "backpack"])
@pytest.mark.parametrize("name", NETWORKS)
def test_effective_rows_are_those_of_the_dense_factors_of_each_datum(name, approx, likelihood):
    model, X, _ = problem(name, likelihood)
    with torch.no_grad():
        X = X * torch.logspace(0, 1, len(X), dtype=X.dtype).view(-1, *[1] * (X.ndim - 1))
    options = {"likelihood": likelihood, "kfac_approx": approx, "count_rows": True}
    whole = kfac_factors(model, X, **options)
    parts = kfac_factors(model, X[:2], **options) + kfac_factors(model, X[2:], **options)
    each = [dense(model, x[None], approx, likelihood) for x in X]
    for i, counts in enumerate(whole.row_counts):
        for j, count in enumerate(counts):
            if count is None:
                assert whole.A[i] is None
                continue
            expected = effective([blocks[i][j] for blocks in each])
            got = (count.effective_rows, count.effective_data)
            assert got == pytest.approx(expected, rel=1e-8)
            again = parts.row_counts[i][j]
            assert (again.n_data, again.n_rows) == (len(X), count.n_rows)
            assert again.effective_rows == pytest.approx(got[0], rel=1e-8)


def test_rows_are_counted_by_positions_and_vectors():
    model, X, _ = problem("conv1d")  # 5 positions, then one
    for approx, B, A in (("expand", 60, 30), ("reduce", 12, 6), ("backpack", 12, 30)):
        factors = kfac_factors(
            model, X, likelihood="classification", kfac_approx=approx, count_rows=True
        )
        first, bias, last, _ = factors.row_counts
        assert (first[0].n_rows, first[1].n_rows, bias[0].n_rows, bias[1]) == (B, A, B, None)
        assert (last[0].n_rows, last[1].n_rows) == (12, 6)


def test_nothing_is_counted_unless_asked_for_and_only_what_was_computed():
    model, X, _ = problem("mlp")
    engine = Engine(model, "classification")
    assert engine.factors(X).row_counts == ()
    forward = engine.factors(X, outputs=False, count_rows=True)
    assert all(B is None for B, _ in forward.row_counts) and forward.row_counts[0][1].n_rows == 6
    backward = engine.factors(X, inputs=False, count_rows=True)
    assert all(A is None for _, A in backward.row_counts) and backward.row_counts[0][0].n_rows == 12


def test_a_layer_that_nothing_depends_on_has_no_rows():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(2, 3), nn.Linear(2, 2)

        def forward(self, x):
            self.idle(x)
            return self.used(x)

    factors = kfac_factors(
        Unused(), torch.randn(4, 2), likelihood="classification", count_rows=True
    )
    assert factors.row_counts[2][0].n_rows == 0
    assert factors.row_counts[2][0].effective_rows == 0


def test_data_merged_with_positions_cannot_be_counted():
    class Merged(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(3, 3)

        def forward(self, x):
            return self.body(x.flatten(0, 1)).view(len(x), -1, 3).mean(1)

    X = torch.randn(4, 5, 3)
    kfac_factors(Merged(), X, likelihood="classification")  # without counting it is fine
    with pytest.raises(
        ValueError, match="(?s)Expected 'body.weight' to see its 4.*got.*20.*Remedy"
    ):
        kfac_factors(Merged(), X, likelihood="classification", count_rows=True)


def test_a_layer_without_rows_counts_nothing():
    count = RowCounter("w").result(4)
    assert dataclasses.astuple(count)[0] == 4 and not any(dataclasses.astuple(count)[1:])


def test_no_data_have_no_rows():
    linear, conv = nn.Linear(3, 2), nn.Conv1d(3, 2, 2)
    assert input_rows(linear, torch.ones(0, 5, 3), "expand").shape == (0, 5, 3)
    assert input_rows(conv, torch.ones(0, 3, 5), "expand").shape == (0, 4, 6)
    assert output_rows(linear, torch.ones(0, 5, 2), "expand").shape == (0, 5, 2)
    assert output_rows(conv, torch.ones(0, 2, 4), "reduce").shape == (0, 1, 2)
