"""The prior precision of a weight decay, at the stationary points of the optimisers themselves."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from laplace_debias import prior_precision_from_weight_decay

N, DECAY = 40, 0.05


def problem():
    """A convex problem: logistic regression."""
    torch.manual_seed(0)
    x = torch.randn(N, 3).double()
    return nn.Linear(3, 3).double(), x, torch.randint(3, (N,))


def trained(make, reduction="mean", steps=3000):
    """A model at the end of full-batch training, its optimiser, and the sum of its gradients."""
    model, x, y = problem()
    optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction=reduction).backward()
        optimizer.step()
    model.zero_grad()
    F.cross_entropy(model(x), y, reduction="sum").backward()
    return model, optimizer


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, 0.5, momentum=0.9, weight_decay=DECAY)),
        ("adam", lambda p: torch.optim.Adam(p, 0.01, weight_decay=DECAY)),
    ],
)
def test_the_gradient_of_the_posterior_vanishes(name, make, as_object):
    model, optimizer = trained(make)
    how = optimizer if as_object else name
    delta = prior_precision_from_weight_decay(DECAY, N, how)
    for p in model.parameters():
        assert float((p.grad + delta * p).abs().max()) < 1e-4
        assert float((p.grad + 2 * delta * p).abs().max()) > 0.1  # another one does not


def test_a_summed_loss_counts_its_batch():
    model, _ = trained(lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, weight_decay=DECAY), "sum")
    delta = prior_precision_from_weight_decay(DECAY, N, "sgd", "sum", batch_size=N)
    assert float(delta) == pytest.approx(DECAY)
    for p in model.parameters():
        assert float((p.grad + delta * p).abs().max()) < 1e-4


def test_adamw_has_a_precision_for_each_tensor():
    """With a large epsilon its steps are those of gradients, and the layer's mean is exact."""
    model, optimizer = trained(
        lambda p: torch.optim.AdamW(p, 0.5, weight_decay=DECAY, eps=10.0), steps=6000
    )
    delta = prior_precision_from_weight_decay(DECAY, N, optimizer)
    assert delta.shape == (2,)
    for p, d in zip(model.parameters(), delta, strict=True):
        state = optimizer.state[p]
        own = N * DECAY * (state["exp_avg_sq"].sqrt() + 10.0)
        assert float((p.grad + own * p).abs().max()) < 1e-3
        assert float(own.mean()) == pytest.approx(float(d), rel=1e-3)
        assert float((p.grad + N * DECAY * p).abs().max()) > 0.1  # SGD's rule is another's


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 10), "positive weight decay"),
        ((0.1, 10, "adamw"), "for AdamW pass the object itself"),
        ((0.1, 10, "sgd", "sum"), "with the `batch_size`"),
        ((0.1, 10, "sgd", "median"), "reduction 'mean'"),
        ((0.1, 10, torch.optim.AdamW([nn.Parameter(torch.ones(1))])), "after its training"),
        ((0.1, 10, torch.optim.Rprop([nn.Parameter(torch.ones(1))])), "got Rprop"),
    ],
)
def test_what_cannot_be_told_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        prior_precision_from_weight_decay(*arguments)
