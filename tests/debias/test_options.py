"""Options of cross-fitting: defaults, impossible combinations, names of the methods."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.debias.options import AutoOptions, CrossfitOptions, method_options
from laplace_debias.debias.sampling import even_parts
from tests.cases import MLP


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_folds": 1}, "`n_folds` of at least 2, got 1"),
        ({"sampling": "smart"}, "`sampling` to be one of .* got 'smart'"),
        ({"n_curvature": 1}, "`n_curvature` of at least `n_folds`=2, got 1"),
        ({"n_passes": 1, "sampling": "curvature"}, "`n_passes` of at least `n_folds`=2, got 1"),
        (
            {"n_passes": 8, "n_curvature": 9, "sampling": "curvature"},
            "n_passes or n_curvature, got 8 and 9",
        ),
        ({"n_pool": 9}, "no `n_pool` and no `scores` with sampling='uniform'"),
        (
            {"sampling": "curvature", "n_pool": 9, "n_curvature": 10},
            "pool of at least 10 data .*n_pool=9",
        ),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=rf"Expected.*{message}.*Remedy"):
        CrossfitOptions(**options)
    with pytest.raises(ValueError, match=message):
        Laplace(MLP.model(), "classification", "all", "kron", debias="crossfit", **options)


def test_defaults_follow_from_the_batch_size_and_the_number_of_folds():
    uniform = CrossfitOptions(n_folds=3).resolved(batch_size=10)
    assert (uniform.n_curvature, uniform.n_input, uniform.n_pool) == (30, 30, 0)
    curvature = CrossfitOptions(sampling="curvature").resolved(batch_size=10)
    assert (curvature.n_curvature, curvature.n_input, curvature.n_pool) == (20, 80, 320)
    given = CrossfitOptions(sampling="curvature", n_curvature=8, n_input=50, n_pool=20)
    given = given.resolved(batch_size=10)
    assert (given.n_curvature, given.n_input, given.n_pool) == (8, 50, 50)  # A needs scored data


def test_scores_are_checked_once_and_handed_on():
    options = CrossfitOptions(sampling="curvature", scores=[1.0, 0.0, 2.0])
    assert options.resolved(2).scores.tolist() == [1.0, 0.0, 2.0]
    with pytest.raises(ValueError, match="got -1.0 for datum 1"):
        CrossfitOptions(sampling="curvature", scores=torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match="whole number, got 2.0"):
        CrossfitOptions(n_curvature=2.0)


@pytest.mark.parametrize(("n", "k"), [(10, 4), (3, 5), (0, 2), (12, 3)])
def test_even_parts(n, k):
    parts = even_parts(n, k)
    assert len(parts) == k and sum(parts) == n and max(parts) - min(parts) <= 1
    assert parts == sorted(parts, reverse=True)


def test_passes_are_the_budget_of_what_chooses_its_data():
    X, y = torch.randn(60, 4), torch.arange(60) % 3
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    loader = DataLoader(TensorDataset(X, y), 20, shuffle=True)

    def fitted(**options):
        generator = torch.Generator().manual_seed(0)
        la = Laplace(
            net, "classification", "all", "kron", debias="crossfit", sampling="curvature",
            generator=generator, **options,
        )  # fmt: skip
        torch.manual_seed(0)
        la.fit(loader)
        return la

    by_passes, by_data = (fitted(fisher="mc", **{word: 24}) for word in ("n_passes", "n_curvature"))
    assert 0 < by_passes.fit_cost.backward <= 24  # data that are drawn twice are passed once
    assert by_passes.log_det_posterior_precision == by_data.log_det_posterior_precision
    assert fitted(n_passes=24).fisher == "mc"


def test_options_of_another_method_are_told_where_they_belong():
    for kind, word in ((AutoOptions, "auto"), (CrossfitOptions, "crossfit")):
        given = dict.fromkeys(kind.names())  # all that it has
        with pytest.raises(ValueError, match=f"with .*debias='{word}'.* only, got debias=True"):
            method_options(True, given, None)
