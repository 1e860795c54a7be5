"""Factors of few rows: the same numbers as from dense matrices, and what more folds buy."""

import pytest
import torch
from torch import nn

from laplace_debias.debias.few_rows import ROW_FOLDS, crossfit_rows, few_rows_from
from laplace_debias.debias.folds import crossfit_spectrum
from laplace_debias.kfac.thin import completed
from tests.cases_kfac import forward_factors


def gram(rows):
    return rows.T @ rows / len(rows)


def random_rows(n, d, seed=0, rank=None):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, rank or d, dtype=torch.float64, generator=generator)
    rows = rows * torch.logspace(0, -1, rank or d, dtype=torch.float64) + 0.3
    if rank:
        rows = rows @ torch.randn(rank, d, dtype=torch.float64, generator=generator)
    return rows


@pytest.mark.parametrize("monotone", [True, False])
@pytest.mark.parametrize(
    "n, d, n_folds, rank",
    [(6, 20, 2, None), (9, 20, 3, None), (10, 20, 8, None), (5, 12, 5, None), (9, 20, 3, 4),
     (4, 9, 8, None), (12, 12, 4, None), (15, 8, 3, None)],
)  # fmt: skip
def test_equals_the_dense_cross_fit(n, d, n_folds, rank, monotone):
    rows = random_rows(n, d, rank=rank)
    K = min(n_folds, n)
    folds = [rows[k::K] for k in range(K)]
    expected = crossfit_spectrum(
        [gram(fold) for fold in folds], [len(fold) for fold in folds], monotone=monotone
    )
    Q, pooled, lam = crossfit_rows(rows, n_folds, monotone=monotone)
    torch.testing.assert_close(lam, expected[2], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(pooled, expected[1], rtol=1e-9, atol=1e-12)
    null = d - Q.shape[1]
    assert null == d - min(n, rank or d, d) and (lam[:null] == lam[:1]).all()
    Q = completed(Q)
    torch.testing.assert_close(Q.T @ Q, torch.eye(d, dtype=torch.float64))
    torch.testing.assert_close(Q @ torch.diag(pooled) @ Q.T, gram(rows))
    if monotone:  # the basis of the null space is arbitrary, the factor is not
        dense = expected[0] @ torch.diag(expected[2]) @ expected[0].T
        torch.testing.assert_close(Q @ torch.diag(lam) @ Q.T, dense, rtol=1e-9, atol=1e-12)


def test_single_precision_rows_have_the_rank_of_their_number():
    rows = random_rows(30, 100).float()
    Q, pooled, lam = crossfit_rows(rows)
    assert int((pooled > 0).sum()) == 30 and lam.dtype == Q.dtype == torch.float64
    torch.testing.assert_close(float(lam.sum()), float(gram(rows).trace()), rtol=1e-5, atol=0.0)


def test_more_folds_lower_the_error_where_rows_are_few():
    """Along the directions that the rows span, mean over 40 draws of 20 rows in 80 dimensions."""
    generator = torch.Generator().manual_seed(0)
    d, n = 80, 20
    Sigma = torch.logspace(0, -3, d, dtype=torch.float64)
    error = dict.fromkeys((2, ROW_FOLDS), 0.0)
    for _ in range(40):
        rows = torch.randn(n, d, dtype=torch.float64, generator=generator) * Sigma.sqrt()
        for n_folds in error:
            Q, _, lam = crossfit_rows(rows, n_folds)
            truth = (Q.square() * Sigma[:, None]).sum(0)  # curvature along the same basis
            error[n_folds] += float((lam[-n:] / truth).log().abs().mean())
    assert error[ROW_FOLDS] < 0.8 * error[2]


def test_rows_of_zeros_have_no_curvature():
    """As the inputs of a layer behind dead units have it, in all folds or in all but one."""
    rows = torch.zeros(6, 20)
    Q, pooled, lam = crossfit_rows(rows)
    assert not lam.any() and not pooled.any()
    assert Q.shape == (20, 0)
    rows[0, 3] = 2.0
    torch.testing.assert_close(crossfit_rows(rows, 3)[2].sum(), torch.tensor(4 / 6).double())


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="at least two data.*A of 0.weight.*got shape"):
        crossfit_rows(torch.ones(1, 4), name="A of 0.weight")
    with pytest.raises(ValueError, match="two folds"):
        crossfit_rows(torch.ones(5, 4), 1)
    with pytest.raises(ValueError, match="finite.*A of 0.weight"):
        crossfit_rows(torch.full((5, 4), float("nan")), name="A of 0.weight")


class Tokens(nn.Module):
    """A wide linear layer over two tokens, and one that is called twice."""

    def __init__(self):
        super().__init__()
        self.tokens, self.twice = nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, x):
        """Two tokens of each datum are summed up."""
        return self.twice(self.twice(self.tokens(torch.stack([x, 2 * x], 1)).tanh().sum(1)).tanh())


class MergedTokens(nn.Module):
    """Two tokens per datum, merged with the data before the layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(40, 3)

    def forward(self, x):
        """Rows of one datum are neighbours."""
        tokens = torch.stack([x, 2 * x], 1).flatten(0, 1)
        return self.layer(tokens).unflatten(0, (-1, 2)).sum(1)


def test_rows_are_kept_of_wide_layers_with_one_row_per_datum():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(20, 40).double()
    parts = [forward_factors(model, part, rows_from=few_rows_from(20)) for part in x.split([8, 12])]
    both = parts[0] + parts[1]
    assert torch.equal(both.rows[0], x) and both.rows[1:] == (None, None, None)
    torch.testing.assert_close(gram(both.rows[0]), both.A[0])
    assert forward_factors(model, x).rows == (None,) * 4
    assert forward_factors(model, x, rows_from=41).rows == (None,) * 4
    assert forward_factors(Tokens().double(), x, rows_from=40).rows == (None,) * 4
    assert forward_factors(MergedTokens().double(), x, rows_from=40).rows == (None,) * 2


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_which_directions_are_null_does_not_depend_on_the_scale(scale):
    rows = random_rows(8, 30, rank=5)
    _, pooled, lam = crossfit_rows(rows)
    _, scaled_pooled, scaled = crossfit_rows(scale * rows)
    torch.testing.assert_close(scaled_pooled, scale**2 * pooled, rtol=1e-6, atol=0)
    torch.testing.assert_close(scaled, scale**2 * lam, rtol=1e-6, atol=1e-12 * float(scaled.max()))
    assert int((pooled > 0).sum()) == 5
