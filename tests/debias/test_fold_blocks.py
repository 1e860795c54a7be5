"""A posterior's curvature from folds, against explicit matrices."""

import pytest
import torch
from laplace.utils import Kron
from torch import nn

from laplace_debias.debias.few_rows import crossfit_rows
from laplace_debias.debias.fold_blocks import crossfit_kron
from laplace_debias.debias.folds import crossfit_factor, crossfit_spectrum
from laplace_debias.kfac.engine import kfac_factors
from laplace_debias.network.loss import mean_loss_hessian
from tests.cases_kfac import forward_factors


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
    x = x * torch.logspace(0, -2, 40).double()  # of equal directions any folds have one mean
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
