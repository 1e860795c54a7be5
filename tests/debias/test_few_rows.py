"""Factors of few rows: the same numbers as from dense matrices, and what more folds buy."""

import pytest
import torch
from laplace.utils import Kron
from torch import nn

from laplace_debias.debias.few_rows import ROW_FOLDS, crossfit_kron, crossfit_rows, few_rows_from
from laplace_debias.debias.folds import crossfit_factor, crossfit_spectrum
from laplace_debias.kfac.engine import kfac_factors
from laplace_debias.kfac.thin import completed
from laplace_debias.network.loss import mean_loss_hessian
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


def small_model():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)]
    return torch.nn.Sequential(*layers).double(), torch.randn(40, 3).double()


def test_kron_of_identical_folds_is_the_posterior_of_one():
    model, x = small_model()
    fold = kfac_factors(model, x, likelihood="classification")
    H = crossfit_kron([fold, fold], n_data=200).decomposed(torch.float64)
    blocks = [[200 / 40 * block[0], *block[1:]] for block in fold.blocks]
    torch.testing.assert_close(H.to_matrix(), Kron(blocks).to_matrix())


def test_kron_equals_the_dense_construction():
    """Separate folds for A and B, and the exact output factor, against explicit matrices."""
    model, x = small_model()
    outputs = [kfac_factors(model, part, likelihood="classification") for part in x.split([10, 30])]
    inputs = [forward_factors(model, part) for part in x.split([20, 5, 15])]
    exact = mean_loss_hessian(model(x).detach(), "classification")
    fitted = crossfit_kron(outputs, inputs, n_data=100, output_hessian=exact)
    H = fitted.decomposed(torch.float64)
    expected = []
    for i in range(4):
        lam, Q = crossfit_factor([f.blocks[i][0] / f.n for f in outputs], [10, 30])
        block = 100 * (exact if i >= 2 else Q @ torch.diag(lam) @ Q.T)
        if i % 2 == 0:
            lam, Q = crossfit_factor([f.A[i] for f in inputs], [20, 5, 15])
            block = torch.kron(block, Q @ torch.diag(lam) @ Q.T)
        expected.append(block)
    torch.testing.assert_close(H.to_matrix(), torch.block_diag(*expected))
    with pytest.raises(ValueError, match="same parameters"):
        crossfit_kron(outputs, [forward_factors(model[2:], torch.randn(4, 4).double())], n_data=9)
    bad = kfac_factors(model, x[:5] * float("nan"), likelihood="classification")
    with pytest.raises(ValueError, match="B of 0.weight"):
        crossfit_kron([outputs[0], bad], n_data=9)


def test_the_posterior_takes_more_folds_for_wide_layers_only():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(60, 40).double(), torch.arange(60) % 3
    outputs = [kfac_factors(model, part, y[:10], likelihood="classification", inputs=False)
               for part in x[:20].split(10)]  # fmt: skip
    inputs = [forward_factors(model, part, rows_from=40) for part in x[20:40].split(10)]
    fitted = crossfit_kron(outputs, inputs, n_data=60)
    torch.testing.assert_close(fitted.lam_tilde[0][1], crossfit_rows(x[20:40])[2])
    torch.testing.assert_close(
        fitted.lam_tilde[2][1], crossfit_spectrum([part.A[2] for part in inputs], [10, 10])[2]
    )


def test_the_loss_and_the_sum_stand_for_n_data():
    """Folds of 10 and 30 data: the pooled spectrum is that of all 40 data, times N / 40."""
    model, x = small_model()
    folds = [kfac_factors(model, part, likelihood="regression") for part in x.split([10, 30])]
    whole = kfac_factors(model, x, likelihood="regression").blocks
    fitted = crossfit_kron(folds, n_data=100, loss=0.25)
    assert fitted.loss == 25 and fitted.n_data == 100
    for lam, block in zip(fitted.lam, whole, strict=True):
        expected = torch.linalg.eigvalsh(block[0]) * 100 / 40
        torch.testing.assert_close(lam[0], expected.clamp(min=0), atol=1e-10, rtol=1e-8)


def test_forward_passes_alone_are_not_enough():
    model, x = small_model()
    folds = [forward_factors(model, part) for part in x.split(20)]
    with pytest.raises(ValueError, match="output factors, got none for '0.weight'.*Remedy"):
        crossfit_kron(folds, n_data=9)
