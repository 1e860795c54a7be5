"""Evaluation of models and posteriors: as they predict, in log space, and what is left as found."""

import math

import pytest
import torch
from laplace import Laplace as UpstreamLaplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, sweep_prior_precision
from laplace_debias.evaluation.evaluate import EvaluationError, evaluate
from laplace_debias.evaluation.streams import CalibrationMetrics


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
    expected.update(la(X).log(), y)
    expected.update_ood(la(5 * X).log())
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
    with pytest.raises(EvaluationError, match=r"after 32 data.*indices in \[0, 2\]") as caught:
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


def confident(dtype=torch.float32, gap=400.0):
    """A posterior around a network that is sure, and wrong about half of the data."""
    torch.manual_seed(0)
    model = nn.Linear(2, 3).to(dtype)
    with torch.no_grad():
        model.weight.copy_(gap * torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]))
        model.bias.zero_()
    X = torch.randn(24, 2, dtype=dtype)
    y = model(X).detach().topk(2).indices[torch.arange(24), torch.arange(24) % 2]
    la = Laplace(model, "classification", "all", "kron", debias="single")
    la.fit((X, y), n_data=10_000)
    la.prior_precision = 1e6
    return la, X, y


@pytest.mark.parametrize("link", ["probit", "mc", "bridge", "bridge_norm"])
def test_sweep_and_evaluation_say_the_same(link):
    la, X, y = confident()
    options = {"link_approx": link, "n_samples": 20}
    names = ["accuracy", "nll", "ece", "brier", "mean_entropy"]
    torch.manual_seed(3)
    swept = sweep_prior_precision(la, [(X, y)], [1e6], metrics=names, **options)
    torch.manual_seed(3)
    report = evaluate(la, [(X, y)], **options)
    for name in names:
        assert swept.values[name][0] == pytest.approx(getattr(report, name), rel=1e-5), name
    assert math.isfinite(report.nll)


def test_no_clamp_between_the_logits_and_the_nll():
    la, X, y = confident()
    assert (la(X)[torch.arange(24), y] == 0).any()  # probabilities underflow
    f_mean, f_variance = la.functional_variance_fast(X)
    scores = f_mean.double() / (1 + math.pi / 8 * f_variance.double()).sqrt()
    exact = -(scores[torch.arange(24), y] - scores.logsumexp(-1)).mean().item()
    assert exact > 100  # where a clamp of probabilities would say 87 at most
    assert evaluate(la, [(X, y)]).nll == pytest.approx(exact, rel=1e-5)
    plain = evaluate(la.model, [(X, y)]).nll
    assert plain == pytest.approx(nn.functional.cross_entropy(la.model(X), y).item(), rel=1e-5)


def test_sampled_networks_in_log_space():
    la, X, y = confident()
    generators = (torch.Generator().manual_seed(1) for _ in range(2))
    report = evaluate(la, [(X, y)], pred_type="nn", n_samples=5, generator=next(generators))
    again = evaluate(la, [(X, y)], pred_type="nn", n_samples=5, generator=next(generators))
    assert 87 < report.nll < math.inf and report == again


def test_upstream_probabilities_of_zero_are_infinitely_wrong():
    ours, X, y = confident()
    la = UpstreamLaplace(ours.model, "classification", "all", "kron", prior_precision=1e6)
    la.fit(loader_of(X, y))
    assert (la(X)[torch.arange(24), y] == 0).any()
    assert evaluate(la, [(X, y)]).nll == math.inf


def test_nan_predictions_are_an_error_with_a_remedy(classifier):
    model, X, y = classifier

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            return self.net(x) / (x[:, :1] != X[20, 0])  # inf - inf in one row

    with pytest.raises(EvaluationError, match="after 16 data.*NaN.*1 of 16 rows.*Remedy") as caught:
        evaluate(Broken(), loader_of(X, y))
    assert caught.value.partial == evaluate(model, loader_of(X[:16], y[:16]))


@pytest.mark.parametrize("part", ["loader", "ood_loader"])
def test_nan_inputs_are_an_error_with_a_remedy(classifier, part):
    model, X, y = classifier
    broken = X.clone()
    broken[0, 0] = math.nan
    loaders = {"loader": (X, y), "ood_loader": [X]} | {part: [(broken, y)]}
    with pytest.raises(EvaluationError, match=f"`{part}` failed.*finite inputs, got 1.*Remedy"):
        evaluate(model, **loaders)


def test_one_mini_batch_is_enough(classifier):
    model, X, y = classifier
    report = evaluate(model, [(X, y)], ood_loader=[5 * X])
    assert evaluate(model, (X, y), ood_loader=5 * X) == report
    assert evaluate(model, (X, y), ood_loader=(5 * X, y)) == report
    with pytest.raises(EvaluationError, match=r"with targets, got a tensor of shape \[40, 4\]"):
        evaluate(model, [X])


def test_report_is_written_where_it_is_told(classifier, tmp_path):
    model, X, y = classifier
    report = evaluate(model, (X, y))
    text = report.to_json(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text() == text
