"""Small networks, one for every way a layer can be used."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        """Keep the function."""
        super().__init__()
        self.function = function

    def forward(self, x):
        """Apply it."""
        return self.function(x)


class Attention(nn.Module):
    """Single-head self-attention from Linear layers."""

    def __init__(self, d):
        """Make the projections."""
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.LayerNorm(d)
        self.norm.requires_grad_(False)

    def forward(self, x):
        """Attend."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(torch.softmax(q @ k.mT, -1) @ v)


class Repeated(nn.Module):
    """One Linear and one Conv2d, each called several times at different sizes."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.conv, self.lin, self.head = nn.Conv2d(2, 2, 3), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        """Call them."""
        x = torch.tanh(self.conv(torch.tanh(self.conv(x)))).flatten(1)[:, :4]
        return self.head(torch.tanh(self.lin(torch.tanh(self.lin(x)))))


class Tied(nn.Module):
    """Two Linear layers that share one weight."""

    def __init__(self):
        """Tie them."""
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.b.weight = self.a.weight

    def forward(self, x):
        """Use both."""
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


class UsedOutside(nn.Module):
    """A weight that is also used as a bare tensor."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.lin, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        """Use the transposed weight as well."""
        return self.head(F.linear(torch.tanh(self.lin(x)), self.lin.weight.T))


class Stopped(nn.Module):
    """A layer called without gradients, whose parameters are used once more outside it."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.lin, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        """Stop one gradient."""
        with torch.no_grad():
            gate = torch.sigmoid(self.lin(x))
        return self.head(gate * F.linear(x, self.lin.weight, self.lin.bias))


class Scaled(nn.Linear):
    """A Linear that computes something else."""

    def forward(self, x):
        """Scale the weight."""
        return F.linear(x, 2 * self.weight, self.bias)


class Doubled(nn.Linear):
    """A Linear with more behind it."""

    def forward(self, x):
        """Double what a Linear gives."""
        return 2 * super().forward(x)


class LateBias(nn.Linear):
    """Adds its bias after an activation."""

    def forward(self, x):
        """Weight, activation, bias."""
        return F.linear(x, self.weight).tanh() + self.bias


class PadsItself(nn.Conv2d):
    """A convolution of TensorFlow's, as timm's models have it."""

    def forward(self, x):
        """Pad on two sides."""
        return F.conv2d(F.pad(x, (0, 1, 1, 0)), self.weight, self.bias, 2, groups=self.groups)


class BareParameter(nn.Module):
    """A parameter of the network itself."""

    def __init__(self):
        """Make it."""
        super().__init__()
        self.matrix, self.head = nn.Parameter(torch.randn(4, 3)), nn.Linear(4, 2)

    def forward(self, x):
        """Use it."""
        return self.head(torch.tanh(x @ self.matrix.T))


class Unused(nn.Module):
    """A network with a layer that the outputs do not depend on."""

    def __init__(self, body):
        """Make the layer that is never called."""
        super().__init__()
        self.spare, self.body = nn.Linear(2, 2), body

    def forward(self, x):
        """Leave it out."""
        return self.body(x)


def frozen(model: nn.Module, *names: str) -> nn.Module:
    """Freeze the parameters whose names end like one of ``names``."""
    for name, p in model.named_parameters():
        if name.endswith(names):
            p.requires_grad_(False)
    return model


def _norm(norm: nn.Module) -> nn.Module:
    """A normalisation layer without gradients, with statistics that are not trivial."""
    norm.requires_grad_(False)
    if hasattr(norm, "running_mean"):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return norm


S, L, C2, T, R = nn.Sequential, nn.Linear, nn.Conv2d, nn.Tanh, nn.ReLU

# name -> (model, input shape of one datum)
STRUCTURED = {
    "mlp": lambda: (S(L(4, 5), T(), L(5, 3)), (4,)),
    "inplace": lambda: (S(L(4, 5), R(inplace=True), L(5, 3)), (4,)),
    "tokens": lambda: (S(L(4, 5), T(), Lambda(lambda x: x.mean(1)), L(5, 3)), (6, 4)),
    "two token dims": lambda: (
        S(L(3, 5), T(), Lambda(lambda x: x.sum((1, 2))), L(5, 2)),
        (2, 3, 3),
    ),
    "sequence first": lambda: (
        S(Lambda(lambda x: x.transpose(0, 1)), L(3, 4), T(), Lambda(lambda x: x.mean(0)), L(4, 2)),
        (5, 3),
    ),
    "conv": lambda: (
        S(C2(2, 4, 3, stride=2, padding=1), R(), C2(4, 3, (2, 1)), T(), nn.Flatten(), L(18, 3)),
        (2, 6, 5),
    ),
    "dilated": lambda: (
        S(C2(1, 3, 3, dilation=2, padding=(2, 1)), T(), nn.Flatten(), L(90, 2)),
        (1, 6, 7),
    ),
    "groups": lambda: (
        S(C2(4, 6, 3, groups=2), T(), C2(6, 6, 2, groups=6), T(), nn.Flatten(), L(24, 2)),
        (4, 5, 5),
    ),
    "circular": lambda: (
        S(C2(2, 3, 3, padding=1, padding_mode="circular"), T(), nn.Flatten(), L(48, 2)),
        (2, 4, 4),
    ),
    "reflect": lambda: (
        S(C2(2, 3, 3, padding=(1, 2), padding_mode="reflect"), T(), nn.Flatten(), L(72, 2)),
        (2, 4, 4),
    ),
    "more behind it": lambda: (S(Doubled(4, 3), T(), L(3, 2)), (4,)),
    "pads itself": lambda: (
        S(PadsItself(2, 4, 2), T(), PadsItself(4, 4, 2, groups=4), T(), nn.Flatten(), L(16, 2)),
        (2, 8, 8),
    ),
    "same": lambda: (S(C2(2, 3, (2, 3), padding="same"), T(), nn.Flatten(), L(48, 2)), (2, 4, 4)),
    "one position conv": lambda: (S(C2(2, 3, 4), T(), nn.Flatten(), L(3, 2)), (2, 4, 4)),
    "many positions": lambda: (S(C2(1, 2, 2), T(), nn.Flatten(), L(450, 2)), (1, 16, 16)),
    "repeated": lambda: (Repeated(), (2, 6, 6)),
    "tied": lambda: (Tied(), (4,)),
    "weights only": lambda: (frozen(S(L(4, 5), T(), L(5, 3)), "bias"), (4,)),
    "no bias": lambda: (
        S(C2(2, 3, 3, bias=False), T(), nn.Flatten(), L(12, 2, bias=False)),
        (2, 4, 4),
    ),
    "biases only": lambda: (frozen(S(L(4, 5), T(), L(5, 3)), "weight"), (4,)),
    "first frozen": lambda: (frozen(S(L(4, 5), T(), L(5, 3)), "0.weight", "0.bias"), (4,)),
    "last frozen": lambda: (frozen(S(L(4, 5), T(), L(5, 3)), "2.weight", "2.bias"), (4,)),
    "batch norm": lambda: (
        S(C2(1, 3, 2), _norm(nn.BatchNorm2d(3)), R(), nn.Dropout(0.5), nn.Flatten(), L(27, 2)),
        (1, 4, 4),
    ),
    "attention": lambda: (S(Attention(4), Lambda(lambda x: x[:, 0]), L(4, 3)), (5, 4)),
    "one element": lambda: (S(L(1, 1), T(), L(1, 1)), (1,)),
    "unused layer": lambda: (Unused(L(4, 3)), (4,)),
    "only the unused layer": lambda: (Unused(L(4, 3).requires_grad_(False)), (4,)),
}

# name -> (model, input shape of one datum, name of the module that the warning names)
FALLBACK = {
    "multi-head attention": lambda: (
        S(
            Lambda(lambda x: (x, x, x)),
            _MultiHead(),
            Lambda(lambda x: x.mean(1)),
            L(4, 2),
        ),
        (3, 4),
        "1.mha",
    ),
    "conv1d": lambda: (S(nn.Conv1d(2, 3, 2), T(), nn.Flatten(), L(9, 2)), (2, 4), "0"),
    "used outside": lambda: (UsedOutside(), (4,), "lin"),
    "overridden forward": lambda: (S(Scaled(4, 3), T(), L(3, 2)), (4,), "0"),
    "late bias": lambda: (S(LateBias(4, 3), T(), L(3, 2)), (4,), "0"),
    "bare parameter": lambda: (BareParameter(), (3,), "the model itself"),
    "without gradients": lambda: (Stopped(), (4,), "lin"),
    "merged batch": lambda: (
        S(
            Lambda(lambda x: x.flatten(0, 1)),
            L(3, 4),
            T(),
            Lambda(lambda x: x.unflatten(0, (-1, 5)).mean(1)),
            L(4, 2),
        ),
        (5, 3),
        "1",
    ),
}


class _MultiHead(nn.Module):
    """PyTorch's attention, whose output projection is not called as a module."""

    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, qkv):
        return self.mha(*qkv, need_weights=False)[0]
