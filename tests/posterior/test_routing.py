"""Data-dependent routing: every method sees the data that reach a layer, and says if none do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laplace_debias import Laplace
from tests import oracles
from tests.network.test_check import assert_prediction, batches, routed
from tests.posterior.test_architectures import assert_posterior, heldout

N = 50
LEFT, RIGHT = -1.0, 1.0


def data(*sides: list[float]) -> list[tuple[Tensor, Tensor]]:
    """Mini-batches of six data whose first input sends them left or right."""
    found = []
    for (X, y), side in zip(batches(3), sides, strict=True):
        X = X.clone()
        X[:, 0] = X[:, 0].abs() * torch.tensor(side).double()
        found.append((X, y))
    return found


def role(model: torch.nn.Module, X: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor, int]]:
    """B as a sum over all data, scaled to N, A as a mean over the rows a layer sees, and those."""
    right, blocks = X[:, 0] > 0, {}
    for name, reach in (("left", ~right), ("right", right), ("head", right | ~right)):
        layer, A, B = model.get_submodule(name), torch.zeros(1).double(), torch.zeros(1).double()
        for x, target in zip(X[reach], y[reach], strict=True):
            frozen = [p for n, p in model.named_parameters() if not n.startswith(name)]
            for p in frozen:
                p.requires_grad_(False)
            a, g, f = oracles.layer_io(model, layer, x)
            for p in frozen:
                p.requires_grad_(True)
            H = oracles.output_hessian(f, target, "classification", "ggn")
            A, B = A + a.T @ a, B + sum(g_t.T @ H @ g_t for g_t in g)
        blocks[name] = (N / len(y) * B, A / max(1, int(reach.sum())), int(reach.sum()))
    return blocks


def flat(blocks: dict[str, tuple[Tensor, Tensor, int]]) -> list[list[Tensor]]:
    """As a posterior has them: weight and bias of each layer."""
    return [block for B, A, _ in blocks.values() for block in ([B, A], [B])]


MIXED = [LEFT, LEFT, LEFT, RIGHT, LEFT, RIGHT]


@pytest.mark.parametrize("second", [MIXED, [RIGHT] * 4 + [LEFT] * 2])
def test_two_batch_takes_the_rows_that_reach_a_layer(second):
    model, pairs = routed(), data(MIXED, second)
    la = Laplace(model, "classification", "all", "kron", debias=True)
    la.fit(pairs, n_data=N)
    one, two = (flat(role(model, X, y)) for X, y in pairs)
    assert_posterior(la, one, two, "two-batch", torch.float64)
    assert_prediction(la, torch.cat([X for X, _ in pairs])[3:10])


def test_two_batch_finds_no_curvature_where_no_datum_of_the_second_goes():
    model, pairs = routed(), data(MIXED, [LEFT] * 6)
    la = Laplace(model, "classification", "all", "kron", debias=True)
    la.fit(pairs, n_data=N)
    names = dict(zip(la.parameter_names, la.H.eigenvalues, strict=True))
    assert all((lam == 0).all() for lam in names["right.weight"] + names["right.bias"])
    assert all((lam > 0).any() for lam in names["left.weight"])


@pytest.mark.parametrize("debias", ["two-batch", "crossfit"])
def test_layers_that_the_first_mini_batch_does_not_reach_are_refused_by_name(debias):
    la = Laplace(routed(), "classification", "all", "kron", debias=debias)
    with pytest.raises(ValueError, match="right.weight.*Remedy"):
        la.fit(data([LEFT] * 6, MIXED), n_data=N)


def test_crossfit_weighs_folds_by_the_rows_that_reach_a_layer():
    """Two of six and four of six data reach an expert: the pooled A is the mean of six rows."""
    model, pairs = routed(), data(MIXED, [RIGHT] * 4 + [LEFT] * 2)
    la = Laplace(model, "classification", "all", "kron", debias="crossfit")
    la.fit(pairs, n_data=N)
    one, two = (role(model, X, y) for X, y in pairs)
    blocks = dict(
        zip(la.parameter_names, zip(la.H.eigenvectors, la.H.eigenvalues, strict=True), strict=True)
    )
    for name in ("left", "right", "head"):
        (B_1, A_1, n_1), (B_2, A_2, n_2) = one[name], two[name]
        (_, Q_A), (lam_B, lam_A) = blocks[f"{name}.weight"]
        inside = Q_A.T @ (n_1 * A_1 + n_2 * A_2) @ Q_A
        torch.testing.assert_close(inside, torch.diag(inside.diagonal()), rtol=0, atol=1e-9)
        torch.testing.assert_close(lam_A, heldout(A_1, A_2, n_1 / (n_1 + n_2)))
        torch.testing.assert_close(lam_B, heldout(B_1, B_2))
        torch.testing.assert_close(lam_A.sum(), inside.trace() / (n_1 + n_2))


def test_crossfit_refuses_a_layer_that_one_fold_alone_reaches():
    la = Laplace(routed(), "classification", "all", "kron", debias="crossfit")
    with pytest.raises(ValueError, match="two folds to reach the layer of 'right.weight'.*Remedy"):
        la.fit(data(MIXED, [LEFT] * 6), n_data=N)
