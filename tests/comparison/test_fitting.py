"""Fits of single cells; whole comparisons are in test_compare.py and test_baselines.py."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.comparison.fitting import Fitting
from laplace_debias.comparison.options import Prediction, Reference


def _fitting(**laplace):
    torch.manual_seed(0)
    X = torch.randn(20, 3)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    train = DataLoader(TensorDataset(X, (X[:, 0] > 0).long()), batch_size=5)
    laplace = {"subset_of_weights": "all"} | laplace
    return Fitting(
        Laplace,
        net,
        train,
        None,
        "classification",
        laplace,
        {},
        Reference(),
        Prediction(),
        [1.0, 2.0],
        0,
    )


@pytest.mark.parametrize(
    ("method", "debias", "n_blocks"),
    [("single", "single", 4), ("two-batch", "two-batch", 4), ("full", "single", 4),
     ("crossfit", "crossfit", 4), ("last-layer", "single", 2)],
)  # fmt: skip
def test_posteriors_of_every_method(method, debias, n_blocks):
    la = _fitting().posterior(method, 20 if method == "full" else 10, 0)
    assert la.debias == debias and len(la.parameter_names) == n_blocks and la.n_data == 20


def test_options_of_crossfit_reach_it_alone():
    fitting = _fitting(n_folds=2)
    assert fitting.posterior("crossfit", 10, 0).options.n_folds == 2
    assert fitting.posterior("single", 10, 0).options is None


def test_costs_are_those_of_the_fits():
    fitting = _fitting()
    cells = [("single", 8, 0), ("two-batch", 8, 0), ("prior-only", 0, -1)]
    run, costs, predictors = fitting.run_of(cells)
    assert len(predictors) == 3
    assert [cost["backward"] for cost in costs] == [8, 8, 0]
    found = {}
    X, y = fitting.train_loader.dataset.tensors
    run([(X, y)], lambda i, prediction, y: found.update({i: prediction[0].shape}))
    assert found == dict.fromkeys(range(6), torch.Size([20, 2]))


def test_only_debiased_posteriors_are_compared():
    with pytest.raises(TypeError, match="Expected a debiased Kron posterior"):
        _fitting()._laplace(False)
