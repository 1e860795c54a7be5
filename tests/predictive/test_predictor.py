"""The linearised predictive against dense oracles and laplace-torch's own."""

from __future__ import annotations

import re
import warnings

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from laplace.baselaplace import KronLaplace
from laplace.curvature import AsdlGGN, CurvlinopsGGN
from laplace.lllaplace import KronLLLaplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias.network.preserve import differentiable
from laplace_debias.predictive import contractions
from laplace_debias.predictive import predictor as predictor_module
from laplace_debias.predictive.linearized import linearized_predictive
from laplace_debias.predictive.predictor import StructuredPredictor
from tests.cases_predictive import FALLBACK, STRUCTURED
from tests.fitted_predictive import (
    EXACT,
    build,
    double_precision,  # noqa: F401
    fitted_cnn,
)
from tests.oracles_predictive import (
    dense_covariance,
    marginal,
    random_laplace,
)

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.mark.parametrize("name", STRUCTURED)
def test_every_layer_kind_matches_the_dense_oracle(name):
    la, x = build(STRUCTURED[name]())
    layerwise = torch.rand(len(la.params)) + 0.5
    grid = [0.3, layerwise, 7.0]
    cov = torch.stack([dense_covariance(la, x, delta) for delta in grid])
    blocks = torch.stack([marginal(c) for c in cov])
    n, C = len(x), la.n_outputs
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none of these may fall back
        full = linearized_predictive(la, x, grid)
        diag = linearized_predictive(la, x, grid, diagonal_output=True)
        joint = linearized_predictive(la, x, grid, joint=True)
        one = linearized_predictive(la, x, 0.3)
    torch.testing.assert_close(full.covariance, blocks, **EXACT)
    torch.testing.assert_close(diag.covariance, blocks.diagonal(dim1=-2, dim2=-1), **EXACT)
    torch.testing.assert_close(joint.covariance, cov.reshape(3, n * C, n * C), **EXACT)
    torch.testing.assert_close(one.covariance, blocks[0], **EXACT)
    torch.testing.assert_close(full.mean, la.model.eval()(x))


@pytest.mark.parametrize("name", STRUCTURED)
def test_single_datum(name):
    la, x = build(STRUCTURED[name](), n=1)
    result = linearized_predictive(la, x, 0.3)
    torch.testing.assert_close(result.covariance, marginal(dense_covariance(la, x, 0.3)), **EXACT)


@pytest.mark.parametrize("name", FALLBACK)
def test_what_cannot_be_taken_apart_is_exact_and_warned_about(name):
    model, shape, module = FALLBACK[name]()
    la, x = build((model, shape))
    named = "matrix" if module == "the model itself" else f"{module}."
    with pytest.warns(UserWarning, match=f"exact but slow.*All of them: {re.escape(named)}"):
        result = linearized_predictive(la, x, [0.3, 2.0])
    expected = torch.stack([marginal(dense_covariance(la, x, d)) for d in (0.3, 2.0)])
    torch.testing.assert_close(result.covariance, expected, **EXACT)
    with pytest.warns(UserWarning):
        joint = linearized_predictive(la, x, 0.3, joint=True).covariance
    torch.testing.assert_close(joint, dense_covariance(la, x, 0.3).reshape(joint.shape), **EXACT)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    channels=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    mode=st.sampled_from(["zeros", "circular", "replicate"]),
    hidden=st.lists(st.integers(1, 4), max_size=2),
    outputs=st.integers(1, 4),
    bias=st.booleans(),
    n=st.integers(1, 4),
)
def test_random_architectures(
    seed, channels, kernel, stride, padding, dilation, mode, hidden, outputs, bias, n
):
    torch.manual_seed(seed)
    layers, c, size = [], 2, 7
    for width in channels:
        extent = (kernel - 1) * dilation + 1
        if size + 2 * padding < extent or padding > size:
            break
        groups = 2 if c % 2 == 0 and width % 2 == 0 else 1
        layers += [
            nn.Conv2d(
                c, width, kernel, stride, padding, dilation, groups, bias=bias, padding_mode=mode
            ),
            nn.Tanh(),
        ]
        c, size = width, (size + 2 * padding - extent) // stride + 1
    layers.append(nn.Flatten())
    d = c * size * size
    for width in hidden:
        layers += [nn.Linear(d, width, bias=bias), nn.ReLU()]
        d = width
    model = nn.Sequential(*layers, nn.Linear(d, outputs, bias=bias))
    x = torch.randn(n, 2, 7, 7)
    la = random_laplace(model, outputs, seed=seed)
    expected = marginal(dense_covariance(la, x, 0.4))
    result = linearized_predictive(la, x, [0.4])
    torch.testing.assert_close(result.covariance[0], expected, **EXACT)
    variance = linearized_predictive(la, x, [0.4], diagonal_output=True).covariance[0]
    torch.testing.assert_close(variance, expected.diagonal(dim1=-2, dim2=-1), **EXACT)


