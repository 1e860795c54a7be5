"""Tokens and pixels: posteriors, predictions and marginal likelihoods against dense oracles."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from laplace_debias import Laplace, compare, evaluate, sweep_prior_precision
from laplace_debias.debias.fold_blocks import crossfit_kron
from laplace_debias.evaluation import uncertainty
from laplace_debias.kfac.factors import Factors
from tests import oracles
from tests import oracles_positions as oracle

N, C = 50, 3
PRECISE = {"rtol": 1e-10, "atol": 1e-10}


class Tokens(nn.Module):
    """Mixes tokens (each sees the mean of all), so that positions are not independent."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(3, 4), nn.Linear(4, C)

    def forward(self, x):
        """Logits ``[n, T, C]``."""
        h = torch.tanh(self.inner(x))
        return self.out(h + h.mean(1, keepdim=True))


class Pixels(nn.Module):
    """Two convolutions, the first of which sees its neighbours."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, C, 1)

    def forward(self, x):
        """Logits ``[n, C, H, W]``."""
        return self.out(torch.tanh(self.inner(x)))


def case(kind, ignored=True, n=8):
    """A network and data; a third of the labels do not count, and one datum has none that do."""
    torch.manual_seed(0)
    net = (Tokens() if kind == "tokens" else Pixels()).double()
    shape = (5, 3) if kind == "tokens" else (2, 3, 4)
    X = torch.randn(n, *shape, dtype=torch.float64)
    y = torch.randint(C, (n, 5) if kind == "tokens" else (n, 3, 4))
    if ignored:
        y[torch.rand(y.shape) < 0.33] = -100
        y[1] = -100
    return net, X, y


def precision_of(net, X, y, debias, delta, n=4):
    """Dense precision of the posterior of N data, from some of them."""
    K1 = oracle.kfac(net, X[:n], y[:n])
    P = sum(p.numel() for p in net.parameters())
    if debias == "single":
        K, seen = oracles.dense(K1, N / n), n
    else:
        K2 = oracle.kfac(net, X[n:], y[n:])
        K, seen = oracles.debiased(K1, K2, N / n), len(X)
    loss = sum(oracle.loss_of(net(x[None])[0], t) for x, t in zip(X[:seen], y[:seen], strict=True))
    return K + delta * torch.eye(P, dtype=torch.float64), N / seen * loss.detach()


def fitted(net, X, y, debias, **options):
    la = Laplace(net, "classification", "all", "kron", debias=debias, fisher="exact", **options)
    if debias == "single":
        la.fit((X[:4], y[:4]), n_data=N)
    else:
        la.fit((X[:4], y[:4]), curvature_loader=(X[4:], y[4:]), n_data=N)
    return la


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("debias", ["single", True])
@pytest.mark.parametrize("kind", ["tokens", "pixels"])
def test_variances_loss_and_evidence_equal_a_dense_posterior(kind, debias, ignored):
    net, X, y = case(kind, ignored)
    la = fitted(net, X, y, debias, prior_precision=0.5)
    precision, loss = precision_of(net, X, y, debias, 0.5)
    torch.testing.assert_close(la.loss, loss, **PRECISE)
    expected = oracle.covariances(net, X, precision, C).reshape(*y.shape, C, C)
    mean, covariance = la.output_moments(X)
    f = net(X).detach()
    torch.testing.assert_close(mean, f if kind == "tokens" else f.movedim(1, -1))
    torch.testing.assert_close(covariance, expected, **PRECISE)
    variance = la.output_moments(X, diagonal_output=True)[1]
    torch.testing.assert_close(variance, expected.diagonal(dim1=-2, dim2=-1), **PRECISE)
    theta = torch.cat([p.detach().flatten() for p in net.parameters()])
    evidence = -loss - 0.5 * (
        torch.logdet(precision) - len(theta) * torch.log(torch.tensor(0.5).double())
    )
    evidence = evidence - 0.5 * 0.5 * theta.square().sum()
    torch.testing.assert_close(la.log_marginal_likelihood(), evidence, **PRECISE)
    probit = mean / torch.sqrt(1 + torch.pi / 8 * variance)
    probs = probit.softmax(-1)
    expected = probs if kind == "tokens" else probs.movedim(-1, 1)
    torch.testing.assert_close(la(X), expected)
    assert la(X).shape == net(X).shape == la.log_probabilities(X).shape


def test_the_scale_is_that_of_the_full_gauss_newton_matrix():
    """With the same row at every position K-FAC's one layer is exact, so the scale shows."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, C, bias=False)).double()
    X = torch.tensor([1.0, -2.0]).double().expand(4, 5, 2)
    y = torch.randint(C, (4, 5))
    y[:, 3:] = -100
    la = Laplace(net, "classification", "all", "kron", debias="single")
    la.fit((X, y), n_data=N)  # the only layer is at the output: nothing is sampled
    G = N / 4 * oracle.ggn(net, X, y)
    expected = oracle.covariances(net, X, G + torch.eye(6), C)
    torch.testing.assert_close(la.output_moments(X)[1], expected, **PRECISE)
    torch.testing.assert_close(la.H.to_matrix(), G, **PRECISE)
    for wrong in (5 / 3, 1 / 3, 3):  # all positions count; a mean over them; N counts them
        assert not torch.allclose(la.H.to_matrix(), wrong * G, rtol=0.1)


