"""Nothing is checked twice, and nothing that changed is taken for checked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from laplace_debias import Laplace, sweep_prior_precision
from laplace_debias.network.remembered import N_KEPT, recall, remember

X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


class Counting(nn.Module):
    """A network that counts its calls, and may mix its data."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.calls: list[int] = []
        self.mixes = False

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, 3]`` to ``[n, 3]``."""
        self.calls.append(len(x))
        x = x - x.mean(0) if self.mixes else x
        return self.head(torch.tanh(self.body(x)))


def fitted(model: nn.Module, subset: str = "all"):
    la = Laplace(model, "classification", subset, "kron", debias="single")
    la.fit((X, Y), n_data=8)
    return la


def test_predictors_of_one_model_share_their_checks():
    model = Counting()
    la, another = fitted(model), fitted(model)
    model.calls.clear()
    la(X)
    first = len(model.calls)
    for other in (la, another):
        model.calls.clear()
        other.prior_precision = torch.tensor(3.0)
        other(X)
        assert sum(n == len(X) for n in model.calls) == 1 and len(model.calls) <= 2 < first
    sweep_prior_precision(la, (X, Y), [0.1, 1.0])
    assert len(model.calls) <= 4


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_fit_checks_all_anew(subset):
    """A switch that no attribute of the model shows."""
    switch = []

    class Mixing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flip(0) if switch else x)

    model = nn.Sequential(Mixing(3, 4), nn.Tanh(), nn.Linear(4, 3))
    la = fitted(model, subset)
    la(X)
    switch.append(True)
    with pytest.raises(ValueError, match="Expected one row of outputs.*order.*Remedy"):
        la.fit((X, Y), n_data=8)


def change_flag(model: Counting) -> None:
    model.mixes = True


def change_forward(model: Counting) -> None:
    plain = model.body.forward
    model.body.forward = lambda x: plain(x - x.mean(0))


def change_hook(model: Counting) -> None:
    model.body.register_forward_pre_hook(lambda m, args: (args[0] - args[0].mean(0),))


def change_module(model: Counting) -> None:
    class Mixing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    model.body = Mixing(3, 4)
    model.body.requires_grad_(True)


@pytest.mark.parametrize("change", [change_flag, change_forward, change_hook, change_module])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_model_that_changed_is_checked_again(change, subset):
    model = Counting()
    la = fitted(model, subset)
    la(X)
    inner = model if subset == "all" else la.model.model
    change(inner)
    if subset == "all":
        la = Laplace(inner, "classification", "all", "kron", debias="single")
    with pytest.raises(ValueError, match="Expected one row of outputs.*Remedy"):
        la.fit((X, Y), n_data=8)


def test_inputs_of_another_shape_are_another_question():
    net = nn.Linear(3, 2)
    remember(net, "q", X, "yes")
    assert recall(net, "q", X[:2]) == "yes" and recall(net, "other", X) is None
    assert recall(net, "q", X.double()) is None and recall(net, "q", {"x": X}) is None
    net.weight.requires_grad_(False)
    assert recall(net, "q", X) is None


def test_no_more_is_kept_than_a_few():
    net = nn.Linear(3, 2)
    for i in range(N_KEPT + 1):
        remember(net, i, X, i + 1)
    assert recall(net, 0, X) is None and recall(net, N_KEPT, X) == N_KEPT + 1


@pytest.mark.parametrize("n", [4, 5, 8])
@pytest.mark.parametrize("debias", ["single", "two-batch", "crossfit"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_mixing_that_starts_beyond_the_data_that_are_checked_is_refused(n, debias, subset):
    """A fit compares the first datum by itself with the same datum in its mini-batch, for free."""

    class Crowd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0) if len(x) >= n else x)

    model = nn.Sequential(Crowd(3, 4), nn.Tanh(), nn.Linear(4, 3))
    options = {"n_curvature": 16} if debias == "crossfit" else {}
    la = Laplace(model, "classification", subset, "kron", debias=debias, **options)
    batches = [(X, Y), (X + 1, Y)]
    with pytest.raises(ValueError, match="got another output of the first datum.*Remedy"):
        la.fit(batches, n_data=16)
