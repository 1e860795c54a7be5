"""A problem of twelve made images, small enough for dense oracles."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from examples.classifiers import Problem


def made_problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4, bias=False))
    model[0].bias.requires_grad_(False)
    x, y = torch.randn(12, 1, 3, 3), torch.arange(12) % 4
    return Problem(model, x, y, DataLoader(TensorDataset(x, y), batch_size=5))
