"""The hooks: what layers see, and gradients at their outputs in spite of in-place operations."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from laplace_debias.network.recorder import Recorder, check_outputs, count_uses, inner_product


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


def test_inputs_are_seen_when_the_layer_is_called():
    layer, seen = nn.Linear(2, 2), []
    x = torch.ones(1, 2)
    recorder = Recorder(
        [layer], on_input=lambda m, _, a: seen.append((m, a.clone())), keep_inputs=True
    )
    with recorder.recording():
        layer(input=x)  # as a keyword
        x += 1
    assert seen[0][0] is layer and torch.equal(seen[0][1], torch.ones(1, 2))
    (call,) = recorder.calls[layer]
    assert call.kept_input._version > call.version  # which tells that the model changed it
    recorder = Recorder([layer])
    with recorder.recording():
        layer(x)
    with pytest.raises(RuntimeError, match="keep_inputs=True"):
        _ = recorder.calls[layer][0].kept_input


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


@pytest.mark.parametrize("f", [torch.zeros(3), torch.tensor(0.0), [torch.zeros(2, 3)]])
def test_outputs_have_one_row_per_datum(f):
    with pytest.raises(ValueError, match=r"\[n, C\].*Remedy"):
        check_outputs(f)


def test_the_first_fit_and_prediction_of_a_process_do_not_wait_for_sympy():
    """PyTorch imports it for gradients along given vectors: most of what a first check took."""
    code = """
import sys, torch
from laplace_debias import Laplace
before = "sympy" in sys.modules
net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
la = Laplace(net, "classification", "all", "kron", debias=True)
la.fit([(torch.randn(4, 2), torch.arange(4) % 2)] * 2, n_data=9)
la(torch.randn(4, 2))
print(before, "sympy" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() in (["False", "False"], ["True", "True"])


def test_gradients_along_vectors_are_autograds_own_to_the_bit():
    W = torch.randn(5, 3, requires_grad=True)
    f, v = torch.tanh(torch.randn(4, 5) @ W), torch.randn(4, 3)
    (expected,) = torch.autograd.grad(f, W, v, retain_graph=True)
    with torch.no_grad():
        assert torch.equal(torch.autograd.grad(inner_product(v, f), W)[0], expected)
