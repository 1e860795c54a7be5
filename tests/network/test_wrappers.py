"""Wrapped networks: understood, or refused by name."""

import pytest
import torch
from torch import nn

from laplace_debias import Laplace
from laplace_debias.network.wrappers import unwrapped


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
