"""One forward pass over a pool: folds, outputs in their order, rows of wide layers."""

import torch
from torch import nn
from torch.nn import functional as F

from laplace_debias import Laplace
from laplace_debias.debias.few_rows import crossfit_rows
from laplace_debias.debias.options import CrossfitOptions
from laplace_debias.debias.pool_pass import PoolPass
from laplace_debias.kfac.engine import Engine


def test_a_pool_gives_wide_layers_rows_up_to_half_their_inputs():
    """Eight data for A; of the others those whose rows are still few for 40 inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(60, 40).double(), torch.arange(60) % 3
    options = {"n_curvature": 4, "n_input": 8}
    expected = {
        "uniform": [x[:2], x[4:6], x[2:4], x[6:8]],
        "curvature": [x[0:6:2], x[6:7], x[1:6:2], x[7:8], x[8:20]],
    }
    for sampling, rows in expected.items():
        la = Laplace(
            model, "classification", "all", "kron", debias="crossfit", sampling=sampling, **options
        )
        la.fit(list(zip(x.split(6), y.split(6), strict=True)), n_data=60)
        torch.testing.assert_close(la.H.eigenvalues[0][1], crossfit_rows(torch.cat(rows))[2])
        assert la.fit_cost.forward <= (8 if sampling == "uniform" else 60) + 4


def passed(sizes, n_folds, n_input, width=3):
    """A pool in mini-batches of given sizes, passed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    n = sum(sizes)
    X, y = torch.randn(n, width).double(), torch.arange(n) % 3
    options = CrossfitOptions(
        n_folds, "curvature", n_curvature=n_folds, n_input=n_input, n_pool=n
    ).resolved(n)
    pool = PoolPass(Engine(model, "classification"), options, "input_ids")
    outputs = [pool.add(*part) for part in zip(X.split(sizes), y.split(sizes), strict=True)]
    return model, X, y, pool, outputs


def test_outputs_and_loss_are_those_of_one_plain_pass():
    """Folds take every K-th datum of the pool; outputs must stand beside their own targets."""
    for sizes in ([7, 7, 6], [1] * 9, [20]):
        model, X, y, pool, outputs = passed(sizes, n_folds=3, n_input=9)
        f = model(X).detach()
        torch.testing.assert_close(torch.cat(outputs), f)
        torch.testing.assert_close(torch.cat(pool.outputs), f)
        torch.testing.assert_close(pool.loss, F.cross_entropy(f, y, reduction="sum"))
        assert pool.engine.cost.forward == len(y) and pool.engine.cost.backward == 0


def test_the_first_data_serve_the_input_factors_each_in_one_fold():
    model, X, _, pool, _ = passed([7, 7, 6], n_folds=3, n_input=11)
    hidden = model[1](model[0](X)).detach()
    for k in range(3):
        mine = torch.arange(11)[k::3]
        assert pool.A[k].n == len(mine)
        for i, rows in ((0, X[mine]), (2, hidden[mine])):
            torch.testing.assert_close(pool.A[k].A[i], rows.T @ rows / len(mine))


def test_rows_of_wide_layers_go_on_as_long_as_they_are_few():
    """40 inputs: 20 rows at most, of which 8 have served A; none of a narrow layer."""
    _, X, _, pool, _ = passed([6, 6, 6, 6, 6], n_folds=2, n_input=8, width=40)
    wide, *others = pool.rows()
    order = [0, 2, 4, 6, 1, 3, 5, 7, *range(8, 20)]
    torch.testing.assert_close(wide, X[order])
    assert others == [None, None, None]
