"""Which parameters are Bayesian, without freezing anything for good."""

import pytest
import torch
from torch import nn

from laplace_debias import Laplace
from laplace_debias.network.selection import select_parameters, selected
from laplace_debias.posterior.kron import DebiasedKronLaplace


class Adapted(nn.Module):
    """A frozen layer with an adapter, an embedding that no curvature is known for, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        """Tokens ``[n, T]`` to ``[n, 3]``."""
        h = self.table(x)
        return self.head(torch.tanh(self.base(h) + self.lora_B(self.lora_A(h))).mean(1))


def model():
    torch.manual_seed(0)
    return Adapted()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(7, (12, 5), generator=g), torch.randint(3, (12,), generator=g)


HEAD, LORA = ["head.weight", "head.bias"], ["lora_A.weight", "lora_B.weight"]


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("lora", LORA),
        ("head", HEAD),
        ("base", ["base.weight", "base.bias"]),
        ("*.bias", ["base.bias", "head.bias"]),
        (["head", "lora"], [*LORA, *HEAD]),
        ("head.bias", ["head.bias"]),
    ],
)
def test_words_names_and_patterns(word, names):
    assert select_parameters(model(), word) == names


def test_nothing_said_means_what_requires_a_gradient():
    assert select_parameters(model(), None) == ["table.weight", *LORA, *HEAD]


@pytest.mark.parametrize("word", ["lore", "heads", "0.weight", ["head", "tail"]])
def test_a_word_that_means_nothing_is_refused(word):
    with pytest.raises(ValueError, match="means none of the model's 7. Remedy: e.g. one of"):
        select_parameters(model(), word)


@pytest.mark.parametrize("word", ["lora", "head", ["base.weight", "head"]])
def test_a_posterior_over_some_parameters_is_that_of_a_frozen_model(word):
    net, twin = model(), model()
    before = [p.requires_grad for p in net.parameters()]
    la = Laplace(net, "classification", "all", "kron", debias=True, parameters=word)
    assert [p.requires_grad for p in net.parameters()] == before
    la.fit(batch(1), curvature_loader=batch(2), n_data=50)
    names = select_parameters(net, word)
    for name, p in twin.named_parameters():
        p.requires_grad_(name in names)
    other = Laplace(twin, "classification", "all", "kron", debias=True)
    other.fit(batch(1), curvature_loader=batch(2), n_data=50)
    x = batch(3)[0]
    torch.testing.assert_close(la(x), other(x))
    assert la.parameter_names == names and la.n_params == other.n_params
    samples = [each.sample(3, torch.Generator().manual_seed(0)) for each in (la, other)]
    torch.testing.assert_close(*samples)
    assert [p.requires_grad for p in net.parameters()] == before


def test_what_requires_a_gradient_is_put_back_when_something_raises():
    net = model()
    before = [p.requires_grad for p in net.parameters()]
    with pytest.raises(ValueError, match="Embedding"):
        Laplace(net, "classification", "all", "kron", debias=True, parameters="table")
    with pytest.raises(ZeroDivisionError), selected(net, ["head.bias"]):
        raise ZeroDivisionError
    la = DebiasedKronLaplace(net, "classification", parameters="head")
    with pytest.raises(ValueError, match="Expected"):
        la.fit((batch(1)[0], batch(1)[1] + 3), curvature_loader=batch(2), n_data=50)
    assert [p.requires_grad for p in net.parameters()] == before


def test_a_last_layer_chooses_for_itself():
    with pytest.raises(ValueError, match="parameters='head'"):
        Laplace(model(), "classification", debias=True, parameters="head")