@pytest.mark.parametrize("kind", ["tokens", "pixels"])
def test_crossfit_folds_equal_dense_factors(kind):
    net, X, y = case(kind, n=8)
    la = Laplace(net, "classification", "all", "kron", debias="crossfit", n_folds=2, fisher="exact")
    la.fit([(X[:4], y[:4]), (X[4:], y[4:])], n_data=N)
    folds = []
    for at in (slice(0, 4), slice(4, 8)):
        blocks = oracle.kfac(net, X[at], y[at])
        folds.append(Factors.from_blocks(list(blocks), list(blocks.values()), 4, C))
    expected = crossfit_kron(folds, n_data=N).decomposed(torch.float64)
    torch.testing.assert_close(la.H.to_matrix(), expected.to_matrix(), **PRECISE)


@pytest.mark.parametrize("kind", ["tokens", "pixels"])
def test_sampled_vectors_are_the_default_and_unbiased(kind):
    net, X, y = case(kind, n=4)
    exact = fitted(net, X, y, "single")
    la = Laplace(
        net, "classification", "all", "kron", debias="single",
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="positions are sampled, one backward pass per datum"):
        la.fit((X, y), n_data=N)
    assert la.fit_cost.backward == 4
    many = [(X.repeat(500, *[1] * (X.ndim - 1)), y.repeat(500, *[1] * (y.ndim - 1)))]
    la.fit(many * 4, n_data=8000)  # 2,000 draws for each datum
    mean, B = la.H_facs.kfacs[0][0] / 2000, exact.H_facs.kfacs[0][0] * 4 / N
    assert float((mean - B).norm() / B.norm()) < 0.05


def test_last_layer_of_tokens_is_exact():
    net, X, y = case("tokens")
    la = Laplace(net, "classification", "last_layer", "kron", debias="single", prior_precision=0.5)
    la.fit((X[:4], y[:4]), n_data=N)
    assert la.fit_cost.backward == 0
    both = oracle.kfac(net, X[:4], y[:4])
    K = oracles.dense({k: v for k, v in both.items() if k.startswith("out")}, N / 4)
    J = torch.stack([oracle.jacobian(net, x)[:, -15:] for x in X])  # [n, F, P]
    S = J @ torch.linalg.inv(K + 0.5 * torch.eye(15)) @ J.mT
    S = S.reshape(8, 5, C, 5, C)
    expected = torch.stack([S[:, t, :, t] for t in range(5)], dim=1)
    torch.testing.assert_close(la.output_moments(X)[1], expected, **PRECISE)
    assert la(X).shape == (8, 5, C)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_predictions_by_samples_agree_with_the_exact_ones(subset):
    net, X, y = case("tokens")
    la = Laplace(net, "classification", subset, "kron", debias="single", fisher="exact")
    la.fit((X[:4], y[:4]), n_data=N)
    exact = la.output_moments(X)[1]
    generator = torch.Generator().manual_seed(0)
    sampled = la.predictor().sampled(X, 4000, generator).covariance
    assert float((sampled - exact).norm() / exact.norm()) < 0.06
    small = copy.copy(la)
    small.memory_budget = 1  # one sample, one datum at a time
    generator.manual_seed(1)
    one = small.predictor().sampled(X, 3, generator).covariance
    generator.manual_seed(1)
    torch.testing.assert_close(one, la.predictor().sampled(X, 3, generator).covariance)
    p = la(X)
    for options in ({"link_approx": "mc"}, {"pred_type": "nn", "link_approx": "mc"}):
        other = la(X, n_samples=2000, generator=generator, **options)
        assert other.shape == p.shape and float((other - p).abs().mean()) < 0.03


@pytest.mark.parametrize("kind", ["tokens", "pixels"])
def test_a_small_memory_budget_cuts_data_and_positions(kind):
    net, X, y = case(kind)
    la = fitted(net, X, y, "single")
    whole = [la.output_moments(X, diagonal_output=diagonal)[1] for diagonal in (False, True)]
    la.memory_budget = 2000
    for diagonal, expected in zip((False, True), whole, strict=True):
        cut = la.output_moments(X, diagonal_output=diagonal)[1]
        torch.testing.assert_close(cut, expected, **PRECISE)


