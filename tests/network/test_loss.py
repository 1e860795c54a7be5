"""The loss, its Hessian in the outputs, and the vectors whose second moment that is."""

import pytest
import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import nn
from torch.nn import functional as F

from laplace_debias import Laplace, evaluate, linearized_predictive, sweep_prior_precision
from laplace_debias.kfac.engine import kfac_factors
from laplace_debias.network.loss import (
    bernoulli_losses,
    binary_labels,
    curvature_scores,
    label_variances,
    likelihood_name,
    loss_sum,
    mean_loss_hessian,
)
from laplace_debias.network.vectors import (
    backward_vectors,
    bernoulli_vectors,
)
from tests.oracles_predictive import dense_jacobian, dense_precision

LIKELIHOODS = ["classification", "regression"]


def test_scores_are_the_traces_of_the_loss_hessians():
    torch.manual_seed(0)
    logits = 3 * torch.randn(5, 4, dtype=torch.float64)
    for f, score in zip(logits, curvature_scores(logits), strict=True):
        H = torch.autograd.functional.hessian(
            lambda z: nn.functional.cross_entropy(z[None], torch.tensor([1])), f
        )
        torch.testing.assert_close(score, H.trace())
    sure = curvature_scores(torch.tensor([[12.0, 0.0]]))  # single precision would cancel
    p = torch.sigmoid(torch.tensor([-12.0], dtype=torch.float64))
    torch.testing.assert_close(sure, 2 * p * (1 - p), rtol=1e-8, atol=0)


def test_the_mean_hessian_of_a_sure_network_has_no_curvature_along_equal_logits():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(4000, 10, generator=generator)
    outputs[torch.arange(4000), torch.arange(4000) % 10] += 12.0
    H = mean_loss_hessian(outputs, "classification")
    ones = torch.ones(10, dtype=torch.float64)
    # Rounding of numbers up to 1 in double precision, however small H is.
    assert (H @ ones).norm() < 10 * torch.finfo(torch.float64).eps
    assert torch.linalg.matrix_norm(H, 2) < 1e-4


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_mean_hessian_is_the_mean_over_data(likelihood):
    f = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    V = backward_vectors(f, None, likelihood)
    torch.testing.assert_close(
        mean_loss_hessian(f, likelihood), torch.einsum("kni,knj->ij", V, V) / 6
    )


def test_the_loss_by_hand():
    logits = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    expected = torch.log(torch.tensor(2.0)) + torch.log1p(torch.exp(torch.tensor(2.0)))
    torch.testing.assert_close(loss_sum(logits, torch.tensor([0, 1]), "classification"), expected)
    assert loss_sum(torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2), "regression") == 2.5
    assert loss_sum(torch.ones(1, 1).bfloat16(), torch.zeros(1, 1), "regression").dtype == (
        torch.float32
    )


def test_errors_say_what_to_do():
    f = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="`fisher` in .*got 'ggn'"):
        backward_vectors(f, None, "classification", "ggn")
    with pytest.raises(ValueError, match="targets for the empirical Fisher"):
        backward_vectors(f, None, "classification", "empirical")
    with pytest.raises(ValueError, match=r"weights of shape \[2\], got \[3\]"):
        backward_vectors(f, None, "regression", weights=torch.ones(3))
    with pytest.raises(ValueError, match="finite, non-negative"):
        backward_vectors(f, None, "regression", weights=torch.tensor([1.0, -1.0]))
    for bad in ("poisson", None):
        with pytest.raises(ValueError, match="'bernoulli' or 'reward_modeling', got.*Remedy"):
            likelihood_name(bad)


def case(C, n=30, soft=False, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, C)).double()
    x = torch.randn(n, 3).double()
    y = torch.rand(n, C).double() if soft else torch.randint(2, (n, C)).double()
    return model, x, y


