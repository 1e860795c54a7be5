"""Comparisons: equal budgets, right scaling, resuming for the same data only, and bad input."""

import copy
import importlib
import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from laplace_debias.comparison import (
    CustomMethod,
    Prediction,
    Reference,
    Work,
    compare,
)
from laplace_debias.comparison.draws import draw_generator, draw_loaders
from laplace_debias.comparison.fitting import Fitting
from laplace_debias.evaluation.distance import posterior_distance
from laplace_debias.evaluation.evaluate import evaluate
from laplace_debias.posterior.debiased import DebiasedPosterior
from laplace_debias.posterior.kron import Laplace

# the package exports the function under the name of the module
compare_module = importlib.import_module("laplace_debias.comparison.compare")

N = 40
GRID = (0.4, 4.0, 40.0)


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    X = torch.randn(N, 3, dtype=torch.float64)
    y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    train = DataLoader(TensorDataset(X, y), batch_size=7)
    test = DataLoader(TensorDataset(X + 0.3, y), batch_size=16)
    ood = DataLoader(TensorDataset(4 * X, y), batch_size=16)
    return model, train, test, ood


def run(problem, **kwargs):
    model, train, test, _ = problem
    settings = dict(budgets=(8, 16), n_draws=2, prior_precisions=GRID)
    return compare(model, train, test, **(settings | kwargs))


def test_every_cell_has_its_row(problem):
    result = run(problem)
    assert len(result.rows) == 1 + len(GRID) * (2 * 2 * 2 + 1)
    assert result.methods == ("plain", "single", "two-batch", "full")
    assert result.budgets("single") == result.budgets("two-batch") == (8, 16)
    assert {row.batch_size for row in result.select("two-batch", 8)} == {4}
    assert {row.batch_size for row in result.select("single", 8)} == {8}
    assert {row.budget for row in result.select("full")} == {N}
    assert [row.prior_precision for row in result.select("full")] == list(GRID)
    assert result.n_data == N


def test_rows_equal_separate_evaluations(problem):
    model, train, test, ood = problem
    result = run(problem, ood_loader=ood)
    (plain,) = result.select("plain")
    network = evaluate(model, test, ood_loader=ood)
    assert plain.metrics["nll"] == pytest.approx(network.nll, rel=1e-9)
    assert plain.metrics["ood_auroc"] == pytest.approx(network.ood.auroc, rel=1e-9)
    full = Laplace(model, "classification", "all", "kron", debias="single")
    full.fit(train)
    for row in result.select("full"):
        full.prior_precision = row.prior_precision
        report = evaluate(full, test, ood_loader=ood)
        for name in ("accuracy", "nll", "ece", "brier", "mean_entropy"):
            assert row.metrics[name] == pytest.approx(getattr(report, name), rel=1e-6), name
        assert row.metrics["ood_auroc"] == pytest.approx(report.ood.auroc, rel=1e-6)
        corrupted = evaluate(full, ood)
        assert row.metrics["ood_nll"] == pytest.approx(corrupted.nll, rel=1e-6)


def test_the_kind_of_factors_reaches_every_method(monkeypatch):
    """BackPACK's K-FAC with drawn labels: as fits by hand with the same draws."""
    torch.manual_seed(0)
    X = torch.randn(24, 1, 4, 4, dtype=torch.float64)
    y = torch.arange(24) % 3
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)).double()
    train = DataLoader(TensorDataset(X, y), batch_size=6)
    test = DataLoader(TensorDataset(X + 0.3, y), batch_size=24)
    kind = {"kfac_approx": "backpack", "fisher": "mc", "sampler": "label"}
    fitted = []
    posterior = Fitting.posterior

    def spy(self, *cell):
        fitted.append(posterior(self, *cell))
        return fitted[-1]

    monkeypatch.setattr(Fitting, "posterior", spy)
    methods = ("single", "two-batch", "crossfit", "auto", "full")
    settings = dict(methods=methods, budgets=(12,), n_draws=1, prior_precisions=(1.0,))
    result = compare(model, train, test, laplace=kind, **settings)
    found = {la.debias: la for la in fitted if la.n_data == 24}
    assert {la.kfac_approx for la in fitted} == {"backpack"}
    assert {(la.fisher, la.sampler) for la in fitted if la.debias != "auto"} == {("mc", "label")}
    assert found["auto"].fisher == "exact" and found["auto"].fit_report.n_passes == 12

    others = compare(model, train, test, **settings)
    for method, draw in (("single", 0), ("two-batch", 0), ("full", -1)):
        la = Laplace(
            model, "classification", "all", "kron", generator=draw_generator(0, draw),
            debias="two-batch" if method == "two-batch" else "single", **kind,
        )  # fmt: skip
        budget, n_roles = 24 if method == "full" else 12, 1 + (method == "two-batch")
        first, *second = draw_loaders(train, budget, n_roles, draw_generator(0, draw))
        la.fit(first, curvature_loader=second[0] if second else None, n_data=24)
        la.prior_precision = 1.0
        (row,), (other,) = result.select(method), others.select(method)
        assert row.metrics["nll"] == pytest.approx(evaluate(la, test).nll, rel=1e-9)
        assert abs(row.metrics["nll"] - other.metrics["nll"]) > 1e-5


