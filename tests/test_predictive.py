"""The linearised predictive against dense oracles and laplace-torch's own."""

from __future__ import annotations

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

from laplace_debias import jacobian_blocks
from laplace_debias.predictive import StructuredPredictor, linearized_predictive
from tests.cases_predictive import FALLBACK, STRUCTURED
from tests.oracles_predictive import dense_covariance, marginal, random_laplace

EXACT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def build(case, n=5, **kwargs):
    model, shape = case[:2]
    x = torch.randn(n, *shape)
    C = model.eval()(x).shape[1]
    return random_laplace(model.train(), C, **kwargs), x


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
    with pytest.warns(UserWarning, match=f"module {module}\\)"):
        result = linearized_predictive(la, x, [0.3, 2.0])
    expected = torch.stack([marginal(dense_covariance(la, x, d)) for d in (0.3, 2.0)])
    torch.testing.assert_close(result.covariance, expected, **EXACT)
    with pytest.warns(UserWarning):
        joint = linearized_predictive(la, x, 0.3, joint=True).covariance
    torch.testing.assert_close(
        joint, dense_covariance(la, x, 0.3).reshape(joint.shape), **EXACT
    )


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


def fitted(cls=KronLaplace, likelihood="classification", backend=CurvlinopsGGN, **kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 5), nn.Tanh(),
        nn.Linear(5, 3),
    )
    x = torch.randn(24, 1, 8, 8)
    y = torch.randint(3, (24,)) if likelihood == "classification" else torch.randn(24, 3)
    la = cls(model, likelihood, backend=backend, **kwargs)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=12))
    return la, x[:6]


@pytest.mark.parametrize("backend", [CurvlinopsGGN, AsdlGGN])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("prior", [0.7, "layerwise"])
def test_agrees_with_upstream_all_weights(backend, likelihood, prior):
    kwargs = {"sigma_noise": 0.3} if likelihood == "regression" else {"temperature": 0.5}
    la, x = fitted(KronLaplace, likelihood, backend, **kwargs)
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
    la, x = fitted(KronLLLaplace, likelihood)
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
    la, x = fitted()
    expected = linearized_predictive(la, x, [0.1, 10.0], diagonal_output=True).covariance
    la.model.float()
    la.H.eigenvectors = [[Q.float() for Q in Qs] for Qs in la.H.eigenvectors]
    la.H.eigenvalues = [[lam.float() for lam in lams] for lams in la.H.eigenvalues]
    got = linearized_predictive(la, x.float(), [0.1, 10.0], diagonal_output=True).covariance
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=0)


def test_half_precision_is_summed_in_float32():
    la, x = fitted()
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
        monkeypatch.setattr(jacobian_blocks, "CHUNK_NUMEL", numel)
        got = linearized_predictive(
            la, x, [0.1, 2.0, 5.0], diagonal_output=diagonal, memory_budget=budget
        )
        torch.testing.assert_close(got.covariance, expected.covariance, **EXACT)
        torch.testing.assert_close(got.mean, expected.mean, **EXACT)


@pytest.mark.parametrize("cls", [KronLaplace, KronLLLaplace])
@pytest.mark.parametrize("link", ["variance", "covariance", "joint"])
def test_gradients_with_respect_to_the_inputs(cls, link):
    la, x = fitted(cls, "regression", enable_backprop=True)
    x = x[:2].clone()
    options = {"diagonal_output": link == "variance", "joint": link == "joint"}

    def moments(x):
        result = linearized_predictive(la, x, **options)
        return torch.cat([result.mean.flatten(), result.covariance.flatten()])

    directions = torch.randn(2, *x.shape)
    weights = torch.randn(moments(x).shape)
    x.requires_grad_(True)
    (grad,) = torch.autograd.grad((moments(x) * weights).sum(), x)
    for v in directions:
        eps = 1e-6
        with torch.no_grad():
            slope = ((moments(x + eps * v) - moments(x - eps * v)) * weights).sum() / (2 * eps)
        torch.testing.assert_close((grad * v).sum(), slope, rtol=1e-5, atol=1e-7)


def test_no_graph_without_enable_backprop():
    la, x = fitted()
    result = linearized_predictive(la, x.requires_grad_(True))
    assert not result.mean.requires_grad and not result.covariance.requires_grad


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_works_without_gradients_around_it(guard):
    la, x = fitted()
    expected = linearized_predictive(la, x).covariance
    with guard():
        torch.testing.assert_close(linearized_predictive(la, x + 0).covariance, expected)


