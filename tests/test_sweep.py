"""Sweeps, grid search and links against slow loops that are plainly right."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest
import torch
import torchmetrics
from laplace.baselaplace import KronLaplace
from laplace.lllaplace import KronLLLaplace
from laplace.utils.metrics import RunningNLLMetric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias.gridsearch import gridsearch_prior_precision
from laplace_debias.links import class_probabilities, root
from laplace_debias.predictive import linearized_predictive
from laplace_debias.structured_glm import StructuredGLM
from laplace_debias.sweep import default_grid, sweep_prior_precision
from laplace_debias.sweep_metrics import GaussianNLL
from laplace_debias.sweep_result import SweepResult

GRID = [0.05, 1.0, 30.0]


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


class FastKron(StructuredGLM, KronLaplace):
    """laplace-torch's class on the structured predictive."""

    _key = ("all", "kron_structured_test")


class FastKronLL(StructuredGLM, KronLLLaplace):
    """laplace-torch's last-layer class on the structured predictive."""

    _key = ("last_layer", "kron_structured_test")


def fitted(cls=KronLaplace, likelihood="classification", **kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(30, 4)
    y = torch.randint(3, (30,)) if likelihood == "classification" else torch.randn(30, 3)
    la = cls(model, likelihood, **kwargs)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=15))
    loader = DataLoader(TensorDataset(x[:20] + 0.1, y[:20]), batch_size=7)
    return la, loader


def slow_nll(la, loader, grid, link="probit"):
    """Upstream's own predictions, one prior precision at a time, averaged over data by hand."""
    values = []
    for delta in grid:
        la.prior_precision = delta
        losses = []
        for x, y in loader:
            if la.likelihood == "classification":
                probs = la(x, link_approx=link)
                losses += (-probs[range(len(y)), y].log()).tolist()
            else:
                mean, cov = la(x)
                noise = float(la.sigma_noise) ** 2 * torch.eye(mean.shape[1])
                normal = torch.distributions.MultivariateNormal(mean, cov + noise)
                losses += (-normal.log_prob(y)).tolist()
        values.append(sum(losses) / len(losses))
    return values


@pytest.mark.parametrize("cls", [KronLaplace, KronLLLaplace])
@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm"])
def test_classification_agrees_with_a_slow_loop(cls, link):
    la, loader = fitted(cls)
    la.prior_precision = 3.0
    result = sweep_prior_precision(la, loader, GRID, link_approx=link)
    assert la.prior_precision.tolist() == [3.0]
    assert result.values["nll"] == pytest.approx(slow_nll(la, loader, GRID, link), rel=1e-10)
    assert result.n_data == 20


@pytest.mark.parametrize("cls", [KronLaplace, KronLLLaplace])
def test_regression_agrees_with_a_slow_loop(cls):
    la, loader = fitted(cls, "regression", sigma_noise=0.4)
    result = sweep_prior_precision(la, loader, GRID, metrics=["nll", "mse"])
    assert result.values["nll"] == pytest.approx(slow_nll(la, loader, GRID), rel=1e-10)
    x, y = loader.dataset.tensors
    mse = (la.model(x) - y).square().mean().item()
    assert result.values["mse"] == pytest.approx([mse] * 3)
    assert result.link_approx is None


def test_layerwise_grid():
    la, loader = fitted()
    grid = torch.rand(3, 4) + 0.1
    result = sweep_prior_precision(la, loader, grid)
    assert result.prior_precisions.shape == (3, 4)
    assert result.values["nll"] == pytest.approx(slow_nll(la, loader, grid), rel=1e-10)
    with pytest.warns(UserWarning) if result.best_index("nll") != 1 else _nothing():
        assert result.best("nll").shape == (4,)


class _nothing:
    def __enter__(self):
        return None

    def __exit__(self, *args):
        return False