def fitted(model, x, y, debias=True, subset="all", **options):
    la = Laplace(model, "bernoulli", subset, "kron", debias=debias, **options)
    half = len(x) // 2
    if debias == "crossfit":
        la.fit([(x[:half], y[:half]), (x[half:], y[half:])], n_data=100)
    else:
        la.fit((x[:half], y[:half]), curvature_loader=(x[half:], y[half:]), n_data=100)
    return la


def hessian(f, y):
    """Second derivatives of the loss of one datum, by autograd."""
    loss = lambda f: F.binary_cross_entropy_with_logits(f, y, reduction="sum")  # noqa: E731
    return torch.autograd.functional.hessian(loss, f)


@pytest.mark.parametrize("soft", [False, True])
def test_the_hessian_and_its_roots(soft):
    torch.manual_seed(0)
    f = 3 * torch.randn(5, 4).double()
    y = torch.rand(5, 4).double() if soft else torch.randint(2, (5, 4)).double()
    H = torch.stack([hessian(f[i], y[i]) for i in range(5)])
    V = backward_vectors(f, y, "bernoulli")
    torch.testing.assert_close(torch.einsum("kni,knj->nij", V, V), H)
    torch.testing.assert_close(mean_loss_hessian(f, "bernoulli"), H.mean(0))
    torch.testing.assert_close(curvature_scores(f, "bernoulli"), H.diagonal(dim1=1, dim2=2).sum(-1))
    gradient = torch.autograd.functional.jacobian(lambda f: bernoulli_losses(f, y).sum(), f)
    torch.testing.assert_close(backward_vectors(f, y, "bernoulli", "empirical")[0], gradient)
    expected = F.binary_cross_entropy_with_logits(f, y, reduction="sum")
    torch.testing.assert_close(loss_sum(f, y, "bernoulli"), expected)
    sure = label_variances(torch.tensor([40.0, -40.0]))
    assert bool((sure > 0).all()) and torch.equal(sure[:1], sure[1:])


@pytest.mark.parametrize("sampler", ["trace", "label"])
def test_sampled_vectors_have_the_hessian_as_second_moment(sampler):
    f = torch.tensor([[0.5, -1.0, 3.0]]).double().expand(100_000, 3)
    v = bernoulli_vectors(f, torch.Generator().manual_seed(0), sampler)
    expected = torch.diag(label_variances(f[0]))
    assert float((v.T @ v / len(v) - expected).abs().max()) < 5e-3


def test_factors_are_sums_over_data_of_the_layers_own():
    model, x, y = case(2, 6, soft=True)
    factors = kfac_factors(model, x, y, likelihood="bernoulli")
    f, h = model(x).detach(), torch.tanh(model[0](x)).detach()
    B = sum(hessian(f[i], y[i]) for i in range(6))
    torch.testing.assert_close(factors.blocks[2], [B, h.T @ h / 6])


@pytest.mark.parametrize("debias", [True, "crossfit"])
@pytest.mark.parametrize(("C", "subset"), [(1, "all"), (3, "all"), (3, "last_layer")])
def test_probabilities_have_the_outputs_shape_and_the_dense_variances(C, subset, debias):
    model, x, y = case(C)
    la = fitted(model, x, y, debias, subset)
    torch.testing.assert_close(la(x[:1]), la(x)[:1])
    f = model(x).detach()
    variance = linearized_predictive(la, x, diagonal_output=True).covariance
    if subset == "all":
        params = list(model.parameters())
        J = dense_jacobian(model, x, params)
        dense = J @ torch.linalg.solve(dense_precision(la, params, 1.0), J.mT)
        torch.testing.assert_close(variance, dense.diagonal(dim1=1, dim2=2))
    probit = torch.sigmoid(f / (1 + torch.pi / 8 * variance).sqrt())
    torch.testing.assert_close(la(x), probit)
    assert la(x).shape == (30, C)
    nodes, weights = map(torch.tensor, hermegauss(60))
    exact = (torch.sigmoid(f[..., None] + variance.sqrt()[..., None] * nodes) * weights).sum(-1)
    exact = exact / weights.sum()
    drawn = la(x, link_approx="mc", n_samples=20_000, generator=torch.Generator().manual_seed(0))
    assert float((drawn - exact).abs().max()) < 0.01
    assert float((probit - exact).abs().max()) < 0.02
    assert la(x, pred_type="nn", link_approx="mc", n_samples=5).shape == (30, C)
    samples = la.predictive_samples(x, n_samples=7)
    assert samples.shape == (7, 30, C) and bool(((samples >= 0) & (samples <= 1)).all())
    if subset == "all":
        la.predictive_method = "samples"
        few = la(x, link_approx="mc", n_samples=4000, generator=torch.Generator().manual_seed(0))
        assert float((few - exact).abs().max()) < 0.03


