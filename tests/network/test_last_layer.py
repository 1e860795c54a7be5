"""A last layer is f = W phi + b for any W and b, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from laplace.utils import FeatureExtractor
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from laplace_debias import Laplace
from laplace_debias.network.last_layer import check_last_layer

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double()
Y = torch.arange(5) % 3


class Net(nn.Module):
    """Features and a head, joined by a function."""

    def __init__(self, head: nn.Module, join: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.join = nn.Linear(4, 5), head, join

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, 4]`` to ``[n, 3]``."""
        return self.join(self, x)


def plain(net: Any, x: Tensor) -> Tensor:
    return net.head(torch.tanh(net.body(x)))


class Standardised(nn.Linear):
    """Takes the mean from each row of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return F.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)


class Pruned(nn.Linear):
    """Masks a weight that is zero where it is masked: now, nothing changes."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.mask = (torch.arange(self.weight.numel()) % 2).reshape(self.weight.shape)
        self.weight.data *= self.mask

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return F.linear(x, self.mask * self.weight, self.bias)


class ScaledInput(nn.Linear):
    """Scales its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return super().forward(3 * x)


def hooked() -> nn.Module:
    head = nn.Linear(5, 3)
    head.register_forward_hook(lambda layer, inputs, output: 2 * output)
    return head


def hooked_before() -> nn.Module:
    head = nn.Linear(5, 3)
    head.register_forward_pre_hook(lambda layer, inputs: (2 * inputs[0],))
    return head


def tied(net: Any, x: Tensor) -> Tensor:
    return net.head(torch.tanh(net.body(x) + net.head.weight.mean()))


def twice(net: Any, x: Tensor) -> Tensor:
    z = torch.tanh(net.body(x))
    return net.head(z + F.pad(net.head(z), (0, 2)))


REFUSED = {
    "standardised": (lambda: Standardised(5, 3), plain, "outputs that differ"),
    "pruned": (lambda: Pruned(5, 3), plain, "outputs that differ"),
    "scaled input": (lambda: ScaledInput(5, 3), plain, "outputs that differ"),
    "hook": (hooked, plain, "outputs that differ"),
    "hook before": (hooked_before, plain, "outputs that differ"),
    "temperature": (lambda: nn.Linear(5, 3), lambda *a: plain(*a) / 1.5, "outputs that differ"),
    "tied": (lambda: nn.Linear(5, 3), tied, "an input that depends"),
    "twice": (lambda: nn.Linear(5, 3), twice, "an input that depends"),
}


@pytest.mark.parametrize(("head", "join", "why"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("name", [None, "head"])
def test_other_last_layers_are_refused_by_name(head, join, why, name):
    torch.manual_seed(0)
    net = Net(head(), join).double()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    la = Laplace(net, "classification", "last_layer", "kron", debias="single", last_layer_name=name)
    with pytest.raises(ValueError, match=f"its last layer 'head'.*{why}.*Remedy"):
        la.fit((X, Y), n_data=9)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


ORDINARY = (
    lambda: nn.Linear(5, 3),
    lambda: nn.Linear(5, 3, bias=False),
    lambda: parametrizations.weight_norm(nn.Linear(5, 3)),
)


@pytest.mark.parametrize("head", ORDINARY)
def test_ordinary_last_layers_pass(head):
    torch.manual_seed(0)
    net = FeatureExtractor(Net(head(), plain).double(), last_layer_name="head")
    assert check_last_layer(net, X) is None