def test_mc_link_converges_to_upstreams_and_follows_the_generator():
    la, loader = fitted()
    seeded = [
        sweep_prior_precision(
            la,
            loader,
            GRID,
            link_approx="mc",
            n_samples=20,
            generator=torch.Generator().manual_seed(seed),
        ).values["nll"]
        for seed in (0, 0, 1)
    ]
    assert seeded[0] == seeded[1] != seeded[2]
    torch.manual_seed(0)
    many = sweep_prior_precision(la, loader, GRID, link_approx="mc", n_samples=20_000)
    sampled = sweep_prior_precision(
        la, loader, GRID, link_approx="mc", n_samples=20_000, method="samples"
    )
    expected = []
    for delta in GRID:
        la.prior_precision = delta
        total = 0.0
        for x, y in loader:
            probs = la.predictive_samples(x, n_samples=20_000).mean(0)
            total -= probs[range(len(y)), y].log().sum().item()
        expected.append(total / 20)
    assert many.values["nll"] == pytest.approx(expected, rel=5e-3)
    assert sampled.values["nll"] == pytest.approx(expected, rel=5e-3)


def test_metrics_are_fresh_for_every_point_and_the_users_is_untouched():
    la, loader = fitted()
    mine = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
    mine.update(torch.tensor([0, 0]), torch.tensor([1, 1]))
    result = sweep_prior_precision(la, loader, GRID, metrics={"mine": mine})
    by_name = sweep_prior_precision(la, loader, GRID, metrics=["accuracy", "ece"])
    assert result.values["mine"] == by_name.values["accuracy"]
    assert result.higher_is_better == {"mine": True}
    assert by_name.higher_is_better == {"accuracy": True, "ece": False}
    assert mine.compute().item() == 0.0
    again = sweep_prior_precision(la, loader, [1.0, 1.0, 1.0], metrics=["nll"])
    assert len(set(again.values["nll"])) == 1


def test_batch_size_and_budget_do_not_change_the_values():
    la, loader = fitted()
    one = DataLoader(loader.dataset, batch_size=20)
    expected = sweep_prior_precision(la, one, GRID, metrics=["nll", "ece"])
    got = sweep_prior_precision(la, loader, GRID, metrics=["nll", "ece"], memory_budget=1)
    assert got.values["nll"] == pytest.approx(expected.values["nll"], rel=1e-12)
    assert got.values["ece"] == pytest.approx(expected.values["ece"], rel=1e-6)


def test_default_grid_is_the_papers():
    la, loader = fitted()
    result = sweep_prior_precision(la, loader)
    expected = [30 * 10 ** (-4 + i / 3) for i in range(13)] + [300.0]
    assert result.prior_precisions.tolist() == pytest.approx(expected)
    assert torch.equal(default_grid(30), 30 * default_grid(1))


def test_mappings_in_the_loader():
    class Net(nn.Sequential):
        def forward(self, batch):
            return super().forward(batch["input_ids"])

    la, loader = fitted()
    expected = sweep_prior_precision(la, loader, GRID).values["nll"]
    la.model = Net(*la.model)
    mappings = [{"input_ids": x, "labels": y} for x, y in loader]
    assert sweep_prior_precision(la, mappings, GRID).values["nll"] == pytest.approx(expected)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("cls", [KronLaplace, KronLLLaplace])
def test_gridsearch_agrees_with_a_slow_loop(cls, likelihood):
    la, loader = fitted(cls, likelihood)
    la.prior_precision = 5.0
    result = gridsearch_prior_precision(
        la, loader, log_prior_prec_min=-2, log_prior_prec_max=3, grid_size=6
    )
    assert la.prior_precision.tolist() == [5.0]
    expected = slow_nll(la, loader, torch.logspace(-2, 3, 6))
    assert result.values["loss"] == pytest.approx(expected, rel=1e-6)  # the grid is float32's
    best = min(range(6), key=expected.__getitem__)
    assert result.prior_precisions[best].item() == pytest.approx(10 ** (best - 2))


def test_gridsearch_takes_metrics_and_functions():
    la, loader = fitted()
    options = {"grid_size": 4, "log_prior_prec_base": 2.0}
    by_metric = gridsearch_prior_precision(la, loader, loss=RunningNLLMetric(), **options)
    by_function = gridsearch_prior_precision(
        la, loader, loss=lambda p, y: nn.functional.nll_loss(p.log(), y), **options
    )
    assert by_metric.values["loss"] == pytest.approx(by_function.values["loss"])
    assert by_metric.prior_precisions[0].item() == pytest.approx(2.0**-4)
    la, loader = fitted(likelihood="regression")
    shapes = []

    def loss(mean, cov, y):
        shapes.append((mean.shape, cov.shape, y.shape))
        return cov.diagonal(dim1=1, dim2=2).mean()

    result = gridsearch_prior_precision(la, loader, loss=loss, **options)
    assert shapes == [((20, 3), (20, 3, 3), (20, 3))] * 4
    assert sorted(result.values["loss"], reverse=True) == list(result.values["loss"])