class DictNet(nn.Module):
    """A network on a mapping of tensors."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, batch):
        """Read the input from the mapping."""
        return self.head(torch.tanh(self.body(batch["input_ids"])))


def test_mappings_as_inputs():
    net = DictNet()
    la = random_laplace(net, 3)
    plain = random_laplace(nn.Sequential(net.body, nn.Tanh(), net.head), 3)
    x = torch.randn(7, 4)
    expected = linearized_predictive(plain, x, [0.5, 1.0])
    for budget in (2**30, 1):
        got = linearized_predictive(
            la, {"input_ids": x, "labels": torch.zeros(7), "n": 3}, [0.5, 1.0],
            memory_budget=budget,
        )
        torch.testing.assert_close(got.covariance, expected.covariance, **EXACT)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails):
    la, x = build(STRUCTURED["batch norm"]())
    model = la.model
    model.train()
    model[1].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    model[0].bias.requires_grad_(False)  # after construction: still a block of la
    state = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    rng = torch.get_rng_state()
    if fails:
        with pytest.raises(RuntimeError):
            linearized_predictive(la, x[:, :, :1])
    else:
        linearized_predictive(la, x)
    assert [m.training for m in model.modules()] == modes
    assert all(not m._forward_hooks for m in model.modules())
    assert not model[0].bias.requires_grad and model[0].weight.requires_grad
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[0].bias.grad is None and model[-1].weight.grad is None
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize("cls", [KronLaplace, KronLLLaplace])
def test_sampled_covariance_converges_to_the_exact_one(cls):
    la, x = fitted(cls)
    exact = linearized_predictive(la, x, [0.5, 5.0])
    errors = []
    for n_samples in (200, 20_000):
        sampled = linearized_predictive(
            la, x, [0.5, 5.0], method="samples", n_samples=n_samples,
            generator=torch.Generator().manual_seed(1),
        )
        torch.testing.assert_close(sampled.mean, exact.mean)
        errors.append((sampled.covariance - exact.covariance).norm() / exact.covariance.norm())
    assert errors[1] < 0.02  # 10 standard errors of a variance from 20,000 samples
    assert errors[1] < errors[0] / 3


@pytest.mark.parametrize("cls", [KronLaplace, KronLLLaplace])
def test_samples_are_jacobian_times_step(cls):
    la, x = fitted(cls)
    predictor = StructuredPredictor(la, [0.5, 5.0])
    f, samples = predictor.samples(x, 3, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    jacobians = la.backend.jacobians if cls is KronLaplace else la.backend.last_layer_jacobians
    Js, _ = jacobians(x)
    eps = torch.stack([torch.randn(la.n_params, generator=generator) for _ in range(3)])
    for delta, got in zip((0.5, 5.0), samples, strict=True):
        la.prior_precision = delta
        steps = la.posterior_precision.bmm(eps, exponent=-0.5)
        expected = f + torch.einsum("ncp,sp->snc", Js, steps)
        torch.testing.assert_close(got, expected, **EXACT)


@pytest.mark.parametrize("cls", [KronLaplace, KronLLLaplace])
def test_samples_follow_the_generator_and_not_the_budget(cls):
    la, x = fitted(cls)
    rng = torch.get_rng_state()
    draws = [
        linearized_predictive(
            la, x, [0.5, 2.0], method="samples", n_samples=9, memory_budget=budget,
            generator=torch.Generator().manual_seed(seed),
        ).covariance
        for seed, budget in [(0, 2**29), (0, 1), (1, 2**29)]
    ]
    torch.testing.assert_close(draws[0], draws[1], **EXACT)
    assert not torch.allclose(draws[0], draws[2])
    assert torch.equal(torch.get_rng_state(), rng)


def test_auto_takes_the_cheaper_way():
    la, x = fitted()
    assert linearized_predictive(la, x, method="auto", n_samples=100).method == "exact"
    assert linearized_predictive(la, x, method="auto", n_samples=2).method == "samples"
    ll, x = fitted(KronLLLaplace)
    assert linearized_predictive(ll, x, method="auto", n_samples=2).method == "exact"


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (-1.0, "positive"),
        (0.0, "positive"),
        (float("nan"), "positive"),
        ([1.0, float("inf")], "positive"),
        (torch.ones(2, 5), "length 1 or 6"),
        ([1.0, torch.ones(2)], "length 1 or 6"),
        (torch.ones(1, 1, 6), "at most 2 dimensions"),
        ([], "at least one"),
        (["a"], "number"),
    ],
)
def test_bad_prior_precisions(prior, message):
    la, x = fitted()
    before = la.prior_precision.clone()
    with pytest.raises(ValueError, match=message):
        linearized_predictive(la, x, prior)
    assert torch.equal(la.prior_precision, before)


def test_bad_arguments():
    la, x = fitted()
    with pytest.raises(ValueError, match="one of"):
        linearized_predictive(la, x, method="fast")
    with pytest.raises(ValueError, match="joint=True alone"):
        linearized_predictive(la, x, joint=True, diagonal_output=True)
    with pytest.raises(ValueError, match="memory budget"):
        linearized_predictive(la, x, memory_budget=0)
    with pytest.raises(ValueError, match="empty batch"):
        linearized_predictive(la, x[:0])
    with pytest.raises(ValueError, match="n_samples"):
        linearized_predictive(la, x, method="samples", n_samples=0)
    with pytest.raises(TypeError, match="KronLaplace"):
        linearized_predictive(la.model, x)
    unfitted = KronLaplace(la.model, "classification")
    with pytest.raises(AttributeError, match="fit"):
        linearized_predictive(unfitted, x)
    with pytest.raises(ValueError, match="n, outputs"):
        linearized_predictive(random_laplace(nn.Sequential(nn.Linear(2, 2)), 2), torch.randn(3, 4, 2))
