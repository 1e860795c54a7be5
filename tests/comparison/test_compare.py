"""Comparisons: equal budgets, right scaling, the gap ratio by hand, resuming, and bad input."""

import csv
import importlib
import io
import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias.comparison.compare import compare
from laplace_debias.comparison.result import ComparisonResult, ComparisonRow
from laplace_debias.evaluation.evaluate import evaluate
from laplace_debias.posterior.factory import Laplace
from laplace_debias.predictive.predictor import SharedPredictor, StructuredPredictor
from laplace_debias.storage.cells import CellStore

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
    assert result.methods == ("vanilla", "single", "debiased", "full")
    assert result.budgets("single") == result.budgets("debiased") == (8, 16)
    assert {row.batch_size for row in result.select("debiased", 8)} == {4}
    assert {row.batch_size for row in result.select("single", 8)} == {8}
    assert {row.budget for row in result.select("full")} == {N}
    assert [row.prior_precision for row in result.select("full")] == list(GRID)
    assert result.n_data == N


def test_rows_equal_separate_evaluations(problem):
    model, train, test, ood = problem
    result = run(problem, ood_loader=ood)
    (vanilla,) = result.select("vanilla")
    plain = evaluate(model, test, ood_loader=ood)
    assert vanilla.metrics["nll"] == pytest.approx(plain.nll, rel=1e-9)
    assert vanilla.metrics["ood_auroc"] == pytest.approx(plain.ood.auroc, rel=1e-9)
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
    (full, single, debiased) = fits
    assert [fit[2] for fit in fits] == [N, N, N]
    assert single[0] == "single" and len(single[1][0]) == 8
    assert debiased[0] is True and [len(part) for part in debiased[1]] == [4, 4]
    assert not set(debiased[1][0]) & set(debiased[1][1])
    assert set(single[1][0]) == set(debiased[1][0]) | set(debiased[1][1])
    assert full[0] == "single" and sorted(full[1][0]) == list(range(N))


def test_a_single_batch_of_all_data_is_the_full_batch(problem):
    # would fail if a mini-batch were not scaled by N / M, or differently from the full batch
    result = run(problem, budgets=(N,), n_draws=1)
    for a, b in zip(result.select("single"), result.select("full"), strict=True):
        for name in result.metrics:
            assert a.metrics[name] == pytest.approx(b.metrics[name], rel=1e-6)
    assert result.gap("nll", "single", N).gap == pytest.approx(0, abs=1e-9)


