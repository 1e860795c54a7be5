"""The predicted over-estimation against simulations with a known covariance, and by hand."""

import pytest
import torch
from torch import nn

from laplace_debias.debias.expected_bias import (
    MIN_EFFECTIVE_ROWS,
    ExpectedBias,
    FactorBias,
    effective_dimension,
    expected_bias,
    expected_bias_of,
    expected_overestimation,
)
from laplace_debias.kfac.engine import Engine, kfac_factors
from laplace_debias.kfac.factors import Factors


def simulated(rows_of, covariance, n, draws=400):
    """Over-estimation of a sample's shares: against the covariance, predicted, and from sums.

    The last is the prediction from sums over all draws, in which no ratio is averaged.
    """
    generator = torch.Generator().manual_seed(0)
    X = rows_of((draws, n), generator)  # [draws, n, r, d]
    lengths = (X @ X.mT).square().sum((-1, -2))  # squared norms of every datum's E_i
    traces = X.square().sum((-1, -2))  # [draws, n]
    T = traces.sum(1)
    m, data = T**2 / lengths.sum(1), T**2 / traces.square().sum(1)
    flat = X.flatten(1, 2)
    lam, Q = torch.linalg.eigh(flat.mT @ flat)
    share = lam.square().sum(1) / T**2
    along = (lam * (Q * (covariance @ Q)).sum(1)).sum(1)  # curvature-weighted, on other data
    d = len(covariance)
    rho = [
        expected_overestimation(float(1 / a), float(b), float(c), d)
        for a, b, c in zip(share, m, data, strict=True)
    ]
    predicted = share / share.new_tensor(rho)
    measured = share.mean() / (along / T / covariance.trace()).mean()
    pairs = (T**2 * (share - 1 / m)).sum() / (T**2 * (1 - 1 / data)).sum()
    truth = along.sum() / (T.sum() * covariance.trace())
    return float(measured), float(share.mean() / predicted.mean()), float(pairs / truth)


SPECTRA = {
    "flat": torch.ones(20),
    "steep": 1 / torch.arange(1.0, 41) ** 2,
    "spiked": torch.cat([torch.tensor([15.0]), torch.ones(29)]),
}


@pytest.mark.parametrize("n", [8, 32, 128])
@pytest.mark.parametrize("name", SPECTRA)
def test_gaussian_rows(name, n):
    s = SPECTRA[name].double()

    def rows_of(shape, generator):
        x = torch.randn(*shape, 1, len(s), dtype=s.dtype, generator=generator)
        return x * s.sqrt()

    measured, predicted, unbiased = simulated(rows_of, torch.diag(s), n)
    assert predicted == pytest.approx(measured, rel=0.06 if n > 8 else 0.25)
    assert unbiased == pytest.approx(1.0, rel=0.03)  # for any n


@pytest.mark.parametrize("name", SPECTRA)
def test_rows_of_very_unequal_length(name):
    s = SPECTRA[name].double()

    def rows_of(shape, generator):
        x = torch.randn(*shape, 1, len(s), dtype=s.dtype, generator=generator)
        length = torch.randn(*shape, 1, 1, dtype=s.dtype, generator=generator).mul(1.5).exp()
        return length * x * s.sqrt()

    measured, predicted, _ = simulated(rows_of, torch.diag(s), 32)
    naive = 1 + effective_dimension(torch.diag(s)) / 32  # what equal rows would give
    assert measured - 1 > 3 * (naive - 1)
    assert predicted == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize("alike", [0.0, 0.9, 1.0])
def test_rows_of_one_datum_that_resemble_each_other_count_less(alike):
    s, r = torch.ones(20, dtype=torch.float64), 8

    def rows_of(shape, generator):
        common = torch.randn(*shape, 1, 20, dtype=s.dtype, generator=generator)
        own = torch.randn(*shape, r, 20, dtype=s.dtype, generator=generator)
        return alike**0.5 * common + (1 - alike) ** 0.5 * own

    measured, predicted, _ = simulated(rows_of, torch.diag(s), 16)
    assert predicted == pytest.approx(measured, rel=0.06)
    # the number of rows alone, 16 * 8, would say 1 + 20 / 128
    naive = 1 + 20 / (16 * r)
    assert (measured > 1.5 * naive) == (alike > 0)


