"""The debiased posterior against dense oracles, the paper's identities and laplace-torch."""

from __future__ import annotations

import laplace
import pytest
import torch
from laplace.curvature import AsdlEF, AsdlGGN, BackPackGGN, CurvlinopsEF, CurvlinopsGGN

from laplace_debias import DebiasedKronLaplace, DebiasedKronLLLaplace, Laplace
from laplace_debias.kfac.backend import HookEF, HookGGN
from tests import cases, oracles
from tests.cases import loader

BACKENDS = [HookGGN, HookEF, AsdlGGN, CurvlinopsGGN, AsdlEF, CurvlinopsEF, BackPackGGN]
EF = (HookEF, AsdlEF, CurvlinopsEF)
N = 500


# BackPACK takes whole Sequential networks only, and has other blocks for convolutions
PAIRS = [
    pytest.param(case, backend, id=f"{case.name}-{backend.__name__}")
    for case in cases.CASES
    for backend in BACKENDS
    if backend is not BackPackGGN or case in (cases.MLP, cases.MLP_REGRESSION)
]


def precision(la):
    """The posterior precision without its prior, dense."""
    return la.posterior_precision.to_matrix() - torch.eye(la.n_params)


def fitted(case, backend=None, n1=30, n2=40, n_data=N, debias=True, **kwargs):
    """A posterior with directions from n1 and curvatures from n2 data, and these data."""
    model, first, second = case.model(), case.data(n1, 1), case.data(n2, 2)
    la = Laplace(model, case.likelihood, "all", "kron", debias=debias, backend=backend, **kwargs)
    if debias == "single":
        la.fit(first, n_data=n_data)
    else:
        la.fit(first, curvature_loader=second, n_data=n_data)
    return la, first, second


@pytest.mark.parametrize(("case", "backend"), PAIRS)
def test_equals_dense_oracle(case, backend):
    la, first, second = fitted(case, backend)
    fisher = "ef" if backend in EF else "ggn"
    K1 = oracles.kfac(case.model(), *first, case.likelihood, fisher)
    K2 = oracles.kfac(case.model(), *second, case.likelihood, fisher)
    expected = oracles.debiased(K1, K2, N / 40)
    torch.testing.assert_close(precision(la), expected, rtol=1e-9, atol=1e-9 * expected.max())


@pytest.mark.parametrize("case", [cases.DILATED, cases.GROUPED, cases.SAME], ids=lambda c: c.name)
def test_default_backend_takes_what_asdl_refuses(case):
    la, *_ = fitted(case)
    other, *_ = fitted(case, CurvlinopsGGN)
    torch.testing.assert_close(precision(la), precision(other), rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="convolutions .* AsdlGGN.* Remedy: leave `backend`"):
        fitted(case, AsdlGGN)


@pytest.mark.parametrize("case", [cases.CONV1D, cases.CONV3D], ids=lambda c: c.name)
def test_default_backend_takes_other_convolutions(case):
    la, (X, _), _ = fitted(case)
    with pytest.warns(UserWarning, match="exact but slow"):
        assert la(X[:3]).shape == (3, 4)
    with pytest.raises(ValueError, match="Conv2d or Linear.*got trainable parameters in '0'"):
        fitted(case, CurvlinopsGGN)


def test_default_backend_is_our_own():
    assert fitted(cases.MLP)[0]._backend_cls is HookGGN


def test_tokens_agree_across_backends():
    """ASDL sums the input factor over positions; both must come out as a mean."""
    one, *_ = fitted(cases.TOKENS, AsdlGGN)
    other, *_ = fitted(cases.TOKENS, CurvlinopsGGN)
    torch.testing.assert_close(precision(one), precision(other), rtol=1e-9, atol=1e-10)


