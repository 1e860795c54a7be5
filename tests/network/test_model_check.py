"""What a model check reports, and that it leaves no trace."""

import torch
from torch import nn

from laplace_debias import check_model


def test_the_report_tells_shares_and_memory():
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
    squares = 4**2 + 9**2 + 4**2 + 3**2 + 64**2 + 3**2
    held = (3 * 64 + 64 + 3) * 4  # conv, norm and activation; flattened; linear
    assert check.fit_bytes == 5 * held + squares * (3 * 4 + 8)
    assert check.predict_bytes == 5 * (held + 3 * (64 + 3) * 4) + squares * 4


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
