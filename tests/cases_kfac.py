"""Small networks with every kind of layer that K-FAC takes, and what may stand between them."""

from collections import UserDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laplace_debias.kfac.engine import kfac_factors
from laplace_debias.kfac.factors import Factors


class _Twice(nn.Module):
    """Calls one layer twice, with an in-place activation after it."""

    def __init__(self):
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.first(x).tanh()
        for _ in range(2):
            h = F.relu_(self.shared(h)) + h
        return self.last(h)


class _Attention(nn.Module):
    """Tokens through a trainable layer, frozen normalisation and attention, then their mean."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)
        self.attend, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)
        for frozen in (self.norm, self.attend):
            frozen.requires_grad_(False)

    def forward(self, x):
        x = x["tokens"] if isinstance(x, UserDict) else x
        h = self.norm(self.embed(x))
        return self.last((h + self.attend(h, h, h)[0]).mean(1))


def conv_net(dim, **kwargs):
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dim]
    pool = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}[dim]
    return nn.Sequential(
        conv(2, 4, 2), nn.ReLU(inplace=True), conv(4, 4, 3, **kwargs), nn.Tanh(),
        pool(2), nn.Flatten(), nn.Linear(4 * 2**dim, 3),
    )  # fmt: skip


def frozen_parts():
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(),
        nn.Linear(48, 4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 3),
    )  # fmt: skip
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    for part in (model[1], model[4].bias, model[6], model[8].weight):
        part.requires_grad_(False)
    return model


CASES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), (3,)),
    "tokens": (_Attention, (5, 3)),
    "twice": (_Twice, (3,)),
    "frozen": (frozen_parts, (2, 6, 6)),
    "conv1d": (lambda: conv_net(1, stride=2, padding=1, dilation=2), (2, 9)),
    "conv2d": (lambda: conv_net(2, stride=(2, 1), padding=(1, 0)), (2, 6, 7)),
    "conv2d groups": (lambda: conv_net(2, groups=2, padding=1), (2, 6, 6)),
    "conv2d dilation": (lambda: conv_net(2, dilation=(1, 2)), (2, 7, 8)),
    "conv2d same": (lambda: conv_net(2, dilation=2, padding="same"), (2, 6, 6)),
    "conv2d circular": (lambda: conv_net(2, padding=1, padding_mode="circular"), (2, 5, 6)),
    "conv2d reflect": (lambda: conv_net(2, padding=2, padding_mode="reflect"), (2, 5, 6)),
    "conv3d": (lambda: conv_net(3, padding=1, stride=2, groups=2), (2, 4, 5, 4)),
}


def make(case, likelihood, n=6, dtype=torch.float64):
    torch.manual_seed(0)
    build, shape = CASES[case]
    model = build().to(dtype)
    x = torch.randn(n, *shape, dtype=dtype)
    y = torch.randint(3, (n,)) if likelihood == "classification" else torch.randn(n, 3, dtype=dtype)
    return model, x, y


def forward_factors(model: nn.Module, x: Tensor, **kwargs) -> Factors:
    """Input factors and outputs from a forward pass alone; the likelihood does not matter."""
    return kfac_factors(model, x, likelihood="regression", outputs=False, **kwargs)
