"""Data-dependent routing: every method sees the data that reach a layer, and says if none do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laplace_debias import Laplace
from laplace_debias.data.roles import TrainingData
from laplace_debias.debias.options import AutoOptions
from laplace_debias.debias.rounds import Rounds
from laplace_debias.kfac.engine import Engine
from tests import oracles
from tests.network.test_check import EXACT, assert_prediction, batches, routed
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


@pytest.mark.parametrize("second", [MIXED, [RIGHT] * 4 + [LEFT] * 2, [LEFT] * 6])
def test_a_fit_to_a_tolerance_ends_at_the_full_batch_of_the_data_that_reach_a_layer(second):
    model, pairs = routed(), data(MIXED, second)
    la = Laplace(model, "classification", "all", "kron", debias="auto", tolerance=1e-9)
    la.fit(pairs, n_data=12)
    expected = flat(role(model, *(torch.cat(part) for part in zip(*pairs, strict=True))))
    matrix = torch.block_diag(*(B if not A else torch.kron(B, *A) for B, *A in expected))
    torch.testing.assert_close(la.H.to_matrix(), matrix * 12 / N, **EXACT)
    assert_prediction(la, torch.cat([X for X, _ in pairs])[3:10])


def test_drawn_pairs_are_those_of_the_data_that_reach_a_layer():
    """Many draws of a part of the pairs have the full batch's output factors as their mean."""
    model, pairs = routed(), data(MIXED, [RIGHT] * 4 + [LEFT] * 2)
    X, y = (torch.cat(part) for part in zip(*pairs, strict=True))
    expected = {name: B * len(y) / N for name, (B, _, _) in role(model, X, y).items()}
    found = {name: [] for name in ("left", "right")}
    for seed in range(200):
        engine = Engine(model, "classification")
        options = AutoOptions(n_passes=12, generator=torch.Generator().manual_seed(seed))
        rounds = Rounds(engine, TrainingData(pairs, None, len(y), X.device), options)
        rounds.grow(12)
        rounds.draw(12)
        for factor in rounds.factors:
            name = "left" if factor.key == (model.left,) else "right"
            found[name].append(factor.estimate(rounds.scale))
    for name, estimates in found.items():
        draws = torch.stack(estimates)
        error = draws.std(0) / len(draws) ** 0.5
        assert ((draws.mean(0) - expected[name]).abs() < 4 * error + 1e-12).all()
        assert (error < 0.1 * expected[name].diagonal().max()).all()


@pytest.mark.parametrize("debias", ["single", "two-batch", "crossfit", "auto"])
def test_the_last_layer_of_a_routed_network_is_the_features_own(debias):
    """The same posterior as of the head alone, on features that were computed before."""
    model, pairs = routed(), data(MIXED, [RIGHT] * 4 + [LEFT] * 2)
    la = Laplace(model, "classification", "last_layer", "kron", debias=debias)
    la.fit(pairs, n_data=12)
    features = []
    handle = model.head.register_forward_pre_hook(lambda _, args: features.append(args[0]))
    with torch.no_grad():
        for X, _ in pairs:
            model(X)
    handle.remove()
    head = Laplace(model.head, "classification", "all", "kron", debias=debias)
    head.fit([(phi, y) for phi, (_, y) in zip(features, pairs, strict=True)], n_data=12)
    torch.testing.assert_close(la.H.to_matrix(), head.H.to_matrix(), **EXACT)
    torch.testing.assert_close(la(pairs[0][0]), head(features[0]), **EXACT)