def test_gridsearch_with_sampled_networks_restores_the_prior():
    la, loader = fitted()
    la.prior_precision = 5.0
    result = gridsearch_prior_precision(
        la, loader, pred_type="nn", link_approx="mc", n_samples=5, grid_size=3
    )
    assert la.prior_precision.tolist() == [5.0]
    assert all(math.isfinite(v) for v in result.values["loss"])

    def fail(p, y):
        raise RuntimeError("broken loss")

    for pred_type, link in [("nn", "mc"), ("glm", "probit")]:
        with pytest.raises(RuntimeError, match="broken"):
            gridsearch_prior_precision(
                la, loader, pred_type=pred_type, link_approx=link, loss=fail, grid_size=2
            )
        assert la.prior_precision.tolist() == [5.0]


def test_nan_points_are_reported_and_never_chosen():
    nan = float("nan")
    grid = torch.tensor([0.1, 1.0, 10.0, 100.0])
    result = SweepResult(grid, {"nll": (nan, 0.5, 0.4, 0.6)}, {"nll": False}, 1, "probit")
    with pytest.warns(UserWarning, match="NaN at grid points"):
        assert result.best("nll").item() == 10.0
    assert result.nan_points("nll") == (0,)
    empty = SweepResult(grid, {"nll": (nan,) * 4}, {"nll": False}, 1, "probit")
    with pytest.raises(ValueError, match="NaN"):
        empty.best("nll")


def test_best_follows_the_direction_and_warns_on_the_edge():
    grid = torch.tensor([0.1, 1.0, 10.0])
    values = {"nll": (0.3, 0.2, 0.4), "accuracy": (0.3, 0.2, 0.4)}
    result = SweepResult(grid, values, {"nll": False, "accuracy": True}, 1, "probit")
    assert result.best("nll").item() == 1.0
    with pytest.warns(UserWarning, match="edge.*larger"):
        assert result.best("accuracy").item() == 10.0
    with pytest.raises(ValueError, match="ece"):
        result.best("ece")


def test_tables_and_files(tmp_path):
    grid = torch.tensor([0.1, 1.0])
    result = SweepResult(grid, {"nll": (0.3, float("nan"))}, {"nll": False}, 7, "probit")
    assert len(str(result).splitlines()) == 3
    rows = list(csv.reader(io.StringIO(result.to_csv(tmp_path / "sweep.csv"))))
    assert rows[0] == ["prior_precision", "nll"] and float(rows[1][1]) == 0.3
    content = json.loads(result.to_json(tmp_path / "sweep.json"))
    assert content["values"]["nll"] == [0.3, None] and content["n_data"] == 7
    assert (tmp_path / "sweep.csv").read_text() == result.to_csv()
    assert json.loads((tmp_path / "sweep.json").read_text()) == content
    layerwise = SweepResult(torch.ones(2, 3), {"nll": (1.0, 2.0)}, {"nll": False}, 7, None)
    assert layerwise.to_csv().startswith("prior_precision_0,prior_precision_1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prior_precisions": [1.0, -1.0]}, "positive"),
        ({"prior_precisions": [1.0, 0.0]}, "positive"),
        ({"prior_precisions": [float("nan")]}, "positive"),
        ({"prior_precisions": torch.ones(2, 3)}, "length"),
        ({"link_approx": "softmax"}, "link_approx"),
        ({"metrics": ["f1"]}, "f1"),
        ({"metrics": []}, "at least one metric"),
        ({"metrics": {"mine": torch.mean}}, "torchmetrics"),
        ({"method": "quick"}, "method"),
    ],
)
def test_bad_input_leaves_everything_as_it_was(change, message):
    la, loader = fitted()
    la.prior_precision = 5.0
    arguments = {"prior_precisions": GRID, **change}
    with pytest.raises(ValueError, match=message):
        sweep_prior_precision(la, loader, arguments.pop("prior_precisions"), **arguments)
    assert la.prior_precision.tolist() == [5.0]


