"""Squares of rotated rows: the diagonal of a factor in a basis, without the factor."""

import pytest
import torch
from torch import nn

from laplace_debias.debias.spectrum import decompose
from laplace_debias.kfac import few_rows, grams, rotations
from laplace_debias.kfac.engine import Engine
from laplace_debias.kfac.rotations import (
    RotatedInputs,
    RotatedOutputs,
    output_grams,
    squares_along,
)
from tests import oracles
from tests.cases import CNN, GROUPED, MLP, MLP_REGRESSION, PARTLY_FROZEN, TOKENS
from tests.oracles_kfac import rows_of

CASES = [MLP, MLP_REGRESSION, CNN, GROUPED, TOKENS, PARTLY_FROZEN]


def basis(d, seed=0):
    matrix = torch.randn(d, d, generator=torch.Generator().manual_seed(seed)).double()
    return torch.linalg.qr(matrix)[0]


@pytest.fixture(params=["rotated", "measured"])
def path(request, monkeypatch):
    """Both ways to the same numbers, whatever the shapes."""
    always = request.param == "measured"
    monkeypatch.setattr(rotations, "_ROWS_PER_DIMENSION", 0 if always else 10**9)
    monkeypatch.setattr(few_rows, "_HALVE_ABOVE", 2 if always else 10**9)
    monkeypatch.setattr(rotations, "saves_work", lambda *args: always)
    return request.param


