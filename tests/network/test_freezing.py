"""What has no known curvature is named, with the reason, and can be frozen."""

import pytest
import torch
from torch import nn

from laplace_debias import Laplace, check_model
from laplace_debias.network.freezing import (
    FreezeSummary,
    check_supported,
    freeze_unsupported,
    unsupported_parameters,
    unwrapped,
)
from laplace_debias.network.ownership import kfac_layers, owned_parameters


def mixed():
    """Layers that K-FAC knows beside some that it does not."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.PReLU(2), nn.Flatten(), nn.Linear(8, 2))
    net.register_parameter("free", nn.Parameter(torch.ones(3)))
    return net


def test_what_kfac_cannot_represent_is_named_and_can_be_frozen(capsys):
    net = mixed()
    names = ["free", "1.weight"]
    assert unsupported_parameters(net) == names
    with pytest.raises(ValueError, match=r"'1' \(PReLU\).*freeze_unsupported.*parameters="):
        check_supported(net)
    with pytest.raises(ValueError, match=r"1.weight \(PReLU\).*requires_grad_\(False\)"):
        owned_parameters(net)
    summary = freeze_unsupported(net)
    assert summary == FreezeSummary(("free", "1"), {"free": 3, "PReLU": 2}, 38, 43)
    assert capsys.readouterr().out == f"{summary}\n"
    assert str(summary) == ("frozen: free 3, PReLU 2; 38 of 43 parameters (88.4%) stay Bayesian")
    check_supported(net)
    assert [p.name for p in owned_parameters(net)] == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert [n for n, p in net.named_parameters() if not p.requires_grad] == names
    assert freeze_unsupported(net).layers == () and "nothing" in capsys.readouterr().out


def test_shared_weights_are_unsupported_for_whole_backends():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    net[1].weight = net[0].weight
    assert unsupported_parameters(net) == ["0.weight"]
    with pytest.raises(ValueError, match="trainable Conv2d or Linear layer, got none among"):
        check_supported(nn.Sequential(nn.Conv1d(1, 1, 1)), (nn.Linear, nn.Conv2d))


class Attends(nn.Module):
    """Attention with packed projections."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        """``[n, T, 4]`` to ``[n, 2]``."""
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def test_packed_attention_is_named_with_what_to_do():
    net = Attends()
    assert "attention.out_proj.weight" in unsupported_parameters(net)  # used without its module
    assert list(kfac_layers(net)) == ["head"]
    with pytest.raises(ValueError, match="MultiheadAttention.*packed projections.*nn.Linear for q"):
        Laplace(net, "classification", "all", "kron", debias=True)
    check = check_model(net, torch.randn(3, 5, 4), "classification")
    assert "write the attention with nn.Linear" in str(check)
    summary = freeze_unsupported(net)
    assert summary.kinds == {"MultiheadAttention": 80}
    assert "packed projections" in str(summary)


def test_embeddings_say_why():
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match="Embedding.*looks its rows up.*freeze it"):
        check_supported(net)


class FSDPModule(nn.Module):
    """Has the name of what torch's `fully_shard` mixes into a module's class."""


class DTensor(nn.Parameter):
    """Has the name of torch's tensor that is spread over devices."""


def test_spread_parameters_are_refused():
    class Sharded(FSDPModule, nn.Linear):
        pass

    spread = nn.Linear(1, 1)
    spread.weight = DTensor(torch.ones(1, 1))
    for model, name in ((nn.Sequential(Sharded(1, 1)), "FSDPModule"), (spread, "DTensor")):
        with pytest.raises(ValueError, match=f"spread over processes .{name}.*Remedy"):
            Laplace(model, "regression", "all", "kron", debias=True)


def test_others_are_left_as_they_are():
    net = nn.Linear(1, 1)
    assert unwrapped(net) is net
