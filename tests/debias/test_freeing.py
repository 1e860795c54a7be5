"""Fits without two sets of factors; what they come to is tested by the methods that use them."""

import pytest
import torch

from laplace_debias.data.roles import CURVATURES, DIRECTIONS, TrainingData
from laplace_debias.debias.checkpoint import Checkpoint
from laplace_debias.debias.freeing import fit_freeing
from laplace_debias.debias.two_batch import fit_factors
from laplace_debias.kfac.engine import Engine
from laplace_debias.kfac.factors import Factors
from tests.cases import CNN, MLP


@pytest.mark.parametrize("case", [MLP, CNN], ids=lambda case: case.name)
def test_mini_batches_in_any_cut_give_the_fit_of_formed_factors(case):
    X, y = case.data(60)
    engine = Engine(case.model(), case.likelihood)
    formed = fit_factors(engine.factors(X[:40], y[:40]), engine.factors(X[40:], y[40:]), 300)
    cuts = [(DIRECTIONS, slice(0, 25)), (DIRECTIONS, slice(25, 40)), (CURVATURES, slice(40, 47)),
            (CURVATURES, slice(47, 60))]  # fmt: skip
    data = TrainingData([], None, 300, torch.device("cpu"))
    batches = ((role, (X[part], y[part])) for role, part in cuts)
    freed = fit_freeing(engine, data, batches, roles=(DIRECTIONS, CURVATURES))
    one, other = (fit.decomposed(torch.float64).to_matrix() for fit in (formed, freed))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(formed.loss, freed.loss)
    assert freed.curvatures == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_curvatures_that_are_not_finite_are_refused_by_name(bad, monkeypatch):
    X, y = MLP.data(60)
    engine = Engine(MLP.model(), MLP.likelihood)
    plain = Factors.scaled_to

    def scaled_to(self, n_data):
        found = plain(self, n_data)
        found[-1][0].fill_(bad)
        return found

    monkeypatch.setattr(Factors, "scaled_to", scaled_to)
    data, roles = TrainingData([], None, 300, torch.device("cpu")), (DIRECTIONS, CURVATURES)
    batches = iter([(DIRECTIONS, (X[:40], y[:40])), (CURVATURES, (X[40:], y[40:]))])
    with pytest.raises(ValueError, match=f"finite.*{engine.names[-1]}|{engine.names[-1]}.*finite"):
        fit_freeing(engine, data, batches, roles=roles)


def test_a_checkpoint_of_the_directions_is_gone_on_from(tmp_path):
    X, y = MLP.data(60)
    engine = Engine(MLP.model(), MLP.likelihood)
    parts = [(DIRECTIONS, (X[:20], y[:20])), (DIRECTIONS, (X[20:40], y[20:40])),
             (CURVATURES, (X[40:], y[40:]))]  # fmt: skip
    data, roles = TrainingData([], None, 300, torch.device("cpu")), (DIRECTIONS, CURVATURES)
    whole = fit_freeing(engine, data, iter(parts), roles=roles)
    file = tmp_path / "fit.pt"

    def broken():
        yield from parts[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first = Checkpoint(file, {}, [], seconds=0.0)
        fit_freeing(engine, data, broken(), roles=roles, checkpoint=first)
    second = Checkpoint(file, {}, [], seconds=0.0)
    assert second.resumed == 2 and "directions" in second.content
    resumed = fit_freeing(engine, data, iter(parts), roles=roles, checkpoint=second)
    one, other = (fit.decomposed(torch.float64).to_matrix() for fit in (whole, resumed))
    assert torch.equal(one, other)