def test_budgets_are_equal_and_the_data_the_same(problem, monkeypatch):
    fits = []
    factory = compare_module.Laplace

    def spy(*args, debias, **kwargs):
        la = factory(*args, debias=debias, **kwargs)
        fit = la.fit

        def recorded(first, curvature_loader=None, n_data=None):
            indices = [loader.dataset.indices for loader in (first, curvature_loader) if loader]
            fits.append((debias, indices, n_data))
            return fit(first, curvature_loader=curvature_loader, n_data=n_data)

        la.fit = recorded
        return la

    monkeypatch.setattr(compare_module, "Laplace", spy)
    run(problem, budgets=(8,), n_draws=1)
    (full, single, two_batch) = fits
    assert [fit[2] for fit in fits] == [N, N, N]
    assert single[0] == "single" and len(single[1][0]) == 8
    assert two_batch[0] == "two-batch" and [len(part) for part in two_batch[1]] == [4, 4]
    assert not set(two_batch[1][0]) & set(two_batch[1][1])
    assert set(single[1][0]) == set(two_batch[1][0]) | set(two_batch[1][1])
    assert full[0] == "single" and sorted(full[1][0]) == list(range(N))


def test_a_single_batch_of_all_data_is_the_full_batch(problem):
    # would fail if a mini-batch were not scaled by N / M, or differently from the full batch
    result = run(problem, budgets=(N,), n_draws=1)
    for a, b in zip(result.select("single"), result.select("full"), strict=True):
        for name in result.metrics:
            assert a.metrics[name] == pytest.approx(b.metrics[name], rel=1e-6)
    assert result.gap("nll", "single", N).gap == pytest.approx(0, abs=1e-9)


