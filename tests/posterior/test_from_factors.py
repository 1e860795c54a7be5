"""Posteriors from given factors: the same as fits on the data behind them, and bad input."""

import pytest
import torch
from torch import nn

from laplace_debias.kfac.engine import kfac_factors
from laplace_debias.kfac.factors import Factors
from laplace_debias.posterior.from_factors import fit_from_factors
from laplace_debias.posterior.kron import Laplace

N = 100


@pytest.fixture
def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    X, y = torch.randn(40, 3, dtype=torch.float64), torch.randint(3, (40,))
    return model, (X[:25], y[:25]), (X[25:], y[25:])


def factors_of(model, batch):
    return kfac_factors(model, *batch, likelihood="classification")


def laplace(model, debias):
    return Laplace(model, "classification", "all", "kron", debias=debias)


@pytest.mark.parametrize("debias", ["single", True])
def test_equals_a_fit_on_the_data(problem, debias):
    model, *batches = problem
    batches = batches if debias is True else batches[:1]
    fitted, given = laplace(model, debias), laplace(model, debias)
    fitted.fit(batches[0], curvature_loader=batches[1] if debias is True else None, n_data=N)
    first, *second = (factors_of(model, batch) for batch in batches)
    fit_from_factors(given, first, N, *second)
    assert given.n_data == N and given.n_outputs == 3
    torch.testing.assert_close(given.loss, fitted.loss)
    torch.testing.assert_close(given.mean, fitted.mean)
    torch.testing.assert_close(given.H.to_matrix(), fitted.H.to_matrix())
    torch.testing.assert_close(given.log_marginal_likelihood(), fitted.log_marginal_likelihood())


def test_says_what_is_wrong_and_changes_nothing(problem):
    model, one, two = problem
    factors, curvatures = factors_of(model, one), factors_of(model, two)
    la = laplace(model, True)
    with pytest.raises(ValueError, match="debias='two-batch' without curvatures"):
        fit_from_factors(la, factors, N)
    with pytest.raises(ValueError, match="debias='single' with curvatures"):
        fit_from_factors(laplace(model, "single"), factors, N, curvatures)
    with pytest.raises(ValueError, match="debias='crossfit' without curvatures"):
        fit_from_factors(laplace(model, "crossfit"), factors, N)
    with pytest.raises(ValueError, match="`n_data` of at least 25"):
        fit_from_factors(la, factors, 24, curvatures)
    short = Factors.from_blocks(["0.weight"], curvatures.blocks[:1], 15, 3, curvatures.loss)
    with pytest.raises(ValueError, match=r"got \[\[4, 3\]\] in the role of curvatures"):
        fit_from_factors(la, factors, N, short)
    with pytest.raises(AttributeError, match="without a posterior"):
        la.state_dict()
