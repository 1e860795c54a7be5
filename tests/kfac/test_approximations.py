"""Expand, reduce and BackPACK's K-FAC against dense oracles, BackPACK and curvlinops."""

import copy

import pytest
import torch
from backpack import backpack, extend
from backpack.extensions import KFLR
from curvlinops import KFACLinearOperator
from torch import nn

from laplace_debias.kfac.engine import kfac_factors


class Tokens(nn.Module):
    """Linear layers over tokens, averaged before the head: linear and alike in its positions."""

    def __init__(self, activation=nn.Tanh):
        super().__init__()
        self.body, self.act, self.head = nn.Linear(3, 4), activation(), nn.Linear(4, 3)

    def forward(self, x):
        """Map ``[n, T, 3]`` to ``[n, 3]``."""
        return self.head(self.act(self.body(x)).mean(1))


class Twice(nn.Module):
    """Calls one layer twice."""

    def __init__(self):
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        """Map ``[n, 3]`` to ``[n, 3]``."""
        h = self.first(x).tanh()
        return self.last(self.shared(self.shared(h).tanh()).tanh())


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), (3,)),
    "tokens": (Tokens, (5, 3)),
    "conv1d": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(15, 3)
        ),
        (2, 5),
    ),
    "conv2d": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, stride=2, padding=1, padding_mode="reflect"),
            nn.Tanh(),
            nn.Conv2d(3, 2, 2),
            nn.Flatten(),
            nn.Linear(8, 3),
        ),
        (2, 6, 6),
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)),
        (1, 3, 3, 3),
    ),
    "twice": (Twice, (3,)),
}


def problem(name, likelihood="classification", n=6):
    make, shape = NETWORKS[name]
    torch.manual_seed(1)
    model = make().double()
    X = torch.randn(n, *shape, dtype=torch.float64)
    return model, X, torch.arange(n) % 3 if likelihood == "classification" else torch.randn(n, 3)


def rows_by_datum(model, layer, x, v):
    """Inputs and output gradients of one datum in a layer, ``[positions, d]``, call by call."""
    calls = []

    def hook(module, args, output):
        output.retain_grad()
        calls.append((args[0].detach(), output))

    handle = layer.register_forward_hook(hook)
    (model(x[None])[0] @ v).backward()
    handle.remove()
    model.zero_grad()
    A, G = [], []
    for a, out in calls:
        g = out.grad
        if isinstance(layer, nn.Linear):
            A.append(a.reshape(-1, a.shape[-1]))
            G.append(g.reshape(-1, g.shape[-1]))
        else:
            d = a.ndim - 2
            pads = [p for p in layer.padding for _ in range(2)]
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            a = nn.functional.pad(a, pads, mode=mode)
            for dim in range(d):
                a = a.unfold(2 + dim, layer.kernel_size[dim], layer.stride[dim])
            a = a.movedim(1, 1 + d).flatten(1, d).flatten(2)  # [1, positions, C * k]
            A.append(a[0])
            G.append(g.flatten(2)[0].T)
    return torch.cat(A), torch.cat(G)