def test_by_hand():
    assert effective_dimension(torch.diag(torch.tensor([3.0, 1.0]))) == pytest.approx(1.6)
    assert effective_dimension(torch.zeros(3, 3)) == 0.0
    assert effective_dimension(1e30 * torch.eye(4)) == pytest.approx(4.0)  # squares overflow
    assert expected_overestimation(4.0, 8.0, 8.0, 64) == pytest.approx((1 - 1 / 8) / (1 - 4 / 8))
    assert expected_overestimation(4.0, 4.0, 4.0, 64) == pytest.approx(16.0)  # at least 1 / 64
    assert expected_overestimation(2.0, 1.0, 1.0, 6) == pytest.approx(3.0)  # one datum alone
    assert expected_overestimation(1.0, 50.0, 50.0, 6) == 1.0  # all rows alike
    assert expected_overestimation(0.0, 0.0, 0.0, 6) == 1.0  # no curvature


def test_table_of_a_network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    X, y = torch.randn(20, 1, 4, 4), torch.arange(20) % 3
    factors = kfac_factors(model, X, y, likelihood="classification", count_rows=True)
    bias = expected_bias(factors)
    assert [(f.name, f.factor) for f in bias.factors] == [
        ("0.weight", "B"), ("0.weight", "A"), ("0.bias", "B"),
        ("3.weight", "B"), ("3.weight", "A"), ("3.bias", "B"),
    ]  # fmt: skip
    assert [f.n_rows for f in bias.factors] == [160, 80, 160, 40, 20, 40]
    for f in bias.factors:
        assert 1 <= f.effective_dimension <= f.effective_rows and f.overestimation >= 1
    text = str(bias)
    assert "20 data" in text and text.count("\n") == 7 and "over-estimation" in text
    engine = Engine(model, "classification")
    split = expected_bias_of(engine, [(X[:3], y[:3]), (X[3:], y[3:])])
    for one, two in zip(bias.factors, split.factors, strict=True):
        assert two.overestimation == pytest.approx(one.overestimation, rel=1e-4)


def test_too_few_rows_foretell_nothing():
    def entry(rows):
        return FactorBias("w", "B", 40, 9, rows, 2.0, 1.87)

    bias = ExpectedBias((entry(MIN_EFFECTIVE_ROWS - 0.01), entry(MIN_EFFECTIVE_ROWS)), 8)
    assert [factor.trusted for factor in bias.factors] == [False, True]
    first, second = str(bias).splitlines()[-2:]
    assert first.endswith("too few rows") and "1.87" not in first
    assert second.endswith(" 1.87")
    names, rows = bias.rows()
    assert [row[names.index("trusted")] for row in rows] == [False, True]


def test_errors():
    blocks = [[torch.eye(2)]]
    with pytest.raises(ValueError, match="(?s)rows were counted.*Remedy.*count_rows=True"):
        expected_bias(Factors.from_blocks(["bias"], blocks, n=5, n_outputs=2))
    model, X = nn.Linear(2, 3), torch.ones(1, 2)
    one = kfac_factors(model, X, likelihood="classification", count_rows=True)
    with pytest.raises(ValueError, match="(?s)at least two data, got 1.*Remedy"):
        expected_bias(one)
    with pytest.raises(ValueError, match="(?s)got no mini-batch.*Remedy"):
        expected_bias_of(Engine(model, "classification"), [])
    X = torch.tensor([[1.0, 2.0], [float("nan"), 1.0]])
    bad = kfac_factors(model, X, likelihood="regression", count_rows=True)
    with pytest.raises(ValueError, match="(?s)finite rows behind factor A of 'weight'.*Remedy"):
        expected_bias(bad)
