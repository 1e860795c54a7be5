"""Odd but reasonable models: the posterior of an ordinary network of the same function, or errors.

The twin is `head(tanh(body(x)))` in double precision; each model here computes the same by other
means, and must have its factors and its predictions, or say what to do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from laplace_debias import Laplace

N = 12
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(N, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Net(nn.Module):
    """Two linear layers and what is done with them."""

    def __init__(self, function: Callable[[Net, Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 2)
        self.double()

    def forward(self, x: Tensor) -> object:
        """Whatever the function says."""
        return self.function(self, x)


def plain(net: Net, x: Tensor) -> Tensor:
    return net.head(torch.tanh(net.body(x)))


class OwnTanh(torch.autograd.Function):
    """A function with a derivative of its own, which can be taken once."""

    @staticmethod
    def forward(ctx, x):
        """Keep the result."""
        ctx.save_for_backward(y := torch.tanh(x))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        """Of tanh."""
        (y,) = ctx.saved_tensors
        return g * (1 - y**2)


def in_place_at_the_end(net: Net, x: Tensor) -> Tensor:
    out = net.head(torch.tanh_(net.body(x)))
    return out.add_(1.0).sub_(1.0)


def into_a_buffer(net: Net, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 2, dtype=x.dtype)
    out[:] = plain(net, x)
    return out


def one_by_one(net: Net, x: Tensor) -> Tensor:
    return torch.stack([plain(net, row) for row in x])


def checkpointed(net: Net, x: Tensor, reentrant: bool = False) -> Tensor:
    return net.head(checkpoint(lambda x: torch.tanh(net.body(x)), x, use_reentrant=reentrant))


def with_and_without_hook(net: Net, x: Tensor) -> Tensor:
    return net.head(torch.tanh(net.body(x)) + net.body.forward(x))


def without_gradients(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.body(x)
    return net.head(torch.tanh(h))


def restless(net: Net, x: Tensor) -> Tensor:
    net.n_calls = getattr(net, "n_calls", 0) + 1
    return plain(net, x) * net.n_calls


SAME = {
    "checkpointed": checkpointed,
    "own derivative": lambda net, x: net.head(OwnTanh.apply(net.body(x))),
    "in place at the end": in_place_at_the_end,
    "into a buffer": into_a_buffer,
    "one by one": one_by_one,
    "logits in a dict": lambda net, x: {"logits": plain(net, x), "loss": None},
    "first of a tuple": lambda net, x: (plain(net, x), x),
    "dropout that is off": lambda net, x: net.head(F.dropout(torch.tanh(net.body(x)), 0.0)),
    "expanded": lambda net, x: plain(net, x[:, None].expand(-1, 3, -1)[:, 1]),
}
REFUSED = {
    "checkpointed without gradients": (
        lambda net, x: checkpointed(net, x, True),
        "no_grad|use_reentrant",
    ),
    "no hook": (lambda net, x: net.head(net.body.forward(x)), r"body.weight \(Linear\)"),
    "with and without hook": (with_and_without_hook, r"body.weight \(Linear\)"),
    "without gradients": (without_gradients, r"body.weight \(Linear\).*no_grad"),
    "random": (
        lambda net, x: net.head(F.dropout(torch.tanh(net.body(x)), 0.5)),
        "draws random numbers",
    ),
    "over the data": (lambda net, x: net.head(net.body(x).softmax(0)), "treat each datum|together"),
    "other from call to call": (restless, "follow the order"),
    "input in place": (lambda net, x: plain(net, x.mul_(2)), "one row of outputs"),
    "another dict": (lambda net, x: {"y": plain(net, x)}, r"output=lambda out"),
}


def moments(function: Callable, subset: str = "all") -> list[Tensor]:
    la = Laplace(Net(function), "regression", subset, "kron", debias=True)
    x = X.clone()  # one of the models changes it
    la.fit([(x[:6], Y[:6]), (x[6:], Y[6:])], n_data=N)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the slow, exact way says so
        return [la.H.to_matrix(), *la.output_moments(X[:4])]


@pytest.mark.parametrize(
    ("name", "subset"),
    [(name, "all") for name in SAME]
    + [(name, "last_layer") for name in SAME if name != "one by one"],  # called more than once
)
def test_the_posterior_is_that_of_the_plain_network(name, subset):
    for got, expected in zip(moments(SAME[name], subset), moments(plain, subset), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", REFUSED)
def test_what_factors_do_not_explain_is_refused(name):
    function, message = REFUSED[name]
    with pytest.raises((ValueError, RuntimeError), match=f"(?s)Expected.*({message})"):
        moments(function)


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_tensors_of_two_layers_are_refused_by_name(kind):
    net = Net(lambda net, x: net.head(torch.tanh(net.more(torch.tanh(net.body(x))))))
    net.more = nn.Linear(5, 5).double()
    if kind == "weight":
        net.body = nn.Linear(5, 5).double()
    setattr(net.more, kind, getattr(net.body, kind))
    with pytest.raises(ValueError, match="'body' .Linear with a shared weight"):
        Laplace(net, "regression", "all", "kron", debias=True)


@pytest.mark.parametrize("data", [(X.numpy(), Y.numpy()), (X.tolist(), Y.tolist())])
def test_mini_batches_that_are_no_tensors_are_refused(data):
    la = Laplace(Net(plain), "regression", "all", "kron", debias="single")
    with pytest.raises(ValueError, match=r"Expected the .* of a mini-batch.*Remedy.*DataLoader"):
        la.fit([data], n_data=N)
