"""The two methods that take data as they come, against explicit matrices."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from laplace_debias.data.roles import TrainingData
from laplace_debias.debias.spectrum import rebuild
from laplace_debias.debias.two_batch import fit_factors, fit_single, fit_two_batch
from laplace_debias.kfac.engine import Engine
from laplace_debias.kfac.factors import Factors
from laplace_debias.kfac.thin import is_thin
from laplace_debias.network.live_bytes import LiveBytes
from tests import oracles
from tests.cases import CNN, MLP, MLP_REGRESSION, PARTLY_FROZEN

CPU = torch.device("cpu")
CASES = [MLP, MLP_REGRESSION, CNN, PARTLY_FROZEN]


def matrix(fit):
    return fit.decomposed(torch.float64).to_matrix()


def parts(case, *sizes):
    """Mini-batches of some sizes."""
    X, y = case.data(sum(sizes))
    return list(zip(X.split(sizes), y.split(sizes), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_batch_is_the_diagonal_of_the_second_batch_in_the_basis_of_the_first(case):
    one, two = parts(case, 30, 20)
    model = case.model()
    fit = fit_two_batch(Engine(model, case.likelihood), TrainingData([one], [two], 200, CPU))
    K_1, K_2 = (oracles.kfac(model, *batch, case.likelihood) for batch in (one, two))
    torch.testing.assert_close(matrix(fit), oracles.debiased(K_1, K_2, 200 / 20))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_single_is_the_plain_kfac_of_all_its_data(case):
    batches = parts(case, 8, 12)
    model = case.model()
    engine = Engine(model, case.likelihood)
    fit = fit_single(engine, TrainingData(batches, None, 200, CPU))
    X, y = case.data(20)
    expected = oracles.dense(oracles.kfac(model, X, y, case.likelihood), 200 / 20)
    torch.testing.assert_close(matrix(fit), expected)
    assert fit.lam_tilde is fit.lam and fit.curvatures == []
    assert engine.cost.forward == 20


def test_the_loss_is_that_of_all_data_seen():
    one, two = parts(MLP, 6, 4)
    model = MLP.model()
    fit = fit_two_batch(Engine(model, "classification"), TrainingData([one], [two], 50, CPU))
    X, y = MLP.data(10)
    expected = 50 * torch.nn.functional.cross_entropy(model(X), y)
    torch.testing.assert_close(fit.loss, expected.detach())


def test_an_earlier_fit_is_merged_role_by_role():
    """Two fits that stand for 30 and 70 data: B adds up, A is averaged by what each stands for."""
    model = MLP.model()
    batches = parts(MLP, 6, 4, 5, 7)
    engine = Engine(model, "classification")
    factors = [engine.factors(*batch) for batch in batches]
    past = fit_factors(factors[0], factors[1], 30)
    both = fit_factors(factors[2], factors[3], 70, past)
    K = [oracles.kfac(model, *batch, "classification") for batch in batches]

    def merged(first, second, n, m):
        return {
            name: [
                30 / n * first[name][0] + 70 / m * second[name][0],
                *(
                    0.3 * A + 0.7 * C
                    for A, C in zip(first[name][1:], second[name][1:], strict=True)
                ),
            ]
            for name in first
        }

    expected = oracles.debiased(merged(K[0], K[2], 6, 5), merged(K[1], K[3], 4, 7), 1.0)
    torch.testing.assert_close(matrix(both), expected)
    assert both.n_data == 100
    torch.testing.assert_close(both.loss - past.loss, 70 * (factors[2].loss + factors[3].loss) / 12)


def test_errors_come_before_any_result():
    engine = Engine(MLP.model(), "classification")
    with pytest.raises(ValueError, match="`n_data` of at least 20"):
        fit_two_batch(engine, TrainingData(parts(MLP, 10, 10), None, 15, CPU))
    with pytest.raises(ValueError, match="empty loader"):
        fit_single(engine, TrainingData([], None, 15, CPU))
    lossless = Factors.from_blocks(["bias"], [[torch.eye(2)]], 1, 2)
    with pytest.raises(ValueError, match="factors with a loss.*Remedy"):
        fit_factors(lossless, None, 10)


def test_debiasing_takes_hardly_more_memory_than_one_kfac():
    """Factors give way to their bases, and the second mini-batch's are never there."""
    torch.manual_seed(0)
    widths = (300, 250, 300, 10)
    layers = [torch.nn.Linear(a, b) for a, b in zip(widths[:-1], widths[1:], strict=True)]
    model = torch.nn.Sequential(*layers)
    one, two = ((torch.randn(16, 300), torch.arange(16) % 10) for _ in range(2))
    kfac = 4 * sum(d * d for pair in zip(widths[:-1], widths[1:], strict=True) for d in pair)
    found = {}
    for name, second in (("single", None), ("two-batch", [two]), ("kept", [two])):
        engine = Engine(model, "classification", "mc")
        data = TrainingData([one], second, 1000, CPU)
        with LiveBytes([*model.parameters(), *one, *two]) as live:
            if name == "single":
                fit = fit_single(engine, data)
            else:
                fit = fit_two_batch(engine, data, keep_factors=name == "kept")
        found[name] = (live.peak / kfac, live.now / kfac)
        del fit
    single, two_batch, kept = found.values()
    assert two_batch[0] <= single[0] + 0.05
    assert two_batch[1] <= single[1] + 0.05
    assert kept[0] > single[0] + 0.9 and kept[1] > single[1] + 0.9  # what is spared
    assert single[1] < 1.05