def dense(model, X, approx, likelihood):
    """B and A of every layer by the definitions, datum by datum and vector by vector."""
    blocks = []
    for layer in [m for m in model.modules() if hasattr(m, "weight")]:
        B = A = 0
        for x in X:
            f = model(x[None])[0].detach()
            if likelihood == "classification":
                p = f.softmax(0)
                lam, U = torch.linalg.eigh(torch.diag(p) - torch.outer(p, p))
                V = (U * lam.clamp(min=0).sqrt()).T
            else:
                V = torch.eye(len(f), dtype=f.dtype)
            for v in V:
                a, g = rows_by_datum(model, layer, x, v)
                s = g.sum(0)
                B = B + (g.T @ g if approx == "expand" else torch.outer(s, s))
            mean = a.mean(0)
            A = A + {
                "expand": a.T @ a / len(a),
                "reduce": torch.outer(mean, mean),
                "backpack": a.T @ a,
            }[approx] / len(X)
        blocks += [[B, A], [B]]
    return blocks


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("approx", ["expand", "reduce", "backpack"])
@pytest.mark.parametrize("name", NETWORKS)
def test_factors_equal_their_definitions(name, approx, likelihood):
    model, X, _ = problem(name, likelihood)
    factors = kfac_factors(model, X, likelihood=likelihood, kfac_approx=approx)
    for block, expected in zip(factors.blocks, dense(model, X, approx, likelihood), strict=True):
        for got, wanted in zip(block, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


def zero_padding(model):
    """BackPACK and curvlinops know no other."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and layer.padding_mode != "zeros":
            layer.padding_mode = "zeros"


@pytest.mark.parametrize("name", ["mlp", "conv2d"])
def test_backpack_equals_kflr(name):
    model, X, y = problem(name)
    zero_padding(model)
    theirs = extend(copy.deepcopy(model))
    loss = extend(nn.CrossEntropyLoss(reduction="sum"))
    with backpack(KFLR()):
        loss(theirs(X), y).backward()
    ours = kfac_factors(model, X, y, likelihood="classification", kfac_approx="backpack")
    for block, p in zip(ours.blocks, theirs.parameters(), strict=True):
        expected = torch.kron(*p.kflr) if len(p.kflr) == 2 else p.kflr[0]
        got = torch.kron(*block) if len(block) == 2 else block[0]
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "tokens", "conv2d"])
def test_reduce_equals_curvlinops(name):
    model, X, y = problem(name)
    zero_padding(model)
    theirs = copy.deepcopy(model)
    operator = KFACLinearOperator(
        theirs,
        nn.CrossEntropyLoss(reduction="sum"),
        list(theirs.parameters()),
        [(X, y)],
        fisher_type="type-2",
        kfac_approx="reduce",
        separate_weight_and_bias=True,
        check_deterministic=False,
    )
    dense_theirs = operator @ torch.eye(operator.shape[1], dtype=torch.float64)
    ours = kfac_factors(model, X, y, likelihood="classification", kfac_approx="reduce")
    start = 0
    for block in ours.blocks:
        got = torch.kron(*block) if len(block) == 2 else block[0]
        stop = start + len(got)
        torch.testing.assert_close(got, dense_theirs[start:stop, start:stop], rtol=1e-9, atol=1e-12)
        start = stop


def test_reduce_is_exact_for_a_linear_map_that_treats_positions_alike():
    """One datum, a token layer, the mean over tokens, a linear head: the GGN itself."""
    torch.manual_seed(0)
    model = Tokens(nn.Identity).double()
    x = torch.randn(1, 5, 3, dtype=torch.float64)
    J = torch.autograd.functional.jacobian(
        lambda w: torch.func.functional_call(model, {"body.weight": w}, (x,))[0],
        model.body.weight.detach(),
    ).flatten(1)
    B, A = kfac_factors(model, x, likelihood="regression", kfac_approx="reduce").blocks[0]
    torch.testing.assert_close(torch.kron(B, A), J.T @ J)
    B, A = kfac_factors(model, x, likelihood="regression").blocks[0]  # expand is not
    assert (torch.kron(B, A) - J.T @ J).norm() > 0.1 * J.norm() ** 2


class Merged(nn.Module):
    """Merges data with positions before its layer."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        """Map ``[n, T, 3]`` to ``[n, 3]``."""
        return self.head(self.body(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1))


@pytest.mark.parametrize("approx", ["reduce", "backpack"])
def test_layers_that_merge_data_with_positions_are_refused_by_name(approx):
    model, X = Merged(), torch.randn(4, 5, 3)
    with pytest.raises(ValueError, match="'body.*'.*first dimension.*Remedy"):
        kfac_factors(model, X, likelihood="regression", kfac_approx=approx)
    kfac_factors(model, X, likelihood="regression")
    with pytest.raises(ValueError, match="kfac_approx.*'expand', 'reduce', 'backpack'"):
        kfac_factors(model, X, likelihood="regression", kfac_approx="sum")