def test_empty_loaders():
    la, _ = fitted()
    for search in (sweep_prior_precision, gridsearch_prior_precision):
        with pytest.raises(ValueError, match="empty"):
            search(la, [])
    with pytest.raises(ValueError, match="empty"):
        gridsearch_prior_precision(la, [], pred_type="nn", link_approx="mc", grid_size=1)
    with pytest.raises(ValueError, match="None"):
        gridsearch_prior_precision(la, None)


@pytest.mark.parametrize(("fast", "slow"), [(FastKron, KronLaplace), (FastKronLL, KronLLLaplace)])
@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm"])
def test_calls_agree_with_upstream(fast, slow, link):
    a, loader = fitted(fast)
    b, _ = fitted(slow)
    x = loader.dataset.tensors[0]
    torch.testing.assert_close(a(x, link_approx=link), b(x, link_approx=link))
    mean, variance = a.functional_variance_fast(x)
    expected = b._glm_predictive_distribution(x)[1].diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(variance, expected)


@pytest.mark.parametrize(("fast", "slow"), [(FastKron, KronLaplace), (FastKronLL, KronLLLaplace)])
@pytest.mark.parametrize("options", [{}, {"joint": True}, {"diagonal_output": True}])
def test_regression_calls_agree_with_upstream(fast, slow, options):
    a, loader = fitted(fast, "regression", sigma_noise=0.5)
    b, _ = fitted(slow, "regression", sigma_noise=0.5)
    x = loader.dataset.tensors[0]
    for got, expected in zip(a(x, **options), b(x, **options), strict=True):
        torch.testing.assert_close(got, expected)


def test_mc_calls_follow_the_generator():
    la, loader = fitted(FastKron)
    x = loader.dataset.tensors[0]
    outputs = []
    for seed in (0, 0, 1):
        la._generator = torch.Generator().manual_seed(seed)
        outputs.append(la(x, link_approx="mc", n_samples=7))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    la._generator = torch.Generator().manual_seed(0)
    many = la(x, link_approx="mc", n_samples=20_000)
    expected = la.predictive_samples(x, n_samples=20_000).mean(0)
    torch.testing.assert_close(many, expected, atol=0.01, rtol=0)
    diagonal = la(x, link_approx="mc", n_samples=20_000, diagonal_output=True)
    expected = la.predictive_samples(x, n_samples=20_000, diagonal_output=True).mean(0)
    torch.testing.assert_close(diagonal, expected, atol=0.01, rtol=0)


def test_probabilities_for_many_covariances_at_once():
    la, loader = fitted()
    x = loader.dataset.tensors[0]
    many = linearized_predictive(la, x, GRID)
    for link in ("probit", "mc", "bridge", "bridge_norm"):
        probs = class_probabilities(
            many.mean, many.covariance, link, generator=torch.Generator().manual_seed(0)
        )
        assert probs.shape == (3, 20, 3)
        torch.testing.assert_close(probs.sum(-1), torch.ones(3, 20))
        for i in range(3):
            one = class_probabilities(
                many.mean, many.covariance[i], link, generator=torch.Generator().manual_seed(0)
            )
            torch.testing.assert_close(one, probs[i])
    with pytest.raises(ValueError, match="link_approx"):
        class_probabilities(many.mean, many.covariance, "logit")


def test_root_of_singular_and_nan_covariances():
    v = torch.randn(5, 4, 1)
    singular = v @ v.mT
    singular[0] = 2 * torch.eye(4)
    L = root(singular)
    torch.testing.assert_close(L @ L.mT, singular)
    assert root(torch.full((1, 2, 2), float("nan"))).isnan().any()


def test_gaussian_nll_is_nan_without_a_density():
    metric = GaussianNLL(0.1)
    metric.update(torch.zeros(1, 2), -torch.eye(2).unsqueeze(0), torch.zeros(1, 2))
    assert math.isnan(metric.compute())
