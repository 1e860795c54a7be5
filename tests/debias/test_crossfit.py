"""Cross-fitted posteriors on the classes: data, draws, equality, errors."""

from __future__ import annotations

import io

import pytest
import torch
from laplace.curvature import AsdlGGN
from torch.utils.data import DataLoader, IterableDataset, Subset, SubsetRandomSampler, TensorDataset

from laplace_debias import Laplace, sweep_prior_precision
from laplace_debias.data.map_style import MapStyle
from laplace_debias.kfac.backend import HookEF
from tests import cases
from tests.cases import CNN, MLP, MLP_REGRESSION, loader

SUBSETS = ["all", "last_layer"]
OPTIONS = {
    "uniform": {},
    "more inputs": {"n_curvature": 20, "n_input": 60},
    "curvature": {"sampling": "curvature", "n_curvature": 20},
    "small pool": {"sampling": "curvature", "n_curvature": 10, "n_pool": 50, "n_input": 30},
    "three folds": {"n_folds": 3, "sampling": "curvature", "n_curvature": 20},
}


def crossfitted(case, source, subset="all", seed=0, n_data=None, **options):
    la = Laplace(
        case.model(), case.likelihood, subset, "kron", debias="crossfit",
        generator=torch.Generator().manual_seed(seed), **options,
    )  # fmt: skip
    la.fit(source, n_data=n_data)
    return la


def matrix(la):
    return la.posterior_precision.to_matrix()


