"""The hooks: what layers see, and gradients at their outputs in spite of in-place operations."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from laplace_debias.network.recorder import Recorder, check_outputs, count_uses
from laplace_debias.predictive.probing import call_gradients, call_inputs


class InPlace(nn.Module):
    """Tokens through a layer that is called twice, with in-place activations behind it."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        """Map ``[n, T, 3]`` to ``[n, 2]``."""
        h = F.relu_(self.first(x))
        h = torch.tanh_(self.first(h))
        return self.last(h.mean(1))


def recorded(model, x, layers, **options):
    recorder = Recorder(layers, **options)
    with recorder.recording():
        f = model(x)
    return f, recorder.calls


def test_gradients_at_the_edges_are_those_of_added_zeros():
    """D f / d s by adding a zero to each output of the layer, without any in-place operation."""
    torch.manual_seed(0)
    model, x = InPlace().double(), torch.randn(4, 5, 3).double()
    f, calls = recorded(model, x, [model.first])
    zeros = [torch.zeros(4, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    h = torch.relu(model.first(x) + zeros[0])
    plain = model.last(torch.tanh(model.first(h) + zeros[1]).mean(1))
    torch.testing.assert_close(f, plain)
    got = torch.autograd.grad(f[:, 1].sum(), [call.edge for call in calls[model.first]])
    want = torch.autograd.grad(plain[:, 1].sum(), zeros)
    assert all(g.abs().sum() > 0 for g in got)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


def test_rows_and_gradients_give_the_weights_gradient():
    """sum_n sum_r g a^T is autograd's own gradient, for layers over tokens and convolutions."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.Tanh(), nn.Flatten(2),
        nn.Linear(9, 5), nn.Tanh(), nn.Flatten(), nn.Linear(30, 2),
    ).double()  # fmt: skip
    x = torch.randn(3, 4, 5, 5).double()
    layers = [net[0], net[3], net[6]]
    f, calls = recorded(net, x, layers, keep_inputs=True)
    for c in range(2):
        for layer in layers:
            (call,) = calls[layer]
            G, W = torch.autograd.grad(f[:, c].sum(), [call.edge, layer.weight], retain_graph=True)
            g = call_gradients(call, G, 3, 0)  # [n, d_out, R]
            a = call_inputs(call, 3, 0, slice(0, 3))  # [n, R, groups, d_in]
            assert g.shape[-1] == a.shape[1] == call.positions(3) and call.d_out == len(W)
            groups = a.shape[2]
            per_group = g.unflatten(1, (groups, -1))
            got = torch.einsum("ngor,nrgi->goi", per_group, a).flatten(0, 1)
            if isinstance(layer, nn.Conv2d):  # channels come last inside a patch
                got = got.view(len(W), *layer.kernel_size, -1).permute(0, 3, 1, 2)
            torch.testing.assert_close(got.reshape(W.shape), W)


def test_data_along_another_dimension_and_some_rows():
    layer, x = nn.Linear(3, 2), torch.randn(5, 4, 3)  # five positions, four data
    _, calls = recorded(layer, x, [layer], keep_inputs=True)
    (call,) = calls[layer]
    rows = call_inputs(call, 4, 1, slice(1, 3))
    assert torch.equal(rows, x.transpose(0, 1)[1:3].unsqueeze(2))
    g = torch.randn(5, 4, 2)
    assert torch.equal(call_gradients(call, g, 4, 1), g.permute(1, 2, 0))


def test_inputs_are_seen_when_the_layer_is_called():
    layer, seen = nn.Linear(2, 2), []
    x = torch.ones(1, 2)
    recorder = Recorder(
        [layer], on_input=lambda m, a: seen.append((m, a.clone())), keep_inputs=True
    )
    with recorder.recording():
        layer(input=x)  # as a keyword
        x += 1
    assert seen[0][0] is layer and torch.equal(seen[0][1], torch.ones(1, 2))
    (call,) = recorder.calls[layer]
    with pytest.raises(RuntimeError, match="changed in place.*Remedy"):
        call_inputs(call, 1, 0, slice(0, 1))
    recorder = Recorder([layer])
    with recorder.recording():
        layer(x)
    with pytest.raises(RuntimeError, match="keep_inputs=True"):
        call_inputs(recorder.calls[layer][0], 1, 0, slice(0, 1))


def test_outputs_of_the_network_are_recognised_only_if_unchanged():
    layer = nn.Linear(2, 2)
    for tail, expected in [(nn.Identity(), True), (nn.ReLU(), False), (nn.ReLU(True), False)]:
        f, calls = recorded(nn.Sequential(layer, tail), torch.randn(3, 2), [layer])
        assert calls[layer][0].is_output(f) is expected


def test_hooks_are_removed_also_after_an_error_and_graphs_left_alone_without_edges():
    layer = nn.Linear(2, 2)
    recorder = Recorder([layer], edges=False)
    with pytest.raises(KeyError), recorder.recording():
        layer(torch.ones(1, 2))
        raise KeyError
    assert recorder.calls[layer][0].edge is None and not layer._forward_hooks


def test_uses_are_counted_in_the_graph():
    layer = nn.Linear(2, 2)
    f = layer(layer(torch.ones(1, 2))) + layer.weight.sum()
    uses = count_uses(f)
    assert (uses[id(layer.weight)], uses[id(layer.bias)]) == (3, 2)


@pytest.mark.parametrize("f", [torch.zeros(3), torch.zeros(2, 3, 4), [torch.zeros(2, 3)]])
def test_outputs_have_one_row_per_datum(f):
    with pytest.raises(ValueError, match=r"\[n, C\].*Remedy"):
        check_outputs(f)