def _with_mean_of_null_space(E, C):
    """``Q diag(Q^T C Q) Q^T`` in the basis of E, its null space with one mean curvature."""
    lam, Q = np.linalg.eigh(E.numpy())
    along = np.diag(Q.T @ C.numpy() @ Q).copy()
    null = lam <= 1e-12 * lam[-1]
    along[null] = along[null].mean() if null.any() else 0.0
    return torch.from_numpy(Q @ np.diag(along) @ Q.T), null.any()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_few_rows_are_the_dense_fit_with_the_mean_of_each_null_space(case, n):
    one, two = parts(case, n, 6)
    model = case.model()
    fit = fit_two_batch(Engine(model, case.likelihood), TrainingData([one], [two], 200, CPU))
    K_1, K_2 = (oracles.kfac(model, *batch, case.likelihood) for batch in (one, two))
    own, measured, n_thin = rebuild(fit.Q, fit.lam), rebuild(fit.Q, fit.lam_tilde), 0
    for i, name in enumerate(K_1):
        for f, (E, C) in enumerate(zip(K_1[name], K_2[name], strict=True)):
            scales = (1, 1) if f else (200 / n, 200 / 6)
            torch.testing.assert_close(own[i][f], scales[0] * E)
            torch.testing.assert_close(fit.lam_tilde[i][f].sum(), scales[1] * C.trace())
            expected, deficient = _with_mean_of_null_space(E, C)
            if is_thin(fit.Q[i][f]) or not deficient:
                torch.testing.assert_close(measured[i][f], scales[1] * expected)
            n_thin += is_thin(fit.Q[i][f])
    assert n_thin > 0 or (n, case) == (2, CNN)  # whose every factor has more rows then


def test_few_rows_of_several_mini_batches_become_matrices_when_they_are_many():
    """Rows one after the other, then more of them than half the dimension: the same fit."""
    case, model = MLP, MLP.model()
    for sizes in ((1, 1), (1, 1, 6, 12)):
        batches = parts(case, *sizes)
        fit = fit_single(Engine(model, case.likelihood), TrainingData(batches, None, 200, CPU))
        X, y = case.data(sum(sizes))
        expected = oracles.dense(oracles.kfac(model, X, y, case.likelihood), 200 / sum(sizes))
        torch.testing.assert_close(matrix(fit), expected)


def test_few_rows_never_become_a_square_matrix():
    torch.manual_seed(0)
    d, n = 400, 6
    model = torch.nn.Sequential(torch.nn.Linear(d, d), torch.nn.Tanh(), torch.nn.Linear(d, 3))
    one, two = ((torch.randn(n, d), torch.arange(n) % 3) for _ in range(2))
    with LiveBytes([*model.parameters(), *one, *two]) as live:
        fit = fit_two_batch(
            Engine(model, "classification", "mc"), TrainingData([one], [two], 9, CPU)
        )
    assert live.largest < 4 * d * d / 2
    assert sum(Q.numel() for block in fit.Q for Q in block) <= (2 * d + d) * n + d * n + 2 * 9


def test_blocks_with_the_same_output_factor_share_their_basis():
    one, two = parts(MLP, 30, 20)
    data = TrainingData([one], [two], 200, CPU)
    fit = fit_two_batch(Engine(MLP.model().float(), "classification"), _single_precision(data))
    assert fit.Q[0][0] is fit.Q[1][0] and fit.Q[0][0].dtype == torch.float32


def _single_precision(data):
    return replace(data, cast=lambda t: t.float() if t.is_floating_point() else t)