def stream(X, y, size=16):
    """Mini-batches that can be read once."""
    return iter(list(zip(X.split(size), y.split(size), strict=True)))


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("case", [CNN, MLP_REGRESSION, cases.WEIGHTS_ONLY], ids=lambda c: c.name)
def test_identical_folds_give_exactly_the_single_batch_posterior(case, subset):
    batch = case.data(12)
    la = crossfitted(case, [batch, batch], subset, n_data=100)
    single = Laplace(case.model(), case.likelihood, subset, "kron", debias="single")
    single.fit(batch, n_data=100)
    torch.testing.assert_close(matrix(la), matrix(single), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(la.loss, single.loss)


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("case", [MLP, MLP_REGRESSION], ids=lambda c: c.name)
def test_whole_interface_on_maps_and_streams(case, options, subset):
    X, y = case.data(100)
    for source in (loader(X, y, 16), stream(X, y)):
        la = crossfitted(case, source, subset, n_data=100, **options)
        assert torch.isfinite(la.log_marginal_likelihood())
        assert all((lam >= 0).all() for block in la.H.eigenvalues for lam in block)
        la.optimize_prior_precision(method="marglik", n_steps=3)
        sweep = sweep_prior_precision(la, loader(X, y, 50), [0.1, 1.0])
        assert len(sweep.values["nll"]) == 2
        assert len(la.curvature_bias().layers) == la.n_layers
        file = io.BytesIO()
        torch.save(la.state_dict(), file)
        file.seek(0)
        again = Laplace(case.model(), case.likelihood, subset, "kron", debias="crossfit")
        again.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(matrix(la), matrix(again))


@pytest.mark.parametrize("options", [OPTIONS["curvature"], OPTIONS["small pool"]])
def test_draws_come_from_the_generator(options):
    X, y = CNN.data(100)

    def fit(source, seed):
        return matrix(crossfitted(CNN, source, seed=seed, n_data=100, **options))

    for source in (lambda: loader(X, y, 16), lambda: stream(X, y)):
        state = torch.get_rng_state()
        one = fit(source(), 0)
        assert torch.equal(state, torch.get_rng_state()), "the global generator was used"
        assert torch.equal(one, fit(source(), 0))
        assert not torch.equal(one, fit(source(), 1))


def test_every_datum_enters_the_loss_once():
    """Those that the input factors alone are made of, too."""
    X, y = MLP.data(60)
    full = Laplace(MLP.model(), "classification", "all", "kron", debias="single")
    full.fit((X, y), n_data=60)
    la = crossfitted(MLP, loader(X, y, 16), n_curvature=20, n_input=60)
    torch.testing.assert_close(la.loss, full.loss)


def test_a_pool_gives_its_exact_loss_and_output_hessian():
    """Scored data all enter the loss, and B of the output layer needs no draw at all."""
    X, y = MLP.data(100)
    full = Laplace(MLP.model(), "classification", "last_layer", "kron", debias="single")
    full.fit((X, y), n_data=100)
    la = crossfitted(MLP, loader(X, y, 16), "last_layer", sampling="curvature", n_curvature=4)
    la_all = crossfitted(
        MLP, loader(X, y, 16), "last_layer", sampling="curvature", n_curvature=4, n_pool=100
    )
    torch.testing.assert_close(la_all.loss, full.loss)
    torch.testing.assert_close(la_all.H.eigenvalues[1][0], full.H.eigenvalues[1][0])
    assert la.n_data == 100 and not torch.isclose(la.loss, full.loss)


def test_cost_is_counted():
    X, y = MLP.data(100)
    la = crossfitted(MLP, loader(X, y, 16), sampling="curvature", n_curvature=10, n_pool=50)
    assert 50 < la.fit_cost.forward <= 60  # a datum that is drawn twice passes once
    assert la.fit_cost.backward == 3 * (la.fit_cost.forward - 50)
    la = crossfitted(MLP, loader(X, y, 16))
    assert (la.fit_cost.forward, la.fit_cost.backward) == (32, 3 * 32)


def test_uniform_reads_no_more_than_it_uses():
    X, y = MLP.data(100)
    read = []

    def counting():
        for batch in stream(X, y, 10):
            read.append(batch)
            yield batch

    crossfitted(MLP, counting(), n_data=100)
    assert len(read) == 2
    read.clear()
    crossfitted(MLP, counting(), n_data=100, sampling="curvature", n_curvature=5, n_pool=30)
    assert len(read) == 3


def test_scores_of_the_user_replace_the_scoring_pass():
    X, y = CNN.data(100)
    scores = torch.zeros(100)
    scores[:10] = 1.0
    la = crossfitted(
        CNN, loader(X, y, 16), sampling="curvature", n_curvature=8, n_input=20, scores=scores
    )
    assert la.fit_cost.forward <= 20 + 8
    for bad, message in (
        (torch.ones(99), "one score for each of the 100 data.*got 99"),
        (torch.zeros(100), "at least one positive score"),
        (torch.full((100,), float("nan")), "finite, non-negative scores"),
    ):
        with pytest.raises(ValueError, match=message):
            crossfitted(CNN, loader(X, y, 16), sampling="curvature", scores=bad)
    with pytest.raises(ValueError, match="no `scores` with a stream"):
        crossfitted(CNN, stream(X, y), n_data=100, sampling="curvature", scores=scores)


def test_sampler_over_a_subset_stays_within_it():
    X, y = MLP.data(60)
    data = DataLoader(TensorDataset(X, y), 8, sampler=SubsetRandomSampler(range(20)))
    assert set(MapStyle(data).positions) == set(range(20))
    la = crossfitted(MLP, data, n_data=20, sampling="curvature", n_curvature=8)
    inside = crossfitted(
        MLP, DataLoader(Subset(data.dataset, range(20)), 8), sampling="curvature", n_curvature=8
    )
    torch.testing.assert_close(la.loss, inside.loss)


def test_dict_batches():
    X, y = MLP.data(64)
    model = cases.seeded(cases.Dict).double()
    for options in ({}, OPTIONS["small pool"]):
        la = Laplace(
            model, "classification", "all", "kron", debias="crossfit", dict_key_x="x",
            dict_key_y="y", **options,
        )  # fmt: skip
        la.fit([{"x": a, "y": b} for a, b in stream(X, y)], n_data=64)
        assert la({"x": X}).shape == (64, 4)


def test_half_precision_and_empirical_fisher():
    X, y = MLP.data(64)
    la = Laplace(MLP.model().half(), "classification", "all", "kron", debias="crossfit")
    la.fit(stream(X.half(), y), n_data=64)
    assert la(X.half()).dtype == torch.float16
    la = crossfitted(MLP, stream(X, y), n_data=64, backend=HookEF, sampling="curvature")
    assert torch.isfinite(la(X)).all()
    la = crossfitted(MLP, stream(X, y), n_data=64, fisher="mc", sampling="curvature")
    assert la.fit_cost.backward == 32


def test_the_model_is_left_as_it_was():
    from tests.network.test_preserve import fingerprint, lived_in

    X, y = MLP.data(64)
    for options in (OPTIONS["uniform"], OPTIONS["curvature"]):
        model = lived_in(MLP)
        before = fingerprint(model)
        gen = torch.Generator()
        la = Laplace(
            model, "classification", "all", "kron", debias="crossfit", generator=gen, **options
        )
        la.fit(loader(X, y, 16))
        assert fingerprint(model) == before

        def breaking():
            yield X[:8], y[:8]
            raise RuntimeError("disk gone")

        with pytest.raises(RuntimeError, match="disk gone"):
            la.fit(breaking(), n_data=64)
        assert fingerprint(model) == before and la.n_data == 64


def test_progress_bar(capsys):
    la = Laplace(
        CNN.model(), "classification", "all", "kron", debias="crossfit", sampling="curvature"
    )
    la.fit(loader(*CNN.data(32), 8), progress_bar=True)
    assert "K-FAC: draws" in capsys.readouterr().err


def test_bad_use():
    X, y = MLP.data(30)
    with pytest.raises(ValueError, match="'n_folds' with debias='crossfit' only.*'two-batch'"):
        Laplace(MLP.model(), "classification", "all", "kron", debias=True, n_folds=2)
    with pytest.raises(ValueError, match="HookGGN or HookEF.*got AsdlGGN"):
        Laplace(MLP.model(), "classification", "all", "kron", debias="crossfit", backend=AsdlGGN)
    with pytest.raises(ValueError, match="at least 20 data for 2 folds.*got 10"):
        crossfitted(MLP, [(X[:10], y[:10])], n_data=30)
    with pytest.raises(ValueError, match="for 5 folds.*Remedy"):
        crossfitted(MLP, stream(X, y, 10), n_data=30, n_folds=5)
    for sampling in ("uniform", "curvature"):
        with pytest.raises(ValueError, match="datum in `train_loader`, got an empty loader"):
            crossfitted(MLP, [], n_data=30, sampling=sampling)
    with pytest.raises(ValueError, match="between 1 and 30 data from a pool of 30"):
        crossfitted(MLP, loader(X, y, 10), sampling="curvature", n_curvature=80)
    with pytest.raises(ValueError, match="`n_data` of at least 30"):
        crossfitted(MLP, stream(X, y, 10), n_data=20, sampling="curvature", n_curvature=10)
    la = Laplace(MLP.model(), "classification", "all", "kron", debias="crossfit")
    with pytest.raises(ValueError, match="override=True.*crossfit"):
        la.fit(loader(X, y, 10), override=False)
    with pytest.raises(ValueError, match="no `curvature_loader` with debias='crossfit'"):
        la.fit(loader(X, y, 10), curvature_loader=loader(X, y, 10), n_data=30)

    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(X, y, strict=True)

    with pytest.raises(ValueError, match="`n_data`; got a Stream without length"):
        la.fit(DataLoader(Stream(), 10))
    la.fit(DataLoader(Stream(), 10), n_data=30)
    assert la.n_data == 30


def test_bad_targets_are_refused_in_the_pool_too():
    X, y = MLP.data(30)
    y[25] = 9
    with pytest.raises(ValueError, match=r"indices in \[0, 3\]"):
        crossfitted(MLP, loader(X, y, 10), sampling="curvature", n_curvature=4, n_input=4)


@pytest.mark.parametrize(("batch_size", "n_folds"), [(1, 2), (2, 4), (3, 5)])
def test_mini_batches_smaller_than_the_number_of_folds(batch_size, n_folds):
    X, y = MLP.data(60)
    options = {"sampling": "curvature", "n_curvature": 20, "n_folds": n_folds}
    for source in (loader(X, y, batch_size), stream(X, y, batch_size)):
        la = crossfitted(MLP, source, n_data=60, **options)
        assert torch.isfinite(la.log_marginal_likelihood())


def test_outputs_of_the_pool_keep_their_order():
    """Folds take every K-th datum; the loss needs outputs beside their own targets."""
    X, y = MLP.data(60)
    full = Laplace(MLP.model(), "classification", "all", "kron", debias="single")
    full.fit((X, y), n_data=60)
    la = crossfitted(
        MLP, stream(X, y, 7), n_data=60, n_folds=3, sampling="curvature", n_curvature=9, n_input=30
    )
    torch.testing.assert_close(la.loss, full.loss)


def test_sequential_sampler_warns():
    la = Laplace(MLP.model(), "classification", "all", "kron", debias="crossfit")
    with pytest.warns(UserWarning, match="SequentialSampler"):
        la.fit(DataLoader(TensorDataset(*MLP.data(20)), batch_size=5))


@pytest.mark.parametrize("form", ["map", "stream"])
def test_weighted_draws_are_unbiased(form):
    """Traces of the hidden layer's B over many draws, where few data carry most curvature.

    Cross-fitting keeps traces, so they are those of the drawn, weighted data, scaled to N.
    """
    X, y = MLP.data(60)
    model = MLP.model()
    with torch.no_grad():
        model[2].weight.mul_(60.0)  # a sure network: most outputs' Hessians vanish
    full = Laplace(model, "classification", "all", "kron", debias="single")
    full.fit((X, y), n_data=600)
    truth = full.H.eigenvalues[1][0].sum()
    traces = []
    for seed in range(80):
        la = Laplace(
            model, "classification", "all", "kron", debias="crossfit", sampling="curvature",
            n_curvature=56, n_pool=60, generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        la.fit(loader(X, y, 20) if form == "map" else stream(X, y, 20), n_data=600)
        traces.append(la.H.eigenvalues[1][0].sum() / truth)
    traces = torch.stack(traces)
    error = traces.std() / len(traces) ** 0.5
    assert error < 0.03 and abs(traces.mean() - 1) < 4 * error, (traces.mean(), error)
