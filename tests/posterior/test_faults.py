"""An exception at every call of the model leaves model, posterior and random state untouched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from laplace_debias import Laplace, sweep_prior_precision

X, Y = torch.randn(20, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
BATCHES = [(X[:10], Y[:10]), (X[10:], Y[10:])]
FEW = (X[:6], Y[:6])


class Failing(nn.Module):
    """A network with BatchNorm and an in-place activation that raises at its k-th call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 3, bias=False), nn.Linear(8, 3)
        self.norm = nn.BatchNorm2d(2).requires_grad_(False)
        self.fails_at: int | None = None
        self.n_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, 1, 4, 4]`` to ``[n, 3]``."""
        self.n_calls += 1
        if self.n_calls == self.fails_at:
            raise ZeroDivisionError("injected")
        return self.head(torch.relu_(self.norm(self.conv(x))).flatten(1))


def state(la, model) -> list:
    """Everything that must not change, as tensors and plain values."""
    parts = [p.detach().clone() for p in model.parameters()]
    parts += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    parts += [b.clone() for b in model.buffers()]
    parts += [la.H.to_matrix(), la.prior_precision.clone(), la.loss, torch.get_rng_state()]
    parts += [[m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]]
    return [*parts, [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]]


CALLS = {
    "fit": lambda la: la.fit(BATCHES, n_data=60),
    "glm": lambda la: la(X[:4]),
    "nn": lambda la: la(
        X[:4],
        pred_type="nn",
        link_approx="mc",
        n_samples=3,
        generator=torch.Generator().manual_seed(0),
    ),
    "sweep": lambda la: sweep_prior_precision(la, FEW, [0.1, 1.0]),
    "grid search": lambda la: la.optimize_prior_precision(
        method="gridsearch", val_loader=FEW, grid_size=3
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("debias", ["single", True, "crossfit"])
@pytest.mark.filterwarnings("ignore:The best 'loss' lies on the edge")
def test_a_fault_at_every_call_of_the_model_changes_nothing(debias, name):
    torch.manual_seed(0)
    model = Failing().train()
    model(X).sum().backward()  # statistics and gradients of the user's own
    generator = torch.Generator().manual_seed(0)
    la = Laplace(model, "classification", "all", "kron", debias=debias, generator=generator)
    la.fit(BATCHES, n_data=50)
    n_faults = 0
    while True:
        la.prior_precision = 1.0  # so that every prediction makes its predictor anew
        before = state(la, model)
        model.n_calls, model.fails_at = 0, n_faults + 1
        try:
            CALLS[name](la)
            break
        except Exception as error:
            assert "injected" in str(error)
        for was, now in zip(before, state(la, model), strict=True):
            assert torch.equal(was, now) if isinstance(was, Tensor) else was == now
        n_faults += 1
    assert n_faults >= 3
