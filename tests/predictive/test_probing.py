"""One run of a model: calls, the dimension of the data, and Jacobians the slow way."""

import pytest
import torch
from torch import nn

from laplace_debias.network.recorder import Recorder
from laplace_debias.predictive.probing import (
    call_gradients,
    call_inputs,
    call_normalised,
    data_dims,
    per_datum_jacobians,
    run,
)
from tests.cases_predictive import STRUCTURED
from tests.fitted_predictive import EXACT, double_precision  # noqa: F401
from tests.oracles_predictive import dense_jacobian

pytestmark = pytest.mark.usefixtures("double_precision")


class Positions(nn.Module):
    """Linear layers that see data first, data second, data merged, and no data at all."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.merged, self.constant = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        """Map ``[n, T, 3]`` to ``[n, 3]``."""
        h = self.first(x)
        h = self.second(h.transpose(0, 1)).transpose(0, 1)
        h = self.merged(h.flatten(0, 1)).view(h.shape)
        return h.mean(1) + self.constant(torch.ones(3))


def test_the_dimension_that_runs_over_the_data():
    model = Positions()
    layers = [model.first, model.second, model.merged, model.constant]
    dims = data_dims(model, torch.randn(4, 5, 3), layers, "input_ids")
    # of merged data and positions, one datum has 5 rows and two have 10
    assert [dims[layer] for layer in layers] == [[0], [1], [None], [None]]


@pytest.mark.parametrize("name", ["mlp", "conv", "tokens"])
def test_jacobians_one_datum_and_output_at_a_time(name):
    model, shape = STRUCTURED[name]()[:2]
    model = model.eval()
    x, params = torch.randn(3, *shape), [p for p in model.parameters() if p.requires_grad]
    got = torch.cat(per_datum_jacobians(model, x, params, "input_ids"), 2)
    torch.testing.assert_close(got, dense_jacobian(model, x, params), **EXACT)


def test_parameters_without_influence_have_zero_jacobians():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.forward = model[0].forward
    (used, unused) = per_datum_jacobians(
        model, torch.ones(3, 2), [model[0].weight, model[1].weight], "input_ids"
    )
    assert used.abs().sum() > 0 and unused.shape == (3, 2, 4) and not unused.any()


def test_a_run_records_calls_and_uses():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    x = torch.randn(3, 2)
    capture = run(model, x, [layer])
    assert torch.equal(capture.f, model(x)) and capture.f.requires_grad
    assert len(capture.calls[layer]) == capture.uses[id(layer.weight)] == 2
    assert torch.equal(capture.calls[layer][0].a, x)
    assert not capture.calls[layer][1].a.requires_grad
    kept = run(model, x, [layer], keep_graph=True)
    assert kept.calls[layer][1].a.requires_grad
    with pytest.raises(ValueError, match="n, C"):
        run(nn.Flatten(0), x, [])


def test_rows_and_gradients_give_the_weights_gradient():
    """sum_n sum_r g a^T is autograd's own gradient, for layers over tokens and convolutions."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.Tanh(), nn.Flatten(2),
        nn.Linear(9, 5), nn.Tanh(), nn.Flatten(), nn.Linear(30, 2),
    ).double()  # fmt: skip
    x = torch.randn(3, 4, 5, 5).double()
    layers = [net[0], net[3], net[6]]
    capture = run(net, x, layers)
    f, calls = capture.f, capture.calls
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
    recorder = Recorder([layer], keep_inputs=True)
    with recorder.recording():
        layer(x)
    (call,) = recorder.calls[layer]
    rows = call_inputs(call, 4, 1, slice(1, 3))
    assert torch.equal(rows, x.transpose(0, 1)[1:3].unsqueeze(2))
    g = torch.randn(5, 4, 2)
    assert torch.equal(call_gradients(call, g, 4, 1), g.permute(1, 2, 0))


def test_an_input_that_changed_after_the_call_is_refused():
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    capture = run(layer, x, [layer])
    x += 1
    with pytest.raises(RuntimeError, match="changed in place.*Remedy"):
        call_inputs(capture.calls[layer][0], 1, 0, slice(0, 1))


class Frames(nn.Module):
    """Layers that see a datum's frames as if they were data."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 6, 2, groups=2), nn.LayerNorm(6)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        """Map ``[n, F, 4, 3, 3]`` to ``[n, 2]``."""
        n = len(x)
        h = self.norm(torch.tanh(self.conv(x.flatten(0, 1))).mean((2, 3)))  # [n * F, 6]
        return self.head(torch.tanh(h).unflatten(0, (n, -1)).mean(1))


def test_a_single_datum_may_fill_several_rows():
    """The rows of all frames together give the parameters' gradients."""
    torch.manual_seed(0)
    model, x = Frames(), torch.randn(1, 5, 4, 3, 3)
    for p in model.norm.parameters():
        p.data.uniform_(0.5, 1.5)
    capture = run(model, x, [model.conv, model.norm])
    (conv,), (norm,) = capture.calls[model.conv], capture.calls[model.norm]
    places = [conv.edge, model.conv.weight, norm.edge, model.norm.weight]
    G, W, H, scale = torch.autograd.grad(capture.f[:, 0].sum(), places)
    g, a = call_gradients(conv, G, 1, None), call_inputs(conv, 1, None, slice(0, 1))
    assert g.shape == (1, 6, 20) and a.shape == (1, 20, 2, 8)  # five frames of four positions
    got = torch.einsum("ngor,nrgi->goi", g.unflatten(1, (2, -1)), a).flatten(0, 1)
    got = got.view(6, 2, 2, 2).permute(0, 3, 1, 2)  # channels come last inside a patch
    torch.testing.assert_close(got, W, **EXACT)
    x_hat = call_normalised(norm, model.norm, 1, None)
    assert x_hat.shape == (1, 6, 5)
    torch.testing.assert_close(
        (call_gradients(norm, H, 1, None) * x_hat).sum((0, 2)), scale, **EXACT
    )