def test_mc_uses_common_random_numbers(problem):
    first, again = (run(problem, link_approx="mc", n_samples=20, seed=3) for _ in range(2))
    assert first == again
    state = torch.get_rng_state()
    other = run(problem, link_approx="mc", n_samples=20, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert other.select("full") != first.select("full")
    # the same numbers for the single mini-batch of all data and the full batch
    whole = run(problem, link_approx="mc", n_samples=20, budgets=(N,), n_draws=1)
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


def test_unlabelled_and_several_ood_sets(problem):
    *_, ood = problem
    X = ood.dataset.tensors[0]
    result = run(problem, n_draws=1, ood_loader={"bare": [X], "corrupted": ood})
    row = result.select("full")[0].metrics
    assert row["bare_auroc"] == pytest.approx(row["corrupted_auroc"])
    assert row["bare_mean_entropy"] == pytest.approx(row["corrupted_mean_entropy"])
    assert "corrupted_nll" in row and "bare_nll" not in row


def test_large_batch_is_never_called_full(problem):
    result = run(problem, n_draws=1, reference_size=30)
    assert result.reference == "large-batch"
    assert "full" not in result.methods
    assert {row.budget for row in result.select("large-batch")} == {30}


def test_a_given_reference_is_used(problem):
    model, train, *_ = problem
    la = Laplace(model, "classification", "all", "kron", debias="single")
    la.fit(train)
    given = run(problem, n_draws=1, reference=la)
    for a, b in zip(given.select("full"), run(problem, n_draws=1).select("full"), strict=True):
        assert a.metrics["nll"] == pytest.approx(b.metrics["nll"], rel=1e-9)


@pytest.mark.parametrize("link_approx", ["probit", "mc"])
def test_shared_passes_change_nothing(problem, link_approx):
    model, *_, ood = problem
    alone = run(problem, link_approx=link_approx, ood_loader=ood)
    shared = run(problem, link_approx=link_approx, ood_loader=ood, n_shared=4)
    assert [row.method for row in shared.rows] == [row.method for row in alone.rows]
    for a, b in zip(alone.rows, shared.rows, strict=True):
        assert (a.method, a.budget, a.draw) == (b.method, b.budget, b.draw)
        assert b.metrics == pytest.approx(a.metrics, rel=1e-9)


def test_shared_passes_are_fewer(problem):
    model, *_ = problem
    counts = {}
    for n_shared in (1, 8):
        calls = []
        handle = model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        run(problem, methods=("single", "debiased"), n_shared=n_shared)
        handle.remove()
        counts[n_shared] = len(calls)
    assert counts[8] < counts[1] / 2


def test_posteriors_of_other_models_cannot_share_passes(problem):
    predictors = []
    for _ in range(2):
        la = Laplace(nn.Linear(3, 2), "classification", "all", "kron", debias="single")
        la.fit((torch.randn(4, 3), torch.tensor([0, 1, 0, 1])), n_data=10)
        predictors.append(StructuredPredictor(la, [1.0]))
    with pytest.raises(ValueError, match="same parameters of one model"):
        SharedPredictor(predictors)
    with pytest.raises(ValueError, match="at least one predictor"):
        SharedPredictor([])


def test_further_methods_by_function(problem):
    model, train, *_ = problem
    asked = []

    def fit(budget, draw):
        asked.append((budget, draw))
        la = Laplace(model, "classification", "all", "kron", debias="crossfit", n_curvature=budget)
        la.fit(train, n_data=N)
        return la

    result = run(problem, methods=("single", "full"), fits={"ours": fit})
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
    finished = {path.stem for path in tmp_path.glob("*.json")} - {"config", "vanilla"}
    assert finished == {"full", "single-8-0", "single-16-0", "debiased-8-0", "debiased-16-0"}
    assert not list(tmp_path.glob("*.partial"))

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
        part = run(problem, n_draws=3, draws=draws, folder=tmp_path, methods=("single", "debiased"))
        assert {row.draw for row in part.rows} == set(draws)
    fitted = []
    original = compare_module.Laplace
    monkeypatch.setattr(
        compare_module, "Laplace", lambda *a, **k: fitted.append(1) or original(*a, **k)
    )
    assert run(problem, n_draws=3, folder=tmp_path).rows == whole.rows
    assert len(fitted) == 1  # the reference; no draw was made twice
    with pytest.raises(ValueError, match="draws among 0 to 2"):
        run(problem, n_draws=3, draws=[3])


def test_a_stale_folder_is_refused(problem, tmp_path):
    run(problem, n_draws=1, methods=("vanilla",), folder=tmp_path)
    with pytest.raises(ValueError, match="seed: 0 there, 1 now"):
        run(problem, n_draws=1, methods=("vanilla",), folder=tmp_path, seed=1)
    model, train, test, _ = problem
    changed = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with pytest.raises(ValueError, match="model: "):
        compare(changed, train, test, folder=tmp_path, prior_precisions=GRID, budgets=(8,))


def test_cell_store_refuses_foreign_cells(tmp_path):
    store = CellStore(tmp_path, {"a": 1})
    assert store.get("x", lambda: [1.5]) == [1.5]
    cell = json.loads((tmp_path / "x.json").read_text())
    (tmp_path / "x.json").write_text(json.dumps(cell | {"fingerprint": "other"}))
    with pytest.raises(ValueError, match="of another"):
        CellStore(tmp_path, {"a": 1}).get("x", lambda: [2.5])


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        (dict(budgets=(7,)), "even budgets between 2 and N = 40, got 7"),
        (dict(budgets=(80,)), "got 80"),
        (dict(n_draws=0), "n_draws >= 1, got 0"),
        (dict(link_approx="logit"), "logit"),
        (dict(n_shared=0), "n_shared >= 1, got 0"),
        (dict(reference_size=40), "reference_size between 1 and N - 1 = 39, got 40"),
        (dict(ood_loader=[]), "at least one datum"),
        (dict(methods=("nonsense",)), "nonsense"),
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


def hand_made():
    def row(method, draw, delta, nll):
        return ComparisonRow(method, 8, 4 if method == "debiased" else 8, draw, delta, {"nll": nll})

    rows = [row("vanilla", 0, None, 2.0)]
    rows += [row("full", 0, 1.0, 1.0), row("full", 0, 2.0, 3.0)]
    rows += [row("single", d, 1.0, v) for d, v in ((0, 1.5), (1, 2.5))]
    rows += [row("single", d, 2.0, v) for d, v in ((0, 3.0), (1, 4.0))]
    rows += [row("debiased", d, 1.0, v) for d, v in ((0, 0.5), (1, 1.5))]
    rows += [row("debiased", d, 2.0, v) for d, v in ((0, 3.0), (1, 3.0))]
    return ComparisonResult(tuple(rows), 100, {"seed": 0})


def test_gap_by_hand():
    result = hand_made()
    single, debiased = (result.gap("nll", method, 8) for method in ("single", "debiased"))
    assert single.gap == pytest.approx((0.5 + 1.5 + 0 + 1) / 4)
    assert single.bias == pytest.approx((1.0 + 0.5) / 2)
    assert single.spread == pytest.approx(math.sqrt(0.5))
    assert debiased.gap == pytest.approx((0.5 + 0.5 + 0 + 0) / 4)
    assert debiased.bias == 0.0
    assert result.gap_ratio("nll") == pytest.approx({8: 0.25 / 0.75})
    assert result.gap_ratio("nll", "debiased", "debiased") == {8: 1.0}
    assert result.gap("nll", "vanilla", 8).gap == pytest.approx(1.0)  # |2 - 1| and |2 - 3|


def test_summary_by_hand():
    (point,) = [
        s for s in hand_made().summary("nll") if (s.method, s.prior_precision) == ("single", 1.0)
    ]
    assert (point.mean, point.min, point.max, point.n_draws) == (2.0, 1.5, 2.5, 2)


def test_result_as_text():
    result = hand_made()
    assert ComparisonResult.from_json(result.to_json()) == result
    records = list(csv.DictReader(io.StringIO(result.to_csv())))
    assert len(records) == len(result.rows)
    assert records[1]["method"] == "full" and float(records[1]["nll"]) == 1.0
    assert "0.33" in result.table() and str(result) == result.table()


def test_result_says_what_is_missing():
    result = hand_made()
    with pytest.raises(ValueError, match="metric among"):
        result.gap("ece", "single", 8)
    with pytest.raises(ValueError, match="one of its budgets"):
        result.gap("nll", "single", 9)
    part = ComparisonResult(result.select("single"), 100, {})
    with pytest.raises(ValueError, match="reference"):
        part.gap_ratio("nll", "single")


def test_crossfit_uses_its_budget_and_its_options():
    """The options of ``"crossfit"`` reach it alone, and more data change its posterior."""
    X = torch.randn(80, 2, generator=torch.Generator().manual_seed(0))
    y = (X[:, 0] > 0).long()
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2))
    train = DataLoader(TensorDataset(X, y), batch_size=16)
    result = compare(
        net, train, [(X, y)], budgets=(8, 32), n_draws=2, prior_precisions=[1.0],
        methods=("single", "crossfit", "full"), sampling="curvature",
    )  # fmt: skip
    nll = {(r.method, r.budget, r.draw): r.metrics["nll"] for r in result.rows}
    assert nll["crossfit", 8, 0] != nll["crossfit", 32, 0] != nll["crossfit", 32, 1]
    assert set(result.gap_ratio("nll", method="crossfit")) == {8, 32}
    with pytest.raises(ValueError, match="method of this comparison.*got 'debised'"):
        result.gap_ratio("nll", method="debised")
    with pytest.raises(ValueError, match="Expected methods among.*got .'singel'"):
        compare(net, train, [(X, y)], budgets=(8,), methods=("singel",))