def test_mc_uses_common_random_numbers(problem):
    mc = Prediction(link_approx="mc", n_samples=20)
    first, again = (run(problem, prediction=mc, seed=3) for _ in range(2))
    assert first == again
    state = torch.get_rng_state()
    other = run(problem, prediction=mc, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert other.select("full") != first.select("full")
    # the same numbers for the single mini-batch of all data and the full batch
    whole = run(problem, prediction=mc, budgets=(N,), n_draws=1)
    assert whole.gap("nll", "single", N).gap == pytest.approx(0, abs=1e-6)


def test_model_is_left_as_found(problem):
    model, *_ = problem
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run(problem, n_draws=1)
    assert model.training
    assert all(p.grad is not None for p in model.parameters())  # from training, not touched
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    model.eval()


def test_one_mini_batch_is_enough(problem):
    model, train, test, ood = problem
    pair, inputs = test.dataset.tensors, ood.dataset.tensors[0]
    whole = run((model, train, [pair], None), n_draws=1, ood_loader=[inputs])
    assert run((model, train, pair, None), n_draws=1, ood_loader=inputs) == whole
    with pytest.raises(ValueError, match="with targets, got a tensor of shape .*Remedy"):
        run((model, train, [inputs], None), n_draws=1)


def test_unlabelled_and_several_ood_sets(problem):
    *_, ood = problem
    X = ood.dataset.tensors[0]
    result = run(problem, n_draws=1, ood_loader={"bare": [X], "corrupted": ood})
    row = result.select("full")[0].metrics
    assert row["bare_auroc"] == pytest.approx(row["corrupted_auroc"])
    assert row["bare_mean_entropy"] == pytest.approx(row["corrupted_mean_entropy"])
    assert "corrupted_nll" in row and "bare_nll" not in row


def test_large_batch_is_never_called_full(problem):
    result = run(problem, n_draws=1, reference=Reference(size=30))
    assert result.reference == "large-batch"
    assert "full" not in result.methods
    assert {row.budget for row in result.select("large-batch")} == {30}


def test_a_given_reference_is_used(problem):
    model, train, *_ = problem
    la = Laplace(model, "classification", "all", "kron", debias="single")
    la.fit(train)
    given = run(problem, n_draws=1, reference=Reference(posterior=la))
    for a, b in zip(given.select("full"), run(problem, n_draws=1).select("full"), strict=True):
        assert a.metrics["nll"] == pytest.approx(b.metrics["nll"], rel=1e-9)


def test_distances_are_those_of_the_posteriors(problem, tmp_path):
    model, train, test, _ = problem
    options = dict(methods=("plain", "single", "auto", "full"), baselines=("last-layer",))
    options |= dict(n_draws=1, budgets=(8,), reference=Reference(distance=True))
    result = run(problem, folder=tmp_path, **options)
    las = [Laplace(model, "classification", "all", "kron", debias="single") for _ in "ab"]
    drawn = Subset(train.dataset, torch.randperm(N, generator=draw_generator(0, 0))[:8].tolist())
    las[0].fit(DataLoader(drawn, batch_size=8), n_data=N)
    las[1].fit(train)
    x, _ = next(iter(test))
    for row, delta in zip(result.select("single"), GRID, strict=True):
        for la in las:
            la.prior_precision = delta
        wanted = posterior_distance(*las, x)
        assert wanted > 0.01
        assert row.metrics["distance"] == pytest.approx(wanted, rel=1e-9)
    assert all(row.metrics["distance"] == 0 for row in result.select("full"))
    assert result.select("plain")[0].metrics["distance"] == math.inf
    assert result.select("last-layer")[0].metrics["distance"] > 0.1
    assert result.gap("distance", "auto", 8).gap < result.gap("distance", "single", 8).gap
    assert "distance" in str(result)
    assert run(problem, folder=tmp_path, **options) == result  # as kept in files
    assert "distance" not in run(problem, n_draws=1, budgets=(8,)).metrics


@pytest.mark.parametrize("link_approx", ["probit", "mc"])
def test_shared_passes_change_nothing(problem, link_approx):
    model, *_, ood = problem
    options = dict(prediction=Prediction(link_approx=link_approx), ood_loader=ood)
    alone = run(problem, **options)
    shared = run(problem, work=Work(n_shared=4), **options)
    assert [row.method for row in shared.rows] == [row.method for row in alone.rows]
    for a, b in zip(alone.rows, shared.rows, strict=True):
        assert (a.method, a.budget, a.draw) == (b.method, b.budget, b.draw)
        assert b.metrics == pytest.approx(a.metrics, rel=1e-9)


def test_shared_passes_are_fewer(problem):
    model, *_ = problem
    counts = {}
    for n_shared in (1, 8):
        calls = []
        handle = model.register_forward_hook(lambda *args, calls=calls: calls.append(len(args[2])))
        run(problem, methods=("single", "two-batch"), work=Work(n_shared=n_shared))
        handle.remove()
        counts[n_shared] = calls.count(16)  # mini-batches of the test set; no fit sees so many
    assert counts[1] == 8 * counts[8] == 8 * 2


def test_further_methods_by_function(problem):
    model, train, *_ = problem
    asked = []

    def fit(budget, draw):
        asked.append((budget, draw))
        la = Laplace(model, "classification", "all", "kron", debias="crossfit", n_curvature=budget)
        la.fit(train, n_data=N)
        return la

    result = run(problem, methods=("single", "full", CustomMethod("ours", fit)))
    assert result.methods == ("single", "full", "ours")
    assert sorted(asked) == [(8, 0), (8, 1), (16, 0), (16, 1)]
    assert set(result.gap_ratio("nll", "ours")) == {8, 16}


def test_compare_resumes_without_repeating_a_cell(problem, tmp_path, monkeypatch):
    uninterrupted = run(problem)
    fits = []
    factory = compare_module.Laplace

    def counting(*args, **kwargs):
        if len(fits) == 5:
            raise KeyboardInterrupt
        fits.append(kwargs["debias"])
        return factory(*args, **kwargs)

    monkeypatch.setattr(compare_module, "Laplace", counting)
    with pytest.raises(KeyboardInterrupt):
        run(problem, folder=tmp_path)
    finished = {path.stem for path in tmp_path.glob("*.json")} - {"config", "plain"}
    assert finished == {"full", "single-8-0", "single-16-0", "two-batch-8-0", "two-batch-16-0"}
    assert not list(tmp_path.glob(".*"))

    def counting_on(*args, **kwargs):
        fits.append(kwargs["debias"])
        return factory(*args, **kwargs)

    monkeypatch.setattr(compare_module, "Laplace", counting_on)
    assert run(problem, folder=tmp_path) == uninterrupted
    assert len(fits) == 2 * 2 * 2 + 1  # each cell once over both calls
    assert run(problem, folder=tmp_path, n_draws=3).select("single", 8)[:6] == (
        uninterrupted.select("single", 8)
    )
    assert len(fits) == 2 * 2 * 2 + 1 + 4  # only the new draw


def test_processes_share_a_folder_by_draws(problem, tmp_path, monkeypatch):
    whole = run(problem, n_draws=3)
    for draws in ([2], [0, 1]):
        part = run(
            problem, n_draws=3, work=Work(draws=draws), folder=tmp_path,
            methods=("single", "two-batch"),
        )  # fmt: skip
        assert {row.draw for row in part.rows} == set(draws)
    fitted = []
    original = compare_module.Laplace
    monkeypatch.setattr(
        compare_module, "Laplace", lambda *a, **k: fitted.append(1) or original(*a, **k)
    )
    assert run(problem, n_draws=3, folder=tmp_path).rows == whole.rows
    assert len(fitted) == 1  # the reference; no draw was made twice
    with pytest.raises(ValueError, match="draws among 0 to 2"):
        run(problem, n_draws=3, work=Work(draws=[3]))


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        (dict(budgets=(7,)), "even budgets between 2 and N = 40, got 7"),
        (dict(budgets=(80,)), "got 80"),
        (dict(n_draws=0), "n_draws >= 1, got 0"),
        (dict(reference=Reference(size=40)), "size between 1 and N - 1 = 39, got 40"),
        (dict(ood_loader=[]), "at least one datum"),
        (dict(methods=("nonsense",)), r"'two-batch' \(or True\).*got \['nonsense'\]. Remedy"),
        (dict(methods=("debiased",)), "debiased"),
    ],
)
def test_bad_arguments(problem, kwargs, match):
    with pytest.raises(ValueError, match=match):
        run(problem, **kwargs)