def test_curvature_along_every_direction_is_that_of_the_second_batch():
    la, _, second = fitted(cases.CNN)
    K2 = oracles.dense(oracles.kfac(cases.CNN.model(), *second, "classification"), N / 40)
    columns = torch.block_diag(
        *[torch.kron(*Q) if len(Q) == 2 else Q[0] for Q in la.H.eigenvectors]
    )
    along = torch.einsum("pi,pq,qi->i", columns, K2, columns)
    ours = torch.einsum("pi,pq,qi->i", columns, precision(la), columns)
    torch.testing.assert_close(ours, along, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(precision(la).trace(), K2.trace())


@pytest.mark.parametrize("case", [cases.MLP, cases.CNN_REGRESSION], ids=lambda c: c.name)
@pytest.mark.parametrize("backend", [AsdlGGN, CurvlinopsGGN], ids=lambda b: b.__name__)
def test_same_data_twice_is_upstreams_kron(case, backend):
    X, y = case.data(24)
    upstream = laplace.Laplace(case.model(), case.likelihood, "all", "kron", backend=backend)
    upstream.fit(loader(X, y))
    ours = Laplace(case.model(), case.likelihood, "all", "kron", debias=True, backend=backend)
    ours.fit((X, y), curvature_loader=(X, y), n_data=24)
    single = Laplace(case.model(), case.likelihood, "all", "kron", debias="single", backend=backend)
    single.fit(loader(X, y, 7))
    for la in (ours, single):
        torch.testing.assert_close(precision(la), precision(upstream), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(la.log_marginal_likelihood(), upstream.log_marginal_likelihood())


@pytest.mark.parametrize("case", [cases.MLP, cases.MLP_REGRESSION], ids=lambda c: c.name)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.__name__)
def test_last_layer_equals_dense_oracle(case, backend):
    first, second = case.data(30, 1), case.data(40, 2)
    la = Laplace(case.model(), case.likelihood, debias=True, backend=backend)
    la.fit(first, curvature_loader=second, n_data=N)
    fisher = "ef" if backend in EF else "ggn"
    last = {"2.weight", "2.bias"}
    K1, K2 = (oracles.kfac(case.model(), *d, case.likelihood, fisher) for d in (first, second))
    K1, K2 = ({n: block for n, block in K.items() if n in last} for K in (K1, K2))
    expected = oracles.debiased(K1, K2, N / 40)
    torch.testing.assert_close(precision(la), expected, rtol=1e-9, atol=1e-9 * expected.max())
    assert type(la) is DebiasedKronLLLaplace


def test_one_loader_uses_its_first_two_batches():
    X, y = cases.MLP.data(40)
    batches = [(X[:15], y[:15]), (X[15:25], y[15:25]), (X[25:], y[25:])]
    one = Laplace(cases.MLP.model(), "classification", "all", "kron", debias=True)
    one.fit(batches, n_data=40)
    two = Laplace(cases.MLP.model(), "classification", "all", "kron", debias=True)
    two.fit([batches[0]], curvature_loader=[batches[1]], n_data=40)
    torch.testing.assert_close(precision(one), precision(two), rtol=0, atol=0)


@pytest.mark.parametrize("case", [cases.CNN, cases.MLP_REGRESSION], ids=lambda c: c.name)
def test_mini_batches_of_a_role_accumulate(case):
    """Unequal mini-batches give what their union gives, for weights, biases and the loss."""
    la, (X1, y1), (X2, y2) = fitted(case)
    parts = Laplace(case.model(), case.likelihood, "all", "kron", debias=True)
    parts.fit(
        [(X1[:7], y1[:7]), (X1[7:], y1[7:])],
        curvature_loader=[(X2[:1], y2[:1]), (X2[1:30], y2[1:30]), (X2[30:], y2[30:])],
        n_data=N,
    )
    torch.testing.assert_close(precision(parts), precision(la), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(parts.loss, la.loss)


@pytest.mark.parametrize("debias", [True, "single"])
def test_scales_with_n_exactly_once(debias):
    one, *_ = fitted(cases.CNN, n_data=100, debias=debias)
    ten, *_ = fitted(cases.CNN, n_data=1000, debias=debias)
    torch.testing.assert_close(10 * precision(one), precision(ten), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(10 * one.loss, ten.loss)


def test_loss_is_that_of_the_whole_training_set():
    la, (X1, y1), (X2, y2) = fitted(cases.MLP_REGRESSION)
    model = cases.MLP_REGRESSION.model()
    squares = sum(((model(X) - y) ** 2).sum() for X, y in ((X1, y1), (X2, y2)))
    torch.testing.assert_close(la.loss, 0.5 * squares.detach() * N / 70)


def test_override_false_adds_per_role():
    """Fitting on two halves of each role, one after the other, equals fitting on both at once."""
    case = cases.CNN
    (X1, y1), (X2, y2) = case.data(30, 1), case.data(40, 2)
    online = Laplace(case.model(), case.likelihood, "all", "kron", debias=True)
    online.fit((X1[:15], y1[:15]), override=False, curvature_loader=(X2[:20], y2[:20]), n_data=100)
    online.fit((X1[15:], y1[15:]), override=False, curvature_loader=(X2[20:], y2[20:]), n_data=100)
    at_once = Laplace(case.model(), case.likelihood, "all", "kron", debias=True)
    at_once.fit((X1, y1), curvature_loader=(X2, y2), n_data=200)
    assert online.n_data == 200
    torch.testing.assert_close(precision(online), precision(at_once), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(online.loss, at_once.loss)


def test_override_false_needs_factors_that_an_earlier_fit_kept():
    case = cases.MLP
    la = Laplace(case.model(), case.likelihood, "all", "kron", debias=True)
    la.fit(case.data(9, 1), curvature_loader=case.data(9, 2), n_data=50)
    assert la._fitted.curvatures == []
    before = precision(la)
    with pytest.raises(ValueError, match="every fit with `override=False`, the first as well"):
        la.fit(case.data(9, 3), override=False, curvature_loader=case.data(9, 4), n_data=50)
    assert torch.equal(precision(la), before) and la.n_data == 50


def test_override_false_weights_each_fit_by_its_n():
    """Upstream's rule for two fits on whole sets, reproduced by debias='single'."""
    case, (X1, y1), (X2, y2) = cases.MLP, cases.MLP.data(20, 1), cases.MLP.data(30, 2)
    upstream = laplace.Laplace(case.model(), case.likelihood, "all", "kron", backend=CurvlinopsGGN)
    ours = Laplace(case.model(), case.likelihood, "all", "kron", debias="single")
    for la in (upstream, ours):
        la.fit(loader(X1, y1))
        la.fit(loader(X2, y2), override=False)
    torch.testing.assert_close(precision(ours), precision(upstream), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(ours.log_marginal_likelihood(), upstream.log_marginal_likelihood())


def test_last_layer_refuses_override_false():
    la = Laplace(cases.MLP.model(), "classification", debias=True)
    with pytest.raises(ValueError, match="override=True"):
        la.fit([cases.MLP.data(5), cases.MLP.data(5)], override=False, n_data=10)


def test_dict_batches():
    case = cases.MLP
    (X1, y1), (X2, y2) = case.data(30, 1), case.data(40, 2)
    reference, *_ = fitted(case)
    model = cases.seeded(cases.Dict).double()
    model.body.load_state_dict(case.model().state_dict())
    la = Laplace(
        model, "classification", "all", "kron", debias=True, dict_key_x="x", dict_key_y="y"
    )
    la.fit([{"x": X1, "y": y1}, {"x": X2, "y": y2}], n_data=N)
    torch.testing.assert_close(precision(la), precision(reference))
    torch.testing.assert_close(la({"x": X1}), reference(X1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_half_precision_models(dtype, subset):
    case = cases.MLP
    (X1, y1), (X2, y2) = case.data(30, 1), case.data(40, 2)
    half = case.model().to(dtype)
    la = Laplace(half, "classification", subset, "kron", debias=True)
    la.fit((X1.to(dtype), y1), curvature_loader=(X2.to(dtype), y2), n_data=N)
    reference = Laplace(half.double(), "classification", subset, "kron", debias=True)
    X1r, X2r = X1.to(dtype).double(), X2.to(dtype).double()
    reference.fit((X1r, y1), curvature_loader=(X2r, y2), n_data=N)
    half.to(dtype)
    assert all(Q.dtype == dtype for block in la.H.eigenvectors for Q in block)
    expected = precision(reference).to(torch.float64)
    error = (precision(la).to(torch.float64) - expected).norm() / expected.norm()
    assert error < 8 * torch.finfo(dtype).eps
    probs = la(X1[:4].to(dtype))
    assert probs.dtype == dtype and torch.isfinite(probs).all()


def test_same_loader_twice_warns():
    data = loader(*cases.MLP.data(20), 10)
    la = Laplace(cases.MLP.model(), "classification", "all", "kron", debias=True)
    with pytest.warns(UserWarning, match="plain K-FAC"):
        la.fit(data, curvature_loader=data)


def test_classes_have_keys_of_their_own():
    for subset, cls in (("all", DebiasedKronLaplace), ("last_layer", DebiasedKronLLLaplace)):
        la = laplace.Laplace(cases.MLP.model(), "classification", subset, "kron_debiased")
        assert type(la) is cls and la.debias == "two-batch"
