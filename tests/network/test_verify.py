"""What a fit refuses, by name; the numbers behind it are in ``test_check.py``."""

import pytest
import torch
from laplace.curvature import AsdlGGN
from torch import nn
from torch.nn import functional as F

from laplace_debias import Laplace
from laplace_debias.network.verify import verify_layers


class Padding(nn.Conv2d):
    """A convolution that pads its input itself."""

    def forward(self, x):
        """Pad, and convolve."""
        return super().forward(F.pad(x, (1, 1, 1, 1)))


def net():
    return nn.Sequential(Padding(1, 2, 3), nn.Flatten(), nn.Linear(32, 2))


def test_the_parameters_that_are_reached_are_named():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    assert verify_layers(model, torch.randn(4, 3)) == {"0.weight", "1.weight", "1.bias"}


def test_backends_that_do_not_look_inside_refuse_layers_with_their_own_forward():
    x, y = torch.randn(4, 1, 4, 4), torch.arange(4) % 2
    la = Laplace(net(), "classification", "all", "kron", debias="single", backend=AsdlGGN)
    with pytest.raises(ValueError, match=r"0.weight \(Padding\).*leave `backend` out"):
        la.fit((x, y), n_data=10)
    assert "0.weight" in verify_layers(net(), x)