def test_bad_loaders(problem):
    model, train, test, _ = problem
    with pytest.raises(ValueError, match="map-style dataset"):
        compare(model, iter([]), test)
    with pytest.raises(ValueError, match="at least one labelled datum in `test_loader`"):
        compare(model, train, [], budgets=(8,))


def test_crossfit_uses_its_budget_and_its_options():
    """The options of ``"crossfit"`` reach it alone, and more data change its posterior."""
    X = torch.randn(80, 2, generator=torch.Generator().manual_seed(0))
    y = (X[:, 0] > 0).long()
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2))
    train = DataLoader(TensorDataset(X, y), batch_size=16)
    result = compare(
        net, train, [(X, y)], budgets=(8, 32), n_draws=2, prior_precisions=[1.0],
        methods=("single", "crossfit", "full"), laplace={"sampling": "curvature"},
    )  # fmt: skip
    nll = {(r.method, r.budget, r.draw): r.metrics["nll"] for r in result.rows}
    assert nll["crossfit", 8, 0] != nll["crossfit", 32, 0] != nll["crossfit", 32, 1]
    assert set(result.gap_ratio("nll", method="crossfit")) == {8, 32}
    with pytest.raises(ValueError, match="method of this comparison.*got 'debised'"):
        result.gap_ratio("nll", method="debised")
    with pytest.raises(ValueError, match="Expected methods among.*got .'singel'"):
        compare(net, train, [(X, y)], budgets=(8,), methods=("singel",))


