"""From a captured run to contractions, for several posteriors at once, against dense matrices."""

import warnings

import pytest
import torch
from torch import nn

from laplace_debias.network.preserve import differentiable
from laplace_debias.predictive.eigenblocks import eigen_blocks
from laplace_debias.predictive.layer_jacobians import LayerJacobians
from tests.cases_predictive import FALLBACK, STRUCTURED
from tests.fitted_predictive import EXACT, build, double_precision  # noqa: F401
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
