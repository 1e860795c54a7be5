"""Hook-based K-FAC against dense float64 oracles, ASDL and curvlinops."""

import copy
from collections import UserDict

import pytest
import torch
from laplace.curvature.asdl import AsdlEF, AsdlGGN
from laplace.curvature.curvlinops import CurvlinopsEF, CurvlinopsGGN
from torch import nn
from torch.nn import functional as F

from laplace_debias.hook_backend import HookEF, HookGGN
from laplace_debias.kfac import input_factors, kfac_factors
from laplace_debias.loss_hessian import (
    mean_loss_hessian,
    sampled_hessian_root,
    softmax_hessian_root,
)

LIKELIHOODS = ["classification", "regression"]


def rows_of(layer, x):
    """Input rows `[n, positions, d_in]` of a layer, read by unit kernels."""
    if isinstance(layer, nn.Linear):
        return x.reshape(len(x), -1, x.shape[-1])
    # The convolution with the unit kernel e_j reads entry j of every patch.
    d_in = layer.weight[0].numel()
    units = torch.eye(d_in, dtype=x.dtype).reshape(d_in, *layer.weight.shape[1:])
    rows = 0
    for part in x.chunk(layer.groups, dim=1):
        probe = type(layer)(
            part.shape[1], d_in, layer.kernel_size, layer.stride, layer.padding, layer.dilation,
            bias=False, padding_mode=layer.padding_mode,
        )  # fmt: skip
        probe.weight = nn.Parameter(units)
        rows = rows + probe(part).detach().flatten(2).transpose(1, 2) / layer.groups
    return rows


def oracle(model, x, y, likelihood, weights, fisher="ggn"):
    """Factors datum by datum, class by class, position by position, in explicit loops."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    layers = [m for m in model.modules() if isinstance(m, kinds)]
    layers = [m for m in layers if any(p.requires_grad for p in m.parameters())]
    inputs, outputs = {m: [] for m in layers}, {m: [] for m in layers}

    def hook(module, args, output):
        inputs[module].append(args[0].detach().clone())
        outputs[module].append(output)
        return output.clone()

    handles = [m.register_forward_hook(hook) for m in layers]
    training = model.training
    model.eval()
    B = {m: 0.0 for m in layers}
    A = {m: [] for m in layers}
    for n in range(len(y)):
        for m in layers:
            inputs[m].clear(), outputs[m].clear()
        f = model(x[n : n + 1])
        if fisher == "ggn" and likelihood == "classification":
            loss = lambda f_n, n=n: F.cross_entropy(f_n[None], y[n : n + 1])  # noqa: E731
            H = torch.autograd.functional.hessian(loss, f[0].detach())
        elif fisher == "ggn":
            H = torch.eye(f.shape[1], dtype=f.dtype)
        elif likelihood == "classification":
            r = f[0].detach().softmax(0) - F.one_hot(y[n], f.shape[1])
            H = torch.outer(r, r)
        else:
            r = f[0].detach() - y[n]
            H = 2 * torch.outer(r, r)
        for m in layers:
            A[m] += [row for a in inputs[m] for row in rows_of(m, a)[0]]
            for s in outputs[m]:
                J = [torch.autograd.grad(f_c, s, retain_graph=True)[0][0] for f_c in f[0]]
                J = torch.stack(J)  # [C, *positions, d_out] or [C, d_out, *positions]
                J = J.flatten(2).mT if s.ndim > 2 and not isinstance(m, nn.Linear) else J
                J = J.reshape(len(J), -1, J.shape[-1])
                B[m] = B[m] + weights[n] * torch.einsum("cti,cd,dtj->ij", J, H, J)
    for handle in handles:
        handle.remove()
    model.train(training)
    blocks = []
    for m in layers:
        if m.weight.requires_grad:
            rows = torch.stack(A[m])
            blocks.append((B[m], rows.T @ rows / len(rows)))
        if m.bias is not None and m.bias.requires_grad:
            blocks.append((B[m],))
    return blocks


class _Twice(nn.Module):
    """Calls one layer twice, with an in-place activation after it."""

    def __init__(self):
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.first(x).tanh()
        for _ in range(2):
            h = F.relu_(self.shared(h)) + h
        return self.last(h)


class _Attention(nn.Module):
    """Tokens through a trainable layer, frozen normalisation and attention, then their mean."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)
        self.attend, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)
        for frozen in (self.norm, self.attend):
            frozen.requires_grad_(False)

    def forward(self, x):
        x = x["tokens"] if isinstance(x, UserDict) else x
        h = self.norm(self.embed(x))
        return self.last((h + self.attend(h, h, h)[0]).mean(1))


