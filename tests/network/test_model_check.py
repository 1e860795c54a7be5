"""What a model check reports, and that it leaves no trace."""

import pytest
import torch
from torch import nn

from laplace_debias import Laplace, check_model
from laplace_debias.network.live_bytes import LiveBytes


def test_the_report_tells_shares():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.PReLU(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )
    check = check_model(model, torch.randn(5, 2, 6, 6), "regression")
    status = {layer.name: (layer.status, layer.note) for layer in check.layers}
    assert status["0.weight"] == (
        "approximated", "16 rows per datum, summed by `kfac_approx`, inputs averaged over groups",
    )  # fmt: skip
    assert status["4.weight"] == ("exact", "")
    assert status["1.weight"][0] == "not supported" and "PReLU" in status["1.weight"][1]
    sizes = 4 * 9 + 4 + 4 + 3 * 64 + 3
    assert check.share == (sizes - 4) / sizes


def test_the_check_leaves_the_model_and_the_generator_as_they_were():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 3)).train()
    model[0].bias.requires_grad_(False)
    before, state = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    check_model(model, torch.randn(4, 3, generator=torch.Generator()), "classification")
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.training and model[1].training and not model[0].bias.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Tokens(nn.Module):
    """A residual block over tokens, with functions that are no modules."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 10)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        """Map ``[n, T, 16]`` to ``[n, 10]``."""
        z = torch.tanh(self.embed(x))
        z = z + self.down(torch.relu(self.up(self.norm(z))))
        return self.head(z.mean(1))


NETWORKS = {
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10)
        ),
        (32, 64),
    ),
    "many rows": (
        lambda: nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 10)), (200, 20)
    ),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(784, 10),
        ),
        (64, 3, 16, 16),
    ),
    "tokens": (Tokens, (32, 20, 16)),
}  # fmt: skip


@pytest.mark.parametrize(("make", "shape"), NETWORKS.values(), ids=NETWORKS)
def test_the_memory_is_what_a_fit_and_a_prediction_take(make, shape):
    """Counted tensors that are alive, at their peak."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    y = torch.arange(len(x)) % 10
    check = check_model(model, x, "classification")
    la = Laplace(model, "classification", "all", "kron", debias=True)
    la.memory_budget = 10**10
    with LiveBytes([*model.parameters(), x]) as fit:
        la.fit((x, y), curvature_loader=(x, y), n_data=1000)
    la(x[:2])  # the checks of a new predictor
    with LiveBytes([*model.parameters(), x]) as prediction:
        la(x)
    assert 0.7 < fit.peak / check.fit_bytes < 1.4
    assert 0.7 < prediction.peak / check.predict_bytes < 1.4