def test_two_classes_are_the_same_model():
    """A softmax of ``[0, f]`` is a sigmoid of f: same curvature of the layer before, same NLL."""

    class Two(nn.Module):
        def __init__(self, one):
            super().__init__()
            self.one = one

        def forward(self, x):
            f = self.one(x)
            return torch.cat([torch.zeros_like(f), f], -1)

    model, x, y = case(1)
    la = fitted(model, x, y)
    other = Laplace(Two(model), "classification", "all", "kron", debias=True)
    labels = y[:, 0].long()
    other.fit((x[:15], labels[:15]), curvature_loader=(x[15:], labels[15:]), n_data=100)
    torch.testing.assert_close(la.log_marginal_likelihood(), other.log_marginal_likelihood())
    one, two = (linearized_predictive(each, x).covariance for each in (la, other))
    torch.testing.assert_close(one[:, 0, 0], two[:, 1, 1])
    plain = [evaluate(model, [(x, y)], likelihood="bernoulli"), evaluate(Two(model), [(x, labels)])]
    assert plain[0].nll == pytest.approx(plain[1].nll)
    assert plain[0].accuracy == plain[1].accuracy


def test_metrics_count_labels_and_a_sweep_agrees_with_them():
    model, x, y = case(3)
    la = fitted(model, x, y)
    report = evaluate(la, [(x, y)], ood_loader=[x + 5])
    p = la(x)
    nll = F.binary_cross_entropy(p, y)
    assert report.n_data == 90 and report.nll == pytest.approx(float(nll))
    assert report.accuracy == pytest.approx(float(((p > 0.5) == (y > 0.5)).double().mean()))
    sweep = sweep_prior_precision(la, [(x, y)], [1.0, 10.0], metrics=["nll", "brier"])
    assert sweep.values["nll"][0] == pytest.approx(float(nll))
    la.optimize_prior_precision(
        method="gridsearch", val_loader=[(x, y)], grid_size=3, log_prior_prec_min=0,
        log_prior_prec_max=2,
    )  # fmt: skip
    soft = torch.rand(30, 3).double()
    expected = float(F.binary_cross_entropy(la(x), soft))
    assert evaluate(la, [(x, soft)]).nll == pytest.approx(expected)


def test_a_state_and_its_errors():
    model, x, y = case(2)
    la = fitted(model, x, y)
    twin = Laplace(model, "bernoulli", "all", "kron", debias=True)
    twin.load_state_dict(la.state_dict())
    torch.testing.assert_close(twin(x), la(x))
    with pytest.raises(ValueError, match="'probit' or 'mc' with likelihood='bernoulli'"):
        la(x, link_approx="bridge")
    with pytest.raises(ValueError, match=r"Bernoulli targets in \[0, 1\], got values in \[0, 2\]"):
        fitted(model, x, 2 * y)
    with pytest.raises(ValueError, match=r"shape \['m', 2\].*got \[15\].*unsqueeze"):
        fitted(model, x, y[:, 0])
    from laplace.curvature import AsdlGGN

    with pytest.raises(ValueError, match="with likelihood='bernoulli'.*AsdlGGN"):
        fitted(model, x, y, backend=AsdlGGN)


def test_labels_as_classes():
    assert torch.equal(binary_labels(torch.tensor([0, 1])), torch.tensor([0, 1]))
    assert binary_labels(torch.rand(4, 3)).shape == (4, 3, 2)