def conv_net(dim, **kwargs):
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dim]
    pool = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}[dim]
    return nn.Sequential(
        conv(2, 4, 2), nn.ReLU(inplace=True), conv(4, 4, 3, **kwargs), nn.Tanh(),
        pool(2), nn.Flatten(), nn.Linear(4 * 2**dim, 3),
    )  # fmt: skip


def frozen_parts():
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(),
        nn.Linear(48, 4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 3),
    )  # fmt: skip
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    for part in (model[1], model[4].bias, model[6], model[8].weight):
        part.requires_grad_(False)
    return model


CASES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), (3,)),
    "tokens": (_Attention, (5, 3)),
    "twice": (_Twice, (3,)),
    "frozen": (frozen_parts, (2, 6, 6)),
    "conv1d": (lambda: conv_net(1, stride=2, padding=1, dilation=2), (2, 9)),
    "conv2d": (lambda: conv_net(2, stride=(2, 1), padding=(1, 0)), (2, 6, 7)),
    "conv2d groups": (lambda: conv_net(2, groups=2, padding=1), (2, 6, 6)),
    "conv2d dilation": (lambda: conv_net(2, dilation=(1, 2)), (2, 7, 8)),
    "conv2d same": (lambda: conv_net(2, dilation=2, padding="same"), (2, 6, 6)),
    "conv2d circular": (lambda: conv_net(2, padding=1, padding_mode="circular"), (2, 5, 6)),
    "conv2d reflect": (lambda: conv_net(2, padding=2, padding_mode="reflect"), (2, 5, 6)),
    "conv3d": (lambda: conv_net(3, padding=1, stride=2, groups=2), (2, 4, 5, 4)),
}


def make(case, likelihood, n=6, dtype=torch.float64):
    torch.manual_seed(0)
    build, shape = CASES[case]
    model = build().to(dtype)
    x = torch.randn(n, *shape, dtype=dtype)
    y = torch.randint(3, (n,)) if likelihood == "classification" else torch.randn(n, 3, dtype=dtype)
    return model, x, y


def assert_blocks_close(got, expected, **tolerance):
    assert [len(b) for b in got] == [len(b) for b in expected]
    for one, other in zip(got, expected, strict=True):
        for M, L in zip(one, other, strict=True):
            torch.testing.assert_close(M, L, **tolerance)