@pytest.mark.parametrize(("r", "d"), [(7, 5), (40, 3), (1, 1)])
def test_squares_are_the_diagonal_in_the_basis(r, d, path):
    rows = torch.randn(r, d, generator=torch.Generator().manual_seed(1)).double()
    Q = basis(d)
    expected = (Q.T @ rows.T @ rows @ Q).diagonal()
    torch.testing.assert_close(squares_along(rows, Q), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("slice_bytes", [1, 500, 2**26])
def test_rows_are_rotated_in_slices(slice_bytes, monkeypatch):
    monkeypatch.setattr(grams, "_SLICE_BYTES", slice_bytes)
    layer = nn.Conv2d(2, 3, 2, padding=1).double()
    x = torch.randn(4, 2, 5, 6, generator=torch.Generator().manual_seed(1)).double()
    rows, Q = rows_of(layer, x).flatten(0, 1), basis(8)
    values, count = RotatedInputs(Q).mean(layer, x)
    assert count == len(rows)
    torch.testing.assert_close(values, (rows @ Q).square().mean(0), rtol=1e-12, atol=1e-12)


def test_a_matrix_that_is_no_scratch_is_not_formed(monkeypatch):
    def formed(*args, **kwargs):
        raise AssertionError("formed")

    monkeypatch.setattr(rotations, "add_gram_", formed)
    monkeypatch.setattr(rotations, "input_mean", formed)
    monkeypatch.setattr(few_rows, "_HALVE_ABOVE", 2)
    rows, image, conv = torch.ones(100, 4), torch.ones(9, 1, 9, 9), nn.Conv2d(1, 1, 2)
    for slice_bytes, raises in ((4 * 4 * 4, True), (4 * 4 * 4 - 1, False)):
        monkeypatch.setattr(grams, "_SLICE_BYTES", slice_bytes)
        for call in (
            lambda: squares_along(rows, torch.eye(4)),
            lambda: RotatedInputs(torch.eye(4)).mean(conv, image),
        ):
            if raises:
                with pytest.raises(AssertionError, match="formed"):
                    call()
            else:
                call()


@pytest.mark.parametrize("approx", few_rows.KFAC_APPROXES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_engine_measures_what_its_own_factors_have_along_any_basis(case, approx, path):
    """Whatever a factor is (the oracles know), its diagonal in a basis comes without it."""
    X, y = case.data(12)
    engine = Engine(case.model(), case.likelihood, kfac_approx=approx)
    dense = engine.factors(X, y)
    Q = [[basis(len(M), i) for i, M in enumerate(block)] for block in dense.blocks]
    along = engine.factors(X, y, along=Q)
    for block, vectors, factors in zip(along.blocks, Q, dense.blocks, strict=True):
        for values, Q_f, M in zip(block, vectors, factors, strict=True):
            expected = (Q_f.T @ M @ Q_f).diagonal()
            torch.testing.assert_close(values, expected, rtol=1e-11, atol=1e-11)
    assert along.n_rows == dense.n_rows
    torch.testing.assert_close(along.loss, dense.loss)


@pytest.mark.parametrize("case", [MLP, CNN], ids=lambda case: case.name)
def test_curvatures_of_mini_batches_add_up_to_the_dense_definition(case):
    """The oracle shares no code: explicit factors of all the data, in the basis of other data."""
    model, (X, y) = case.model(), case.data(20)
    engine = Engine(model, case.likelihood)
    other = engine.factors(*case.data(30, 5))
    Q, _ = decompose(other.blocks, other.names)
    total = engine.factors(X[:6], y[:6], along=Q) + engine.factors(X[6:], y[6:], along=Q)
    for (name, factors), vectors, block in zip(
        oracles.kfac(model, X, y, case.likelihood).items(), Q, total.blocks, strict=True
    ):
        for M, Q_f, values in zip(factors, vectors, block, strict=True):
            expected = torch.einsum("ia,ij,ja->a", Q_f, M, Q_f)
            torch.testing.assert_close(values, expected, msg=lambda m, n=name: f"{n}: {m}")


def test_a_weight_that_layers_share_is_measured_along_its_own_basis():
    """Two layers share a weight, each with its own bias: three bases of output gradients."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(torch.tanh(self.one(x)))

    torch.manual_seed(0)
    engine = Engine(Tied().double(), "classification")
    X, y = torch.randn(9, 3).double(), torch.arange(9) % 3
    dense = engine.factors(X, y)
    Q = [[basis(3, 10 * i + j) for j in range(len(b))] for i, b in enumerate(dense.blocks)]
    along = engine.factors(X, y, along=Q)
    for block, vectors, factors in zip(along.blocks, Q, dense.blocks, strict=True):
        for values, Q_f, M in zip(block, vectors, factors, strict=True):
            torch.testing.assert_close(values, (Q_f.T @ M @ Q_f).diagonal())


def test_normalisations_are_measured_along_their_bases():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3)).double()
    engine = Engine(net, "classification")
    X, y = torch.randn(9, 3).double(), torch.arange(9) % 3
    dense = engine.factors(X, y)
    Q = [[basis(len(M), i) for i, M in enumerate(block)] for block in dense.blocks]
    for block, vectors, factors in zip(
        engine.factors(X, y, along=Q).blocks, Q, dense.blocks, strict=True
    ):
        for values, Q_f, M in zip(block, vectors, factors, strict=True):
            torch.testing.assert_close(values, (Q_f.T @ M @ Q_f).diagonal())


def test_weight_and_bias_with_one_basis_are_rotated_once():
    engine = Engine(nn.Linear(3, 2), "classification")
    Q = torch.eye(2)
    shared = output_grams(
        engine.owned, Q, "expand", engine.layer_names, {"weight": [Q, Q], "bias": [Q]}
    )
    own = output_grams(
        engine.owned, Q, "expand", engine.layer_names, {"weight": [Q, Q], "bias": [Q.clone()]}
    )
    for grams_of, count in ((shared, 1), (own, 2)):
        (found,) = grams_of.values()
        assert len({id(gram) for gram in found.values()}) == count
        assert all(isinstance(gram, RotatedOutputs) for gram in found.values())


def test_small_curvatures_survive_single_precision():
    """A factor in float32 drowns what lies seven digits below its top; squares of rows do not."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 2, generator=g, dtype=torch.float64) * torch.tensor([1.0, 1e-6])
    Q = basis(2)
    rows = rows @ Q.T
    exact = (rows @ Q).square().sum(0)
    C = (rows.float().T @ rows.float()).double()
    formed = (Q.T @ C @ Q).diagonal()
    rotated = squares_along(rows.float(), Q.float())
    assert (formed / exact - 1).abs().max() > 1
    assert (rotated / exact - 1).abs().max() < 0.5