@pytest.mark.parametrize("backend", [CurvlinopsGGN, AsdlGGN])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("prior", [0.7, "layerwise"])
def test_agrees_with_upstream_all_weights(backend, likelihood, prior):
    kwargs = {"sigma_noise": 0.3} if likelihood == "regression" else {"temperature": 0.5}
    la, x = fitted_cnn(KronLaplace, likelihood, backend, **kwargs)
    la.prior_precision = torch.rand(len(la.params)) + 0.1 if prior == "layerwise" else prior
    Js, f = la.backend.jacobians(x)
    result = linearized_predictive(la, x)
    torch.testing.assert_close(result.covariance, la.functional_variance(Js), **EXACT)
    torch.testing.assert_close(result.mean, f)
    joint = linearized_predictive(la, x, joint=True)
    torch.testing.assert_close(joint.covariance, la.functional_covariance(Js), **EXACT)


@pytest.mark.parametrize("prior", [0.7, "layerwise"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_agrees_with_upstream_last_layer(likelihood, prior):
    la, x = fitted_cnn(KronLLLaplace, likelihood)
    la.prior_precision = torch.tensor([0.2, 3.0]) if prior == "layerwise" else prior
    Js, f = la.backend.last_layer_jacobians(x)
    expected = la.functional_variance(Js)
    result = linearized_predictive(la, x)
    torch.testing.assert_close(result.covariance, expected, **EXACT)
    torch.testing.assert_close(result.mean, f)
    grid = torch.tensor([[0.2, 3.0], [1.0, 1.0]])
    many = linearized_predictive(la, x, grid, diagonal_output=True).covariance
    for delta, got in zip(grid, many, strict=True):
        la.prior_precision = delta
        variance = la.functional_variance(Js).diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(got, variance, **EXACT)
    joint = linearized_predictive(la, x, joint=True)
    torch.testing.assert_close(joint.covariance, la.functional_covariance(Js), **EXACT)


def test_float32_is_close_to_float64():
    la, x = fitted_cnn()
    expected = linearized_predictive(la, x, [0.1, 10.0], diagonal_output=True).covariance
    la.model.float()
    la.H.eigenvectors = [[Q.float() for Q in Qs] for Qs in la.H.eigenvectors]
    la.H.eigenvalues = [[lam.float() for lam in lams] for lams in la.H.eigenvalues]
    got = linearized_predictive(la, x.float(), [0.1, 10.0], diagonal_output=True).covariance
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=0)


def test_half_precision_is_summed_in_float32():
    la, x = fitted_cnn()
    la.model.bfloat16()
    result = linearized_predictive(la, x.bfloat16(), [0.1, 10.0], diagonal_output=True)
    assert result.covariance.dtype == torch.bfloat16
    assert torch.isfinite(result.covariance).all()
    assert StructuredPredictor(la).deltas.dtype == torch.float32


@pytest.mark.parametrize("name", ["conv", "groups", "tokens", "repeated", "mlp"])
@pytest.mark.parametrize("diagonal", [True, False])
def test_chunks_never_change_a_result(name, diagonal, monkeypatch):
    la, x = build(STRUCTURED[name](), n=7)
    expected = linearized_predictive(la, x, [0.1, 2.0, 5.0], diagonal_output=diagonal)
    for numel, budget in [(1, 1), (200, 30_000)]:
        monkeypatch.setattr(contractions, "CHUNK_NUMEL", numel)
        monkeypatch.setattr(contractions, "TILE_NUMEL", numel)
        got = linearized_predictive(
            la, x, [0.1, 2.0, 5.0], diagonal_output=diagonal, memory_budget=budget
        )
        torch.testing.assert_close(got.covariance, expected.covariance, **EXACT)
        torch.testing.assert_close(got.mean, expected.mean, **EXACT)


@pytest.mark.parametrize("k", [8, 9, 17])
@pytest.mark.parametrize("name", ["conv", "mlp"])
def test_any_number_of_prior_precisions_agrees_with_one_at_a_time(name, k):
    la, x = build(STRUCTURED[name]())
    deltas = torch.logspace(-1, 2, k, dtype=torch.float64)
    for diagonal in (True, False):
        got = linearized_predictive(la, x, deltas, diagonal_output=diagonal).covariance
        assert len(got) == k
        for delta, moments in zip(deltas, got, strict=True):
            want = linearized_predictive(la, x, float(delta), diagonal_output=diagonal).covariance
            torch.testing.assert_close(moments, want, **EXACT)


def test_sampled_variances_are_the_diagonal_of_sampled_covariances():
    la, x = fitted_cnn()
    one, two = (
        linearized_predictive(
            la, x, [0.5, 5.0], method="samples", n_samples=9, diagonal_output=diagonal,
            generator=torch.Generator().manual_seed(0),
        ).covariance
        for diagonal in (True, False)
    )  # fmt: skip
    torch.testing.assert_close(one, two.diagonal(dim1=-2, dim2=-1), **EXACT)


@pytest.mark.parametrize("n_at_once", [1, 2, 3])
def test_chunks_stay_within_the_memory_budget(n_at_once):
    la, x = fitted_cnn()
    predictor = StructuredPredictor(la, [0.5])
    with differentiable(la.model, predictor.params):
        held, per_output = predictor._layers.prepare(x)
        budget = n_at_once * (held + la.n_outputs * per_output)
    sizes = []
    predictor = StructuredPredictor(la, [0.5], budget)
    handle = la.model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    predictor(x)
    sizes.clear()  # of what looks at a few data first
    predictor(x)
    handle.remove()
    assert sizes == [n_at_once] * (6 // n_at_once)


@pytest.mark.parametrize(("C", "diagonal", "way"), [
    (133, False, "exact"), (134, False, "samples"), (200, True, "exact"), (201, True, "samples"),
])  # fmt: skip
def test_samples_are_preferred_where_they_cost_a_fifth(C, diagonal, way, monkeypatch):
    """Two priors: 4 C + k C passes (4 C for diagonals) against five times 4 k for 20 samples."""
    la, x = fitted_cnn()
    predictor = StructuredPredictor(la, [0.5, 5.0])
    monkeypatch.setattr(predictor._layers, "n_outputs", lambda x: (C, C))
    monkeypatch.setattr(la, "likelihood", "regression")  # has no top classes
    assert predictor.chosen_method(x, 20, diagonal) == way


def test_posteriors_of_laplace_torch_are_checked_as_ours_are():
    """They have no switch: what reorders its data is refused."""

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x[x[:, 0].argsort()])

    for cls in (KronLaplace, KronLLLaplace):
        torch.manual_seed(0)
        la = cls(Sorted(), "classification")
        data = TensorDataset(torch.randn(6, 3), torch.arange(6) % 2)
        la.fit(DataLoader(data, batch_size=6))
        with pytest.raises(ValueError, match="do not follow the order of the data"):
            linearized_predictive(la, torch.randn(4, 3))


def test_that_another_method_is_taken_is_said_once(monkeypatch):
    la, x = build(STRUCTURED["mlp"]())
    monkeypatch.setattr(predictor_module, "cheapest_method", lambda *args, **kwargs: "samples")
    predictor = StructuredPredictor(la)
    with pytest.warns(UserWarning, match="take method='samples'.*'exact'"):
        assert predictor.chosen_method(x, 5, True) == "samples"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert predictor.chosen_method(x, 5, True) == "samples"