@pytest.mark.parametrize("kind", ["tokens", "pixels"])
def test_metrics_count_the_positions_that_count(kind):
    net, X, y = case(kind)
    la = fitted(net, X, y, "single")
    keep = y != -100
    p = la(X)
    rows = (p if kind == "tokens" else p.movedim(1, -1))[keep]
    nll = F.nll_loss(rows.log(), y[keep]).item()
    report = evaluate(la, [(X[:3], y[:3]), (X[3:], y[3:])], ood_loader=(X + 1, y))
    assert report.n_data == report.ood.n_data == int(keep.sum())
    assert report.nll == pytest.approx(nll)
    grid = sweep_prior_precision(la, [(X[:3], y[:3]), (X[3:], y[3:])], [1.0, 10.0])
    assert grid.n_data == int(keep.sum()) and grid.values["nll"][0] == pytest.approx(nll)
    tuned = la.tune((X, y), prior_precisions=[1.0, 10.0], logit_temperatures=[1.0])
    assert tuned.n_data == int(keep.sum()) and tuned.values[0][0] == pytest.approx(nll)
    plain = evaluate(net, (X, y))
    assert plain.n_data == int(keep.sum())
    f = net(X).detach()
    rows = (f if kind == "tokens" else f.movedim(1, -1))[keep]
    assert plain.nll == pytest.approx(F.cross_entropy(rows, y[keep]).item())
    assert tuned.plain[0] == pytest.approx(plain.nll)


def test_compare_counts_positions():
    net, X, y = case("tokens", n=12)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y), batch_size=4)
    result = compare(
        net, loader, (X, y), budgets=(4,), n_draws=1, prior_precisions=[1.0], val_loader=(X, y),
        baselines=("temperature", "last-layer", "prior-only"), laplace={"fisher": "exact"},
    )  # fmt: skip
    rows = {row.method: row.metrics for row in result.rows}
    assert rows["plain"]["nll"] == pytest.approx(evaluate(net, (X, y)).nll)
    la = Laplace(net, "classification", "all", "kron", debias="single", fisher="exact")
    la.fit((X, y), n_data=12)
    assert rows["full"]["nll"] == pytest.approx(evaluate(la, (X, y)).nll)
    assert rows["temperature"]["nll"] <= rows["plain"]["nll"]


def test_uncertainty_is_a_map():
    net, X, y = case("pixels")
    la = fitted(net, X, y, "single")
    found = uncertainty(la, X, n_samples=50)
    assert found.total.shape == found.epistemic.shape == (8, 3, 4)
    entropy = -(la(X) * la(X).log()).sum(1)
    assert float((found.total - entropy).abs().mean()) < 0.05


def test_ignore_index_is_the_users():
    net, X, y = case("tokens")
    renamed = y.where(y != -100, 2)
    one = fitted(net, X, renamed, "single", ignore_index=2)
    two = fitted(net, X, renamed.where(renamed != 2, -100), "single")
    torch.testing.assert_close(one.H.to_matrix(), two.H.to_matrix())
    with pytest.raises(ValueError, match=r"or -100 where a position does not count.*ignore_index="):
        fitted(net, X, y.where(y != -100, -1), "single")
    with pytest.raises(ValueError, match="whole number"):
        Laplace(net, "classification", "all", "kron", debias=True, ignore_index=None)


def test_class_weights_and_smoothing_of_positions():
    net, X, y = case("tokens")
    w = torch.tensor([0.5, 1.0, 4.0]).double()
    options = {"class_weights": w, "label_smoothing": 0.1}
    la = fitted(net, X, y, "single", **options)
    loss = {"weight": w, "label_smoothing": 0.1}
    K = oracles.dense(oracle.kfac(net, X[:4], y[:4], **loss), N / 4)
    torch.testing.assert_close(la.H.to_matrix(), K, rtol=1e-6, atol=1e-6)
    pairs = zip(X[:4], y[:4], strict=True)
    total = sum(oracle.loss_of(net(x[None])[0], t, **loss) for x, t in pairs).detach()
    torch.testing.assert_close(la.loss, N / 4 * total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"debias": "auto"}, "draw data by their curvature"),
        ({"debias": "crossfit", "sampling": "curvature"}, "sampling='uniform'"),
        ({"debias": "single", "fisher": "empirical"}, "'exact' or 'mc' for one categorical"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options, message):
    net, X, y = case("tokens", n=16)
    la = Laplace(net, "classification", "all", "kron", **options)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(X, y), batch_size=4, shuffle=True
    )
    with pytest.raises(ValueError, match=message):
        la.fit(loader)


def test_functional_samples_of_positions_are_refused_by_name():
    net, X, y = case("pixels")
    la = fitted(net, X, y, "single")
    for samples in (la.functional_samples, la.predictive_samples):
        with pytest.raises(ValueError, match="draws all positions together"):
            samples(X)
    _, drawn = la.predictor().samples(X, 5)
    assert drawn.shape == (1, 5, 8, 3, 4, C)


def test_other_likelihoods_and_backends_are_refused_by_name():
    from laplace.curvature.curvlinops import CurvlinopsGGN

    net, X, y = case("tokens")
    with pytest.raises(ValueError, match=r"with likelihood='regression'.*f\.flatten\(1\)"):
        Laplace(net, "regression", "all", "kron", debias="single").fit((X, net(X)), n_data=N)
    la = Laplace(net, "classification", "all", "kron", debias="single", backend=CurvlinopsGGN)
    with pytest.raises(ValueError, match="it knows no positions"):
        la.fit((X, y), n_data=N)
    with pytest.raises(ValueError, match=r"\[n, T, C\], or \[n, C, H, W\]"):
        fitted(*case("pixels")[:2], torch.zeros(8, 2, 3).long(), "single")
