"""The quadratic against dense matrices, its averages over a partition, and its manners."""

import copy

import pytest
import torch
from torch import nn

from laplace_debias.data.chunks import Chunks
from laplace_debias.quadratics import Quadratic, partition
from tests.oracles_quadratics import dense_ggn, dense_hessian, dense_kfac, flat_loss, orthonormal

DENSE = {"ggn": dense_ggn, "hessian": dense_hessian}


def make_classifier(dtype=torch.float64, n=24):
    g = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64).to(dtype))
    X = torch.randn(n, 4, generator=g, dtype=torch.float64).to(dtype)
    return model, nn.CrossEntropyLoss(), X, torch.randint(3, (n,), generator=g)


def make_regressor():
    g = torch.Generator().manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 2)
    ).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64))
    X = torch.randn(12, 1, 6, 6, generator=g, dtype=torch.float64)
    return model, nn.MSELoss(), X, torch.randn(12, 2, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
@pytest.mark.parametrize("make", [make_classifier, make_regressor])
@pytest.mark.parametrize("biases", [True, False])
def test_matches_dense_matrices(curvature, make, biases):
    model, loss, X, y = make()
    options = {"l2": 0.3, "regularize_biases": biases}
    q = Quadratic(model, loss, (X, y), curvature=curvature, chunk_size=5, max_columns=7, **options)
    H = DENSE[curvature](model, loss, X, y, **options)
    value, _, theta, _ = flat_loss(model, loss, X, y, **options)
    g = torch.func.grad(value)(theta)
    close = {"rtol": 1e-10, "atol": 1e-12}
    assert torch.allclose(q @ torch.eye(len(theta)).double(), H, **close)
    assert torch.allclose(q.gradient, g, **close)
    assert torch.allclose(q.constant, value(theta), **close)

    D = orthonormal(len(theta), 6)
    at = theta + D[:, 0] - 2 * D[:, 3]
    assert torch.allclose(q.curvatures(D), (D * (H @ D)).sum(0), **close)
    assert torch.allclose(q.gram(D), D.T @ H @ D, **close)
    assert torch.allclose(q.slopes(D), D.T @ g, **close)
    assert torch.allclose(q.slopes(D, at), D.T @ (H @ (at - theta) + g), **close)
    x = at - theta
    assert torch.allclose(q.value(at), 0.5 * x @ H @ x + x @ g + value(theta), **close)
    many = torch.stack([theta, at], 1)
    assert torch.allclose(q.value(many), torch.stack([value(theta), q.value(at)]), **close)


def test_kfac_matches_dense_factors():
    model, loss, X, y = make_classifier()
    q = Quadratic(model, loss, (X, y), curvature="kfac", chunk_size=7)
    eye = torch.eye(q.shape[0]).double()
    assert torch.allclose(q @ eye, dense_kfac(model, X), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_partition_averages_are_full_batch_values(curvature, dtype):
    model, loss, X, y = make_classifier(dtype)
    options = {"curvature": curvature, "l2": 0.2}
    D = orthonormal(43, 10, dtype=dtype)
    parts = [Quadratic(model, loss, batch, **options).restrict(D) for batch in partition((X, y), 6)]
    full = Quadratic(model, loss, (X, y), **options).restrict(D)
    for name in ("slopes", "curvatures"):
        values = torch.stack([getattr(part, name)() for part in parts])
        scale = values.square().mean().sqrt()
        gap = (values.mean(0) - getattr(full, name)()).abs().max()
        assert gap <= (1e-12 if dtype == torch.float64 else 1e-6) * scale


def test_kfac_averages_are_not_full_batch_values():
    model, loss, X, y = make_classifier()
    D = torch.eye(43).double()
    parts = [
        Quadratic(model, loss, b, curvature="kfac").curvatures(D) for b in partition((X, y), 6)
    ]
    full = Quadratic(model, loss, (X, y), curvature="kfac").curvatures(D)
    gap = (torch.stack(parts).mean(0) - full).abs().max() / full.abs().max()
    assert gap > 1e-2


def test_slope_identity():
    """Along one batch's gradient the slope bias is |gradient| (cos alpha - 1), at equal lengths."""
    model, loss, X, y = make_classifier()
    one, two = (Quadratic(model, loss, batch, l2=0.1) for batch in partition((X, y), 12))
    g, g_tilde = one.gradient, two.gradient
    d = -(g / g.norm())[:, None]
    cosine = g @ g_tilde / (g.norm() * g_tilde.norm())
    # the paper's identity holds for gradients of one length; the length of the other is explicit
    bias = one.slopes(d) - two.slopes(d)
    assert torch.allclose(bias, g_tilde.norm() * cosine - g.norm(), rtol=1e-12)
    scaled = d.T @ (g - g_tilde * g.norm() / g_tilde.norm())
    assert torch.allclose(scaled, g.norm() * (cosine - 1), rtol=1e-12)
    assert one.slopes(d) < 0 and bias < 0


def test_model_is_left_as_found():
    model, loss, X, y = make_classifier()
    model.append(nn.Dropout(0.5))
    model[0].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    for curvature in ("ggn", "hessian", "kfac"):
        q = Quadratic(model, loss, (X, y), curvature=curvature)
        with torch.no_grad():
            first = q.curvatures(torch.eye(43).double())
            assert torch.isfinite(q.gradient).all()
        assert torch.equal(first, q.curvatures(torch.eye(43).double()))  # no live dropout
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[2].weight.grad is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_model_is_left_as_found_when_it_raises():
    model, loss, X, y = make_classifier()
    for curvature in ("ggn", "hessian", "kfac"):
        q = Quadratic(model, loss, (X[:, :3], y), curvature=curvature)
        with pytest.raises(RuntimeError):
            q @ torch.ones(43, dtype=torch.float64)
        assert all(m.training for m in model.modules())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_refuses_a_model_that_has_changed():
    model, loss, X, y = make_classifier()
    for curvature in ("ggn", "kfac"):
        q = Quadratic(model, loss, (X, y), curvature=curvature)
        model[0].weight.data += 1
        with pytest.raises(RuntimeError, match="changed"):
            q @ torch.ones(43, dtype=torch.float64)


def test_frozen_parameters_are_constants():
    model, loss, X, y = make_classifier()
    model[0].requires_grad_(False)
    q = Quadratic(model, loss, (X, y))
    eye = torch.eye(q.shape[0]).double()
    model[0].requires_grad_(True)
    H = dense_ggn(model, loss, X, y)[25:, 25:]
    assert q.shape == (18, 18) and torch.allclose(q @ eye, H, rtol=1e-10, atol=1e-13)


def test_products_are_counted():
    model, loss, X, y = make_classifier()
    q = Quadratic(model, loss, (X, y), max_columns=4)
    q @ torch.ones(43, dtype=torch.float64)
    q @ torch.ones(43, 10, dtype=torch.float64)
    q.curvatures(torch.eye(43).double()[:, :6])
    assert q.n_products == 1 + 10 + 6


def test_normalises_directions_and_says_so():
    model, loss, X, y = make_classifier()
    q = Quadratic(model, loss, (X, y))
    D = torch.eye(43).double()[:, :3]
    with pytest.warns(UserWarning, match="Normalised 2 of 3 directions"):
        curvatures = q.curvatures(D * torch.tensor([1.0, 2.0, 3.0]))
    assert torch.allclose(curvatures, q.curvatures(D))


def test_bad_input_says_what_to_do():
    model, loss, X, y = make_classifier()
    q = Quadratic(model, loss, (X, y))
    with pytest.raises(ValueError, match="Expected curvature in"):
        Quadratic(model, loss, (X, y), curvature="fisher")
    with pytest.raises(ValueError, match="reduction='mean'"):
        Quadratic(model, nn.CrossEntropyLoss(reduction="sum"), (X, y))
    with pytest.raises(ValueError, match="class weights"):
        Quadratic(model, nn.CrossEntropyLoss(weight=torch.ones(3)), (X, y))
    with pytest.raises(ValueError, match="ignore_index=-100"):
        Quadratic(model, loss, (X, torch.where(y == 0, -100, y)))
    with pytest.raises(ValueError, match="finite l2"):
        Quadratic(model, loss, (X, y), l2=-1.0)
    with pytest.raises(ValueError, match="float32 or float64"):
        Quadratic(copy.deepcopy(model).bfloat16(), loss, (X, y))
    with pytest.raises(ValueError, match="require gradients"):
        Quadratic(copy.deepcopy(model).requires_grad_(False), loss, (X, y))
    with pytest.raises(ValueError, match=r"Expected shape \(43,\)"):
        q @ torch.ones(42, dtype=torch.float64)
    with pytest.raises(ValueError, match="Remedy: move the vectors"):
        q @ torch.ones(43)
    with pytest.raises(ValueError, match=r"directions \[P, K\]"):
        q.curvatures(torch.ones(43, dtype=torch.float64))
    with pytest.raises(ValueError, match="non-zero directions"):
        q.curvatures(torch.zeros(43, 1, dtype=torch.float64))
    with pytest.raises(TypeError, match="iterated many times"):
        Chunks(iter([(X, y)]))
    with pytest.raises(ValueError, match="as many targets"):
        Chunks((X, y[:-1]))
    with pytest.raises(ValueError, match="at least one datum"):
        Chunks([])
    with pytest.raises(ValueError, match="batch_size"):
        partition((X, y), 25)


def test_refuses_a_loss_that_is_not_finite():
    model, loss, X, y = make_classifier()
    X[3, 1] = float("nan")
    q = Quadratic(model, loss, (X, y))
    with pytest.raises(ValueError, match="finite loss"):
        _ = q.gradient
    with pytest.raises(ValueError, match="finite product"):
        q @ torch.ones(43, dtype=torch.float64)
    with pytest.raises(ValueError, match="finite product"):
        q.curvatures(torch.eye(43).double())


def test_mapping_inputs_and_loaders():
    class Wrapped(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, batch):
            return self.net(batch["x"])

    model, loss, X, y = make_classifier()
    D = torch.eye(43).double()[:, :5]
    expected = Quadratic(model, loss, (X, y)).curvatures(D)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(X, y), batch_size=5, shuffle=True
    )
    assert torch.allclose(Quadratic(model, loss, loader).curvatures(D), expected)
    mapped = Quadratic(Wrapped(model), loss, ({"x": X}, y), chunk_size=7)
    assert torch.allclose(mapped.curvatures(D), expected)
    assert torch.allclose((mapped @ D), Quadratic(model, loss, (X, y)) @ D)