def test_true_is_a_synonym_of_two_batch(problem):
    named, synonym = (run(problem, methods=("single", method)) for method in ("two-batch", True))
    assert named == synonym and named.methods == ("single", "two-batch")


def test_one_mini_batch_is_a_test_set(problem):
    model, train, test, _ = problem
    settings = dict(budgets=(8,), n_draws=1, prior_precisions=GRID)
    one = compare(model, train, test.dataset.tensors, **settings)
    for a, b in zip(one.rows, compare(model, train, test, **settings).rows, strict=True):
        assert a.metrics == pytest.approx(b.metrics, rel=1e-9)


def test_arguments_reach_the_posterior(problem):
    last = run(problem, n_draws=1, laplace={"subset_of_weights": "last_layer"})
    model, train, test, _ = problem
    la = Laplace(model, "classification", "last_layer", "kron", debias="single")
    la.fit(train)
    for row in last.select("full"):
        la.prior_precision = row.prior_precision
        assert row.metrics["nll"] == pytest.approx(evaluate(la, test).nll, rel=1e-6)
    assert last.config["laplace"] == {"subset_of_weights": "last_layer"}


def never(*args, **kwargs):
    raise AssertionError("computed")


SMALL = dict(n_draws=1, budgets=(8,), methods=("plain", "single"))


def test_finished_cells_are_for_one_seed_one_model_and_its_trainable_set(problem, tmp_path):
    model, train, test, _ = problem
    run(problem, folder=tmp_path, **SMALL)
    with pytest.raises(ValueError, match="seed: 0 there, 1 now.*Remedy: use another folder"):
        run(problem, folder=tmp_path, seed=1, **SMALL)
    with pytest.raises(ValueError, match=r"laplace\.prior_mean: None there, 1\.0 now"):
        run(problem, folder=tmp_path, laplace={"prior_mean": 1.0}, **SMALL)
    other = copy.deepcopy(model)
    other[2].bias.requires_grad_(False)
    with pytest.raises(ValueError, match="model: "):
        run((other, train, test, None), folder=tmp_path, **SMALL)
    with torch.no_grad():
        other[2].bias.requires_grad_(True).add_(1)
    with pytest.raises(ValueError, match="model: "):
        run((other, train, test, None), folder=tmp_path, **SMALL)


@pytest.mark.parametrize("which", ["train", "test", "ood"])
@pytest.mark.parametrize("part", [0, 1], ids=["inputs", "labels"])
def test_finished_cells_are_for_one_set_of_data(problem, tmp_path, which, part):
    model, train, test, ood = problem
    loaders = {"train": train, "test": test, "ood": ood}

    def finished(loaders):
        sets = (model, loaders["train"], loaders["test"], None)
        return run(sets, ood_loader=loaders["ood"], folder=tmp_path, **SMALL)

    before = finished(loaders)
    assert finished(loaders) == before
    tensors = [tensor.clone() for tensor in loaders[which].dataset.tensors]
    tensors[part][-1] = 1 - tensors[part][-1]  # the last datum only
    loaders[which] = DataLoader(TensorDataset(*tensors), batch_size=16)
    with pytest.raises(ValueError, match=rf"data\.{which}_loader.*there.*now.*Remedy.*data_id="):
        finished(loaders)


def test_batch_sizes_and_shuffling_do_not_matter_to_finished_cells(problem, tmp_path, monkeypatch):
    model, train, test, _ = problem
    before = run(problem, folder=tmp_path, **SMALL)
    monkeypatch.setattr(compare_module, "evaluate_sets", never)
    shuffled = DataLoader(train.dataset, batch_size=9, shuffle=True, drop_last=True)
    larger = DataLoader(test.dataset, batch_size=40)
    assert run((model, shuffled, larger, None), folder=tmp_path, **SMALL) == before