@pytest.mark.parametrize("fisher", ["ggn", "ef"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("case", CASES)
def test_factors_equal_the_oracle_with_weights(case, likelihood, fisher):
    model, x, y = make(case, likelihood)
    weights = torch.tensor([0.0, 0.3, 1.0, 2.0, 0.7, 5.0], dtype=torch.float64)
    factors = kfac_factors(model, x, y, likelihood=likelihood, weights=weights, fisher=fisher)
    assert_blocks_close(factors.blocks, oracle(model, x, y, likelihood, weights, fisher))
    assert factors.n_data == len(y)
    assert factors.names == tuple(n for n, p in model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("case", CASES)
def test_vectorized_backward_passes_and_separate_inputs_change_nothing(case):
    model, x, y = make(case, "classification")
    factors = kfac_factors(model, x, y, likelihood="classification")
    batched = kfac_factors(model, x, y, likelihood="classification", vectorize=True)
    assert_blocks_close(batched.blocks, factors.blocks)
    alone = kfac_factors(model, x, y, likelihood="classification", inputs=False)
    forward = input_factors(model, x)
    assert_blocks_close(alone.with_inputs(forward).blocks, factors.blocks)
    torch.testing.assert_close(forward.outputs, copy.deepcopy(model).eval()(x).detach())


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("case", ["mlp", "conv2d"])
@pytest.mark.parametrize("ours, theirs", [(HookGGN, AsdlGGN), (HookEF, AsdlEF)])
def test_agrees_with_asdl(case, likelihood, ours, theirs):
    model, x, y = make(case, likelihood)
    loss, kron = ours(copy.deepcopy(model), likelihood).kron(x, y, N=20)
    their_loss, their_kron = theirs(copy.deepcopy(model), likelihood).kron(x, y, N=20)
    torch.testing.assert_close(loss, their_loss)
    torch.testing.assert_close(kron.to_matrix(), their_kron.to_matrix())


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize(
    "case", ["mlp", "tokens", "conv2d", "conv2d groups", "conv2d dilation", "conv2d same"]
)
@pytest.mark.parametrize("ours, theirs", [(HookGGN, CurvlinopsGGN), (HookEF, CurvlinopsEF)])
def test_agrees_with_curvlinops(case, likelihood, ours, theirs):
    model, x, y = make(case, likelihood)
    model.eval()
    loss, kron = ours(copy.deepcopy(model), likelihood).kron(x, y, N=20)
    their_loss, their_kron = theirs(copy.deepcopy(model), likelihood).kron(x, y, N=20)
    torch.testing.assert_close(loss, their_loss)
    torch.testing.assert_close(kron.to_matrix(), their_kron.to_matrix())


def test_large_gram_matrices_and_sliced_unfolding(monkeypatch):
    """The halved Gram matrix and the sliced copy give what one plain product gives."""
    monkeypatch.setattr("laplace_debias.kfac_layers._HALVE_ABOVE", 5)
    monkeypatch.setattr("laplace_debias.kfac_layers._SLICE_BYTES", 4000)
    model, x, y = make("conv2d", "classification")
    factors = kfac_factors(model, x, y, likelihood="classification")
    assert_blocks_close(factors.blocks, oracle(model, x, y, "classification", torch.ones(6)))


def test_exact_ggn_of_a_single_linear_layer_with_one_datum():
    """For one datum and one position the Kronecker product is the GGN itself."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    x, y = torch.randn(1, 3).double(), torch.tensor([2])
    _, kron = HookGGN(model, "classification").kron(x, y, N=1)
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()

    def loss(theta):
        W, b = theta[:12].reshape(4, 3), theta[12:]
        return F.cross_entropy(x @ W.T + b, y)

    H = torch.autograd.functional.hessian(loss, flat)  # the model is linear: Hessian = GGN
    torch.testing.assert_close(kron.to_matrix()[:12, :12], H[:12, :12])
    torch.testing.assert_close(kron.to_matrix()[12:, 12:], H[12:, 12:])


def test_softmax_root_at_saturated_outputs():
    logits = torch.tensor([[50.0, 0.0, -50.0], [0.0, 0.0, 90.0], [-200.0, 0.0, 0.0]]).double()
    p = logits.softmax(-1)
    S = softmax_hessian_root(logits)
    torch.testing.assert_close(S @ S.mT, torch.diag_embed(p) - p[:, :, None] * p[:, None])


def test_tied_weights_count_as_positions():
    """Two modules with one weight: sums of B, pooled mean of A."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3, bias=False).double() for _ in range(2)]
    layers[1].weight = layers[0].weight
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    x = torch.randn(5, 3).double()
    tied = kfac_factors(model, x, likelihood="regression")
    untied = nn.Sequential(*(copy.deepcopy(layer) for layer in model))
    (B1, A1), (B2, A2) = kfac_factors(untied, x, likelihood="regression").blocks
    assert tied.names == ("0.weight",)
    assert_blocks_close(tied.blocks, [(B1 + B2, (A1 + A2) / 2)])


def test_dict_batches():
    model, x, y = make("tokens", "classification")
    factors = kfac_factors(model, UserDict(tokens=x), y, likelihood="classification")
    assert_blocks_close(
        factors.blocks, kfac_factors(model, x, y, likelihood="classification").blocks
    )
    assert factors.n_data == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_accumulate_in_single(dtype):
    model, x, y = make("mlp", "classification", n=64, dtype=torch.float32)
    expected = kfac_factors(model, x, y, likelihood="classification")
    half = kfac_factors(model.to(dtype), x.to(dtype), y, likelihood="classification")
    for block, exact in zip(half.blocks, expected.blocks, strict=True):
        for M, L in zip(block, exact, strict=True):
            assert M.dtype == torch.float32
            assert (M - L).norm() < 0.03 * L.norm()


def test_last_layer_backend():
    from laplace import Laplace
    from torch.utils.data import DataLoader, TensorDataset

    model, x, y = make("mlp", "classification", n=12)
    loader = DataLoader(TensorDataset(x, y), batch_size=5)
    fitted = [
        Laplace(copy.deepcopy(model), "classification", "last_layer", "kron", backend=backend)
        for backend in (HookGGN, AsdlGGN)
    ]
    for la in fitted:
        la.fit(loader)
    torch.testing.assert_close(fitted[0].H.to_matrix(), fitted[1].H.to_matrix())


def test_the_model_is_left_as_found_also_after_an_error():
    model, x, y = make("frozen", "classification")
    model.train()
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    for target in (y, y + 7):
        try:
            kfac_factors(model, x, target, likelihood="classification")
        except ValueError as error:
            assert "class indices from 0 to 2" in str(error)
        assert [m.training for m in model.modules()] == modes
        assert not any(m._forward_hooks for m in model.modules())
        assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    with torch.no_grad():  # the caller's grad mode does not matter
        kfac_factors(model, x, y, likelihood="classification")


class _Unused(nn.Module):
    """Holds a layer which it does not call."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)


def test_errors_say_what_to_do():
    model, x, y = make("mlp", "classification")
    kwargs = {"likelihood": "classification"}
    with pytest.raises(ValueError, match="frozen|unfreeze"):
        kfac_factors(copy.deepcopy(model).requires_grad_(False), x, y, **kwargs)
    norm = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).double()
    with pytest.raises(ValueError, match=r'1.weight \(LayerNorm\).*get_parameter\("1.weight"\)'):
        kfac_factors(norm, x, y, **kwargs)
    with pytest.raises(ValueError, match="idle.weight"):
        kfac_factors(_Unused().double(), x, y, **kwargs)
    with pytest.raises(ValueError, match="idle.weight"):
        input_factors(_Unused().double(), x)
    with pytest.raises(ValueError, match=r"shape \[n, C\]"):
        kfac_factors(model, x[:, None], y, **kwargs)
    with pytest.raises(ValueError, match=r"class indices of shape \[6\]"):
        kfac_factors(model, x, y[:, None], **kwargs)
    with pytest.raises(ValueError, match=r"shape \[6, 3\]"):
        kfac_factors(model, x, y, likelihood="regression")
    with pytest.raises(ValueError, match=r"weights of shape \[6\]"):
        kfac_factors(model, x, y, weights=torch.ones(5), **kwargs)
    with pytest.raises(ValueError, match="non-negative"):
        kfac_factors(model, x, y, weights=-torch.ones(6), **kwargs)
    with pytest.raises(ValueError, match="'ggn', 'mc', 'ef'"):
        kfac_factors(model, x, y, fisher="hessian", **kwargs)
    with pytest.raises(ValueError, match="pass `y`"):
        kfac_factors(model, x, fisher="ef", **kwargs)
    with pytest.raises(ValueError, match="likelihood"):
        kfac_factors(model, x, likelihood="reward")


def test_layers_at_the_output_are_recognised():
    """B of the last layer is the mean loss Hessian; not so after an activation, in place or not."""
    model, x, y = make("mlp", "classification")
    forward = input_factors(model, x)
    assert forward.is_output == (False, False, True, True)
    factors = kfac_factors(model, x, y, likelihood="classification")
    for B in (factors.blocks[2][0], factors.blocks[3][0]):
        torch.testing.assert_close(B / 6, mean_loss_hessian(forward.outputs, "classification"))
    for inplace in (True, False):
        covered = nn.Sequential(*copy.deepcopy(model), nn.ReLU(inplace=inplace))
        assert input_factors(covered, x).is_output == (False,) * 4


def test_stochastic_backend_takes_one_backward_pass():
    model, x, y = make("mlp", "classification")
    torch.manual_seed(0)
    _, kron = HookGGN(model, "classification", stochastic=True).kron(x, y, N=6)
    generator = torch.Generator().manual_seed(0)
    v = sampled_hessian_root(model(x).detach(), "classification", generator).squeeze(2)
    torch.testing.assert_close(kron.kfacs[2][0], v.T @ v)


def test_factors_add_up():
    """Two mini-batches of different sizes: the sum of their factors is the factors of both."""
    model, x, y = make("conv2d", "classification")
    whole = kfac_factors(model, x, y, likelihood="classification")
    kwargs = {"likelihood": "classification"}
    parts = [kfac_factors(model, x[s], y[s], **kwargs) for s in (slice(2), slice(2, 6))]
    both = parts[0] + parts[1]
    assert_blocks_close(both.blocks, whole.blocks)
    torch.testing.assert_close(both.loss, whole.loss)
    assert both.n_data == 6
    forward = input_factors(model, x[:2]) + input_factors(model, x[2:])
    assert_blocks_close(parts[0].with_inputs(forward).blocks[0][1:], whole.blocks[0][1:])
    torch.testing.assert_close(forward.outputs, input_factors(model, x).outputs)
    with pytest.raises(ValueError, match="same model"):
        both + kfac_factors(model[2:], torch.randn(2, 4, 5, 6).double(), likelihood="regression")
