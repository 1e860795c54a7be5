"""Evaluation: every metric against a hand-computed case, bad input, and what is left as found."""

import json
import math

import pytest
import torch
from laplace import Laplace as UpstreamLaplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassCalibrationError

from laplace_debias.evaluation.evaluate import EvaluationError, evaluate
from laplace_debias.evaluation.metrics import CalibrationMetrics
from laplace_debias.evaluation.regression_metrics import RegressionMetrics
from laplace_debias.evaluation.reports import adaptive_bins, equal_width_bins

# three predictions over two classes: right with 0.75, wrong with 0.6, right with 0.9
PROBS = torch.tensor([[0.75, 0.25], [0.4, 0.6], [0.1, 0.9]], dtype=torch.float64)
LABELS = torch.tensor([0, 0, 1])


def report_of(probs=PROBS, labels=LABELS, **kwargs):
    metrics = CalibrationMetrics(**kwargs)
    metrics.update(probs, labels)
    return metrics.compute()


def random_predictions(n=400, C=7, sharpness=4.0, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(n, C, generator=generator, dtype=dtype)
    return logits.softmax(-1), torch.randint(C, (n,), generator=generator)


def test_accuracy_by_hand():
    assert report_of().accuracy == pytest.approx(2 / 3)


def test_nll_by_hand():
    expected = -(math.log(0.75) + math.log(0.4) + math.log(0.9)) / 3
    assert report_of().nll == pytest.approx(expected, rel=1e-12)


def test_brier_by_hand():
    expected = (2 * 0.25**2 + 2 * 0.6**2 + 2 * 0.1**2) / 3
    assert report_of().brier == pytest.approx(expected, rel=1e-12)


def test_ece_by_hand():
    # ten bins, each prediction alone in its bin
    expected = (abs(1 - 0.75) + abs(0 - 0.6) + abs(1 - 0.9)) / 3
    assert report_of(n_bins=10).ece == pytest.approx(expected, rel=1e-6)
    # one bin: |2/3 - 0.75|
    assert report_of(n_bins=1).ece == pytest.approx(0.75 - 2 / 3, rel=1e-6)


def test_entropy_by_hand():
    h = [-sum(p * math.log(p) for p in row) for row in PROBS.tolist()]
    assert report_of().mean_entropy == pytest.approx(sum(h) / 3, rel=1e-12)


def test_auroc_by_hand():
    metrics = CalibrationMetrics()
    metrics.update(PROBS, LABELS)  # distances from 1/2: 0.25, 0.1, 0.4
    metrics.update_ood(torch.tensor([[0.5, 0.5], [0.7, 0.3]], dtype=torch.float64))
    ood = metrics.compute().ood
    # of six (ID, OOD) pairs the OOD entropy is the larger in all but (0.1, 0.2)
    assert ood.auroc == pytest.approx(5 / 6)
    assert ood.n_data == 2
    assert ood.mean_entropy == pytest.approx(
        (math.log(2) - 0.7 * math.log(0.7) - 0.3 * math.log(0.3)) / 2, rel=1e-12
    )


def test_auroc_separates_tiny_entropies():
    # torchmetrics squashes scores outside [0, 1], such as log 4, by a sigmoid; the tiny entropies
    # would then be ties in single precision
    def probs(p):
        return torch.tensor([[1.0, p, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])

    metrics = CalibrationMetrics()
    metrics.update(probs(1e-12), torch.tensor([0, 0]))
    metrics.update_ood(probs(1e-9))
    # pairs (ID, OOD): (tiny, less tiny) and (tiny, uniform) are told apart, (uniform, uniform) ties
    assert metrics.compute().ood.auroc == (1 + 1 + 0 + 0.5) / 4


@pytest.mark.parametrize("n_bins", [5, 15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ece_equals_torchmetrics_and_bins(n_bins, dtype):
    probs, labels = random_predictions(dtype=dtype)
    probs[:20] = torch.eye(7, dtype=dtype)[labels[:20]]  # confidence exactly 1
    metrics = CalibrationMetrics(n_bins)
    for p, y in zip(probs.split(64), labels.split(64), strict=True):
        metrics.update(p, y)
    report = metrics.compute()
    expected = MulticlassCalibrationError(7, n_bins=n_bins, norm="l1")(probs, labels).item()
    assert report.ece == expected
    assert report.bins.calibration_error == pytest.approx(expected, rel=1e-5)
    assert sum(report.bins.count) == sum(report.adaptive_bins.count) == len(labels)


def test_rounding_above_one_is_not_taken_for_logits():
    probs = torch.tensor([[1.0 + 1e-6, 0.0], [0.0, 1.0]])
    report = report_of(probs, torch.tensor([0, 1]))
    assert report.accuracy == 1.0
    assert report.ece == 0.0  # a softmax would have made it 0.27


def test_streaming_equals_one_batch():
    probs, labels = random_predictions(dtype=torch.float64)
    whole, parts = report_of(probs, labels), CalibrationMetrics()
    for p, y in zip(probs.split(17), labels.split(17), strict=True):
        parts.update(p, y)
    streamed = parts.compute()
    for name, value in whole.scalars().items():
        assert streamed.scalars()[name] == pytest.approx(value, rel=1e-6)


def test_zero_probability_gives_a_finite_nll():
    report = report_of(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    assert report.nll == pytest.approx(-math.log(torch.finfo(torch.float32).tiny))


def test_adaptive_bins_have_equal_mass():
    confidences = torch.linspace(0.5, 1, 103)
    bins = adaptive_bins(confidences, torch.ones(103), 10)
    assert max(bins.count) - min(bins.count) == 1
    assert sum(bins.count) == 103
    assert list(bins.lower) == sorted(bins.lower)
    assert len(adaptive_bins(confidences[:3], torch.ones(3), 10)) == 3


def test_exactly_one_has_its_own_bin():
    assert len(equal_width_bins(torch.tensor([0.99]), torch.tensor([1]), 15)) == 15
    assert len(equal_width_bins(torch.tensor([1.0]), torch.tensor([1]), 15)) == 16


def test_regression_by_hand():
    metrics = RegressionMetrics()
    mean = torch.zeros(3, 1, dtype=torch.float64)
    variance = torch.tensor([[1.0], [4.0], [1.0]], dtype=torch.float64)
    targets = torch.tensor([[0.5], [3.0], [3.0]], dtype=torch.float64)
    metrics.update(mean, variance, targets)
    report = metrics.compute()
    c = 0.5 * math.log(2 * math.pi)
    nll = (0.125 + c) + (9 / 8 + 0.5 * math.log(4) + c) + (4.5 + c)
    assert report.nll == pytest.approx(nll / 3, rel=1e-12)
    assert report.rmse == pytest.approx(math.sqrt((0.25 + 9 + 9) / 3), rel=1e-12)
    # standard scores 0.5, 1.5, 3 against 0.674, 1.645, 1.960
    assert report.coverage == pytest.approx({0.5: 1 / 3, 0.9: 2 / 3, 0.95: 2 / 3})


def test_regression_nll_uses_the_joint_covariance():
    covariance = torch.tensor([[[2.0, 0.9], [0.9, 1.0]]], dtype=torch.float64)
    y = torch.tensor([[0.3, -1.2]], dtype=torch.float64)
    metrics = RegressionMetrics()
    metrics.update(torch.zeros_like(y), covariance, y)
    joint = torch.distributions.MultivariateNormal(torch.zeros_like(y), covariance)
    assert metrics.compute().nll == pytest.approx(-joint.log_prob(y).item(), rel=1e-12)


@pytest.mark.parametrize(
    ("probs", "labels", "match"),
    [
        (torch.tensor([[0.7, 0.7]]), torch.tensor([0]), "sum to one.*row sum off by 0.4"),
        (torch.tensor([[2.0, -1.0]]), torch.tensor([0]), r"in \[0, 1\].*logits.softmax"),
        (torch.tensor([[math.nan, 1.0]]), torch.tensor([0]), "finite.*1 of 1 rows"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([2]), r"labels in \[0, 1\].*\[2, 2\]"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([-1]), r"labels in \[0, 1\]"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([0.0]), "integer dtype.*regression"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([0, 1]), "1 class indices"),
        (torch.tensor([0.5, 0.5]), torch.tensor([0, 1]), r"shape \[N, C\]"),
    ],
)
def test_bad_predictions_are_refused_and_nothing_is_added(probs, labels, match):
    metrics = CalibrationMetrics()
    metrics.update(PROBS, LABELS)
    with pytest.raises(ValueError, match=match):
        metrics.update(probs, labels)
    assert metrics.compute() == report_of()


def test_other_bad_arguments():
    with pytest.raises(ValueError, match="n_bins >= 1"):
        CalibrationMetrics(0)
    with pytest.raises(ValueError, match="at least one in-distribution"):
        CalibrationMetrics().compute()
    metrics = CalibrationMetrics()
    metrics.update(PROBS, LABELS)
    with pytest.raises(ValueError, match="2 classes as before, got 3"):
        metrics.update(torch.full((1, 3), 1 / 3), torch.tensor([0]))
    with pytest.raises(ValueError, match="positive definite"):
        RegressionMetrics().update(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1))
    with pytest.raises(ValueError, match=r"\[2, 1\] and \[2\]"):
        RegressionMetrics().update(torch.zeros(2, 1), torch.ones(2, 1), torch.zeros(2))


@pytest.fixture
def classifier():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    X = torch.randn(40, 4, dtype=torch.float64)
    y = torch.randint(3, (40,))
    return model, X, y


def loader_of(*tensors, batch_size=16):
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size)


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_upstream_laplace_is_evaluated_as_it_predicts(classifier, structure, subset):
    model, X, y = classifier
    la = UpstreamLaplace(model.eval(), "classification", subset, structure)
    la.fit(loader_of(X, y))
    report = evaluate(la, loader_of(X, y), ood_loader=loader_of(5 * X, y))
    expected = CalibrationMetrics()
    expected.update(la(X), y)
    expected.update_ood(la(5 * X))
    for name, value in expected.compute().scalars().items():
        assert report.scalars()[name] == pytest.approx(value, rel=1e-6), name


def test_plain_model_is_evaluated_in_eval_mode_and_restored(classifier):
    model, X, y = classifier
    model.train()
    model[1].eval()
    before = [p.data_ptr() for p in model.parameters()]
    report = evaluate(model, loader_of(X, y))
    assert [module.training for module in model] == [True, False, True, True]
    assert [p.data_ptr() for p in model.parameters()] == before
    with torch.no_grad():
        probs = model.eval()(X).softmax(-1)
    assert report.nll == pytest.approx(nn.functional.nll_loss(probs.log(), y).item(), rel=1e-9)


def test_nn_predictive_leaves_weights_and_random_state(classifier):
    model, X, y = classifier
    la = UpstreamLaplace(model, "classification", "all", "kron")
    la.fit(loader_of(X, y))
    pointers = [p.data_ptr() for p in model.parameters()]
    state = torch.get_rng_state()
    reports = [
        evaluate(
            la,
            loader_of(X, y),
            pred_type="nn",
            n_samples=5,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in (1, 1, 2)
    ]
    assert reports[0] == reports[1] != reports[2]
    assert torch.equal(torch.get_rng_state(), state)
    assert [p.data_ptr() for p in model.parameters()] == pointers


def test_mc_link_follows_the_generator(classifier):
    model, X, y = classifier
    la = UpstreamLaplace(model, "classification", "last_layer", "kron")
    la.fit(loader_of(X, y))
    a, b, c = (
        evaluate(
            la,
            loader_of(X, y),
            link_approx="mc",
            n_samples=7,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in (1, 1, 2)
    )
    assert a == b != c


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_regression_adds_the_observation_noise(structure):
    torch.manual_seed(0)
    X = torch.randn(30, 2, dtype=torch.float64)
    y = torch.randn(30, 2, dtype=torch.float64)
    model = nn.Linear(2, 2).double()
    la = UpstreamLaplace(model, "regression", "all", structure, sigma_noise=0.5)
    la.fit(loader_of(X, y))
    report = evaluate(la, loader_of(X, y))
    mean, covariance = la(X)
    joint = torch.distributions.MultivariateNormal(mean, covariance + 0.25 * torch.eye(2))
    assert report.nll == pytest.approx(-joint.log_prob(y).mean().item(), rel=1e-9)
    assert report.rmse == pytest.approx((mean - y).square().mean().sqrt().item(), rel=1e-9)
    plain = evaluate(model, loader_of(X, y), likelihood="regression", sigma_noise=0.5)
    normal = torch.distributions.Normal(model(X).detach(), 0.5)
    assert plain.nll == pytest.approx(-normal.log_prob(y).sum(-1).mean().item(), rel=1e-9)
    assert set(plain.coverage) == {0.5, 0.9, 0.95}


def test_mapping_batches(classifier):
    net, X, y = classifier

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, batch):
            return self.net(batch["inputs"])

    model = Wrapper().eval()
    batches = [{"inputs": X, "labels": y}]
    assert evaluate(model, batches, ood_loader=[{"inputs": X}]).ood.auroc == 0.5
    assert evaluate(model, batches).nll == evaluate(net, loader_of(X, y, batch_size=40)).nll
    with pytest.raises(EvaluationError, match="'labels'"):
        evaluate(model, [{"inputs": X, "target": y}])


def test_errors_keep_what_was_finished(classifier):
    model, X, y = classifier
    model.train()
    good = loader_of(X[:16], y[:16])
    complete = evaluate(model, good)
    with pytest.raises(EvaluationError, match=r"'N', 4\], got \[16, 5\]") as caught:
        evaluate(model, good, ood_loader=loader_of(torch.randn(16, 5), y[:16]))
    assert caught.value.partial == complete
    with pytest.raises(EvaluationError, match=r"`ood_loader` failed after 0 data.*empty") as caught:
        evaluate(model, good, ood_loader=[])
    assert caught.value.partial == complete
    labels = y.clone()
    labels[-1] = 3
    with pytest.raises(EvaluationError, match=r"after 32 data.*labels in \[0, 2\]") as caught:
        evaluate(model, loader_of(X, labels))
    assert caught.value.partial == evaluate(model, loader_of(X[:32], y[:32]))
    with pytest.raises(EvaluationError, match="empty loader") as caught:
        evaluate(model, [])
    assert caught.value.partial is None
    assert all(module.training for module in model.modules())


def test_arguments_that_do_not_fit(classifier):
    model, X, y = classifier
    la = UpstreamLaplace(model, "classification", "all", "kron")
    with pytest.raises(ValueError, match="seen no data.*fit"):
        evaluate(la, loader_of(X, y))
    la.fit(loader_of(X, y))
    with pytest.raises(ValueError, match="leave it out"):
        evaluate(la, loader_of(X, y), likelihood="regression")
    with pytest.raises(ValueError, match="got 'ranking'"):
        evaluate(model, loader_of(X, y), likelihood="ranking")
    with pytest.raises(ValueError, match="no `ood_loader` for a regression"):
        evaluate(model, loader_of(X, X), likelihood="regression", ood_loader=loader_of(X))
    with pytest.raises(ValueError, match="CalibrationMetrics"):
        evaluate(lambda x: x, loader_of(X, y))


def test_report_becomes_text_and_json(classifier):
    model, X, y = classifier
    report = evaluate(model, loader_of(X, y), ood_loader=[X])
    loaded = json.loads(report.to_json())
    assert loaded["nll"] == report.nll
    assert loaded["ood"]["auroc"] == report.ood.auroc
    assert loaded["bins"]["count"] == list(report.bins.count)
    for word in ("accuracy", "nll", "ece", "brier", "ood_auroc"):
        assert word in report.table()
    assert str(report) == report.table()
    with pytest.raises(AttributeError):
        report.nll = 0.0
