"""Posteriors of one draw from shared factors are those of ``compare``, at fewer images."""

import pytest
import torch
from torch.utils.data import DataLoader

from examples.cifar10.draws import NestedDraws
from examples.cifar10.reference import factors_of
from laplace_debias.comparison import CustomMethod, compare
from laplace_debias.kfac.engine import Engine
from tests.examples.cifar10.agreement import assert_same


@pytest.mark.parametrize("budget", [8, 16])
def test_nested_draws_are_the_comparisons_own(problem, budget, monkeypatch):
    # sums of pieces are dense, where a fit of few rows would keep these and their thin basis
    factors = Engine.factors

    def dense(self, *args, few_rows=False, **kwargs):
        return factors(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "factors", dense)
    model, train = problem
    model.double()
    loader = DataLoader(train.to_dataset(torch.float64), batch_size=32)
    settings = dict(budgets=(budget,), n_draws=2, prior_precisions=(0.1, 3.0), seed=7)
    own = compare(model, loader, loader, methods=("single", "two-batch"), **settings)
    draws = NestedDraws(model, train, [budget], seed=7)
    methods = [CustomMethod(name, fit) for name, fit in draws.fits.items()]
    nested = compare(model, loader, loader, methods=methods, **settings)
    for a, b in zip(own.rows, nested.rows, strict=True):
        assert (a.method, a.batch_size, a.draw) == (b.method, b.batch_size, b.draw)
        assert b.metrics["nll"] == pytest.approx(a.metrics["nll"], rel=1e-8)


def test_nested_draws_compute_every_image_once(problem):
    # posteriors are not compared: rounding turns the arbitrary basis of their null spaces
    model, train = problem
    draws = NestedDraws(model, train, [8, 16], seed=7)
    for draw in (0, 1):
        order = draws.order(draw)
        for start, stop in ((0, 8), (0, 16), (0, 4), (4, 8), (8, 16)):
            direct = factors_of(model.double(), train, order[start:stop])
            assert_same(draws.factors(draw, start, stop), direct)
    assert draws.n_images == 2 * 16  # not 2 * (8 + 8 + 16 + 16)
    with pytest.raises(ValueError, match=r"borders \[0, 4, 8, 16\], got 0 to 6"):
        draws.factors(0, 0, 6)
