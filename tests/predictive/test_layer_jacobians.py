"""From a captured run to contractions, for several posteriors at once, against dense matrices."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn

from laplace_debias import Laplace
from laplace_debias.network.preserve import differentiable
from laplace_debias.predictive.eigenblocks import eigen_blocks
from laplace_debias.predictive.layer_jacobians import LayerJacobians
from tests.cases_predictive import FALLBACK, STRUCTURED
from tests.fitted_predictive import EXACT, build, double_precision  # noqa: F401
from tests.network.test_check import routed
from tests.oracles_predictive import dense_covariance, random_laplace

pytestmark = pytest.mark.usefixtures("double_precision")


def contracted(la, x, mode, posteriors, deltas, **options):
    blocks = [eigen_blocks(other, deltas, 2**29) for other in posteriors]
    layers = LayerJacobians(la.model, blocks[0], "input_ids", **options)
    with differentiable(la.model, la.params):
        layers.prepare(x)
        return (*layers.contract(x, mode, blocks), layers)


@pytest.mark.parametrize("name", ["mlp", "conv", "groups", "tokens", "repeated"])
@pytest.mark.parametrize("mode", ["variance", "covariance", "joint"])
def test_posteriors_share_a_pass_and_each_is_exact(name, mode):
    la, x = build(STRUCTURED[name](), n=4)
    other = random_laplace(la.model, la.n_outputs, seed=7)
    deltas = torch.tensor([0.3, 2.0])[:, None].expand(2, len(la.params))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing here takes the slow way
        f, moments, _ = contracted(la, x, mode, [la, other], deltas)
    torch.testing.assert_close(f, la.model.eval()(x), **EXACT)
    n, C = f.shape
    for posterior, got in zip([la, other], moments, strict=True):
        for k in range(2):
            joint = dense_covariance(posterior, x, deltas[k])
            own = torch.stack([joint[i, :, i] for i in range(n)])
            want = {
                "joint": joint.reshape(n * C, n * C),
                "covariance": own,
                "variance": own.diagonal(dim1=1, dim2=2),
            }[mode]
            torch.testing.assert_close(got[..., k], want, **EXACT)


@pytest.mark.parametrize("name", FALLBACK)
def test_what_cannot_be_taken_apart_is_said_once(name):
    la, x = build(FALLBACK[name](), n=3)
    deltas = torch.ones(1, len(la.params))
    with pytest.warns(UserWarning, match="one datum and output at a time") as caught:
        *_, layers = contracted(la, x, "variance", [la], deltas)
    with warnings.catch_warnings(), differentiable(la.model, la.params):
        warnings.simplefilter("error")
        layers.contract(x, "variance", [layers.blocks])
    assert len(caught) >= 1


def test_memory_is_counted_once_per_shape_and_covers_the_gradients():
    la, x = build(STRUCTURED["conv"](), n=4)
    *_, layers = contracted(la, x, "variance", [la], torch.ones(1, len(la.params)))
    runs = []
    handle = la.model.register_forward_hook(lambda *args: runs.append(1))
    with differentiable(la.model, la.params):
        known = layers.prepare(x)
        assert not runs and layers.prepare(x[:3]) == known
    handle.remove()
    activations = sum(call.shape.numel() * 8 for call in _calls(la.model, x[:1]))
    held, per_output = known
    assert held >= activations and per_output >= activations


def _calls(model, x):
    from laplace_debias.predictive.probing import run

    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    return [call for calls in run(model.eval(), x, layers).calls.values() for call in calls]


def test_parameters_without_influence_give_zero_variance():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x).detach() * x.requires_grad_().sum(-1, keepdim=True)

    la = random_laplace(Constant(), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, (moments,), _ = contracted(
            la, torch.randn(3, 2), "covariance", [la], torch.ones(1, len(la.params))
        )
    assert moments.shape == (3, 2, 2, 1) and not moments.any()


def test_results_can_be_differentiated_in_the_inputs():
    la, x = build(STRUCTURED["mlp"](), n=2)
    x.requires_grad_()
    deltas = torch.ones(1, len(la.params))
    _, (moments,), _ = contracted(la, x, "variance", [la], deltas, keep_graph=True)
    (gradient,) = torch.autograd.grad(moments.sum(), x)
    step = 1e-6 * torch.randn_like(x)
    values = [
        contracted(la, (x + s * step).detach(), "variance", [la], deltas)[1][0].sum()
        for s in (1, -1)
    ]
    torch.testing.assert_close(
        (gradient * step).sum(), (values[0] - values[1]) / 2, rtol=1e-6, atol=1e-13
    )


class Elsewhere(nn.Module):
    """A layer that sees positions before data, or data in another order."""

    def __init__(self, kind):
        """Choose."""
        super().__init__()
        self.kind, self.lin, self.head = kind, nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        """Map ``[n, 5, 3]`` to ``[n, 2]``."""
        if self.kind == "merged":
            h = self.lin(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (5, -1)).transpose(0, 1)
        else:
            order = x[:, 0, 0].argsort(descending=True)
            h = self.lin(x[order])[order.argsort()]
        return self.head(torch.tanh(h).mean(1))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("kind", "verify"), [("merged", False), ("sorted", True)])
def test_rows_of_other_data_take_the_slow_exact_way(n, kind, verify):
    la, _ = build((Elsewhere(kind), (5, 3)), n)
    x = torch.randn(n, 5, 3)
    x[:, 0, 0] = torch.arange(n)  # the order is another one
    with pytest.warns(UserWarning, match="exact but slow"):
        _, (moments,), _ = contracted(la, x, "joint", [la], torch.ones(1, 4), verify=verify)
    expected = dense_covariance(la, x, 1.0).reshape(2 * n, 2 * n)
    torch.testing.assert_close(moments[..., 0], expected, **EXACT)


def test_one_parameter_without_any_influence_has_no_variance():
    model = STRUCTURED["only the unused layer"]()[0]
    model.spare.bias.requires_grad_(False)
    la, x = build((model, (4,)))
    _, (moments,), _ = contracted(la, x, "variance", [la], torch.ones(3, 1))
    assert moments.shape == (5, 3, 3) and not moments.any()


def test_jacobians_that_have_to_be_formed_count_as_memory():
    """Merged data are taken apart one by one if there are several, not if there is one."""
    la, x = build((Elsewhere("merged"), (5, 3)), 3)
    blocks = eigen_blocks(la, torch.ones(1, 4), 2**29)
    layers = LayerJacobians(la.model, blocks, "input_ids", verify=False)
    with differentiable(la.model, la.params):
        (_, several), (_, one) = layers.prepare(x), layers.prepare(x[:1])
    assert several - one == 2 * (12 + 4) * 8  # J and its rotation of each output, layer `lin`


def test_two_data_of_which_a_layer_sees_one():
    """After two that a layer saw both: what is known of its dimensions does not hold for these."""
    model, x = routed(), torch.randn(4, 3)
    x[:, 0] = torch.tensor([-1.0, -2.0, -1.0, 2.0])
    la = random_laplace(model, 3)
    blocks = eigen_blocks(la, torch.ones(1, 6), 2**29)
    layers = LayerJacobians(model, blocks, "input_ids", verify=False)
    with differentiable(model, la.params), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in (x[:2], x[2:]):
            layers.prepare(part)
            _, (moments,) = layers.contract(part, "joint", [blocks])
            expected = dense_covariance(la, part, 1.0).reshape(6, 6)
            torch.testing.assert_close(moments[..., 0], expected, **EXACT)


@pytest.mark.parametrize("inside", [torch.float32, torch.float64])
def test_outputs_may_be_of_another_dtype_than_the_parameters(inside):
    """Logits in single precision of a network in double, and the other way round."""
    other = torch.float64 if inside is torch.float32 else torch.float32
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(inside)
    x, y = torch.randn(6, 3, dtype=inside), torch.arange(6) % 2
    covariances = []
    for dtype in (inside, other):
        options = {"debias": True, "output": partial(torch.Tensor.to, dtype=dtype)}
        la = Laplace(net, "classification", "all", "kron", **options)
        la.fit([(x, y), (x.flip(0), y)], n_data=12)
        covariances.append(la.output_moments(x)[1])
    assert covariances[1].dtype == other
    torch.testing.assert_close(covariances[1].to(inside), covariances[0], rtol=1e-4, atol=1e-6)