class Noisy(Dataset):
    """Training data under random augmentation."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        """Return the number of data."""
        return len(self.dataset)

    def __getitem__(self, i):
        """Return a datum with noise."""
        x, y = self.dataset[i]
        return x + 0.01 * torch.randn_like(x), y


def test_augmented_data_need_a_name(problem, tmp_path):
    model, train, test, _ = problem
    noisy = (model, DataLoader(Noisy(train.dataset), batch_size=7), test, None)
    run(noisy, **SMALL)  # nothing is kept, so nothing has to be recognised
    with pytest.raises(ValueError, match="'train_loader' to be the same data.*data_id="):
        run(noisy, folder=tmp_path, **SMALL)
    kept = run(noisy, folder=tmp_path, data_id="noisy", **SMALL)
    assert run(noisy, folder=tmp_path, data_id="noisy", **SMALL) == kept
    with pytest.raises(ValueError, match="data.id: 'noisy' there, 'other' now"):
        run(noisy, folder=tmp_path, data_id="other", **SMALL)


def test_looking_at_the_data_moves_no_generator(problem, tmp_path):
    model, train, test, _ = problem
    generator = torch.Generator().manual_seed(3)
    shuffling = [
        DataLoader(loader.dataset, batch_size=8, shuffle=True, generator=generator)
        for loader in (train, test)
    ]
    state, own = torch.get_rng_state(), generator.get_state()
    finished = run((model, *shuffling, None), folder=tmp_path, methods=(), n_draws=1)
    assert finished.rows == ()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(generator.get_state(), own)


def test_custom_methods_keep_their_settings_and_may_be_added(problem, tmp_path):
    model, train, *_ = problem

    def fit(budget, draw):
        la = Laplace(model, "classification", "all", "kron", debias="single")
        la.fit(next(iter(train)), n_data=N)
        return la

    settings = dict(n_draws=1, budgets=(8,), folder=tmp_path)
    ours = CustomMethod("ours", fit, {"dtype": "float64"})
    first = run(problem, methods=(ours,), **settings)
    both = run(problem, methods=(ours, CustomMethod("more", fit, {"k": 1})), **settings)
    assert both.methods == ("ours", "more") and both.select("ours") == first.rows
    other = CustomMethod("ours", never, {"dtype": "float32"})
    with pytest.raises(ValueError, match="settings.*float32.*ours-8-0.json.*float64.*Remedy"):
        run(problem, methods=(other,), **settings)
    run(problem, methods=(CustomMethod("single", fit),), **settings)
    with pytest.raises(ValueError, match="single-8-0.json made with"):
        run(problem, methods=("single",), **settings)


def test_a_cut_cell_is_named_before_anything_is_computed(problem, tmp_path, monkeypatch):
    run(problem, folder=tmp_path, **SMALL)
    path = tmp_path / "single-8-0.json"
    path.write_text(path.read_text()[:100])
    monkeypatch.setattr(compare_module, "evaluate_sets", never)
    with pytest.raises(ValueError, match=r"single-8-0\.json, which cannot be read.*Remedy: delete"):
        run(problem, folder=tmp_path, **{**SMALL, "n_draws": 2})


def test_the_result_is_the_same_with_and_without_a_folder(problem, tmp_path):
    result = run(problem, folder=tmp_path, **SMALL)
    assert result == run(problem, **SMALL)
    assert json.loads(json.dumps(result.config)) == result.config
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["options"] == result.config
    assert set(stored["data"]) == {"train_loader", "test_loader"}


def test_auto_gets_the_backward_passes_of_as_many_exact_data(problem, monkeypatch):
    fitted = []
    fit = DebiasedPosterior.fit

    def watched(la, *args, **kwargs):
        fit(la, *args, **kwargs)
        fitted.append((la.debias, la.fit_cost.backward))

    monkeypatch.setattr(DebiasedPosterior, "fit", watched)
    result = run(problem, methods=("single", "auto", "full"), budgets=(8,), n_draws=2)
    passes = {name: {n for method, n in fitted if method == name} for name in ("single", "auto")}
    most = min(passes["single"])  # the full batch is single, too
    assert all(0.95 * most <= n <= most for n in passes["auto"])
    assert "auto" in result.methods and result.gap_ratio("nll", "auto")[8] < 1
