"""Fits within a budget of memory: the same sums, in pieces; what cannot fit is said before."""

import pytest
import torch
from torch import nn

from laplace_debias import HookGGN, Laplace, check_model
from laplace_debias.kfac.budget import data_at_once, within_budget
from laplace_debias.kfac.engine import Engine
from laplace_debias.network.live_bytes import LiveBytes
from tests import cases


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


def images(n, seed):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 3, 24, 24, generator=generator)
    return X, torch.randint(5, (n,), generator=generator)


@pytest.mark.parametrize("case", [cases.MLP, cases.CNN, cases.BATCHNORM], ids=lambda c: c.name)
@pytest.mark.parametrize("options", [{}, {"outputs": False, "rows_from": 1}, {"few_rows": True}])
def test_factors_in_pieces_are_those_of_the_whole(case, options):
    X, y = case.data(17)
    whole = Engine(case.model(), case.likelihood).factors(X, y, **options)
    pieces = Engine(case.model(), case.likelihood, chunk=5).factors(X, y, **options)
    assert (pieces.n, pieces.n_rows, pieces.forward) == (whole.n, whole.n_rows, whole.forward)
    for one, two in zip((*pieces.B, *pieces.A), (*whole.B, *whole.A), strict=True):
        if two is not None and one.shape == two.shape:  # rows, or their matrix
            one, two = (M.T @ M if M.shape[0] != M.shape[1] else M for M in (one, two))
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pieces.summed_loss, whole.summed_loss, rtol=1e-12, atol=0)
    if whole.outputs is not None:
        torch.testing.assert_close(pieces.outputs, whole.outputs)
        assert all(torch.equal(*p) for p in zip(pieces.rows, whole.rows, strict=True) if p[1] is not None)  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("method", ["single", "two-batch", "crossfit"])
def test_a_fit_stays_within_its_budget(method):
    """Counted bytes of live tensors; without a budget the same fit takes more than twice that."""
    batches = [images(48, seed) for seed in range(2)]

    def peak(**options):
        la = Laplace(convolutions(), "classification", "all", "kron", debias=method)
        data = batches if method != "single" else batches[0]
        known = [t for batch in batches for t in batch]
        with LiveBytes(known) as live:
            la.fit(data, n_data=96, **options)
        return live.peak, la

    budget = 4 * 2**20
    (free, one), (bound, two) = peak(), peak(memory_budget=budget)
    assert bound <= budget < free / 2
    H, expected = (la.H.to_matrix() for la in (two, one))
    torch.testing.assert_close(H, expected, rtol=1e-3, atol=1e-4 * float(expected.max()))


@pytest.mark.parametrize("n_folds", [2, 4])
def test_folds_of_wide_layers_stay_within_their_budget(n_folds):
    """The least budget that is not refused holds all folds side by side, and their copies."""
    batches = [(torch.randn(40, 200), torch.arange(40) % 5) for _ in range(n_folds)]
    net = nn.Sequential(nn.Linear(200, 150), nn.Tanh(), nn.Linear(150, 5))
    budget = 1 << 20
    while True:
        options = {"debias": "crossfit", "n_folds": n_folds, "verify": False}
        la = Laplace(net, "classification", "all", "kron", **options)
        try:
            with LiveBytes([t for batch in batches for t in batch]) as live:
                la.fit(batches, n_data=500, memory_budget=budget)
            break
        except ValueError as error:
            assert "Kronecker factors" in str(error)
        budget += 1 << 19
    assert budget / 2 < live.peak <= budget


def test_factors_that_do_not_fit_are_named_before_the_fit():
    la = Laplace(nn.Linear(400, 10), "classification", "all", "kron", debias=True)
    batch = (torch.randn(8, 400), torch.arange(8))
    with pytest.raises(ValueError, match=r"'weight' 640,400 of them.*Remedy: a larger budget"):
        la.fit([batch, batch], n_data=99, memory_budget=10**6)
    with pytest.raises(ValueError, match="positive number of bytes, got -1. Remedy"):
        la.fit([batch, batch], n_data=99, memory_budget=-1)
    engine = Engine(convolutions(), "classification")
    with pytest.raises(ValueError, match="at least one datum.*Remedy"):
        data_at_once(engine, images(4, 0)[0], 700_000)


def test_other_backends_do_not_keep_to_a_budget():
    from laplace.curvature import AsdlGGN

    la = Laplace(nn.Linear(2, 3), "classification", "all", "kron", debias=True, backend=AsdlGGN)
    batch = (torch.randn(8, 2), torch.arange(8) % 3)
    with pytest.raises(ValueError, match="HookGGN or HookEF with a `memory_budget`.*Remedy"):
        la.fit([batch, batch], n_data=99, memory_budget=10**9)
    Laplace(nn.Linear(2, 3), "classification", "all", "kron", debias=True, backend=HookGGN).fit(
        [batch, batch], n_data=99, memory_budget=10**9
    )


def test_the_check_of_a_model_tells_factors_by_layer():
    check = check_model(nn.Linear(400, 10), torch.randn(8, 400), "classification")
    assert [layer.factor_bytes for layer in check.layers] == [4 * (400**2 + 10**2), 4 * 10**2]
    assert "0.6" in str(check).splitlines()[1]  # MiB


def test_without_a_budget_only_the_check_is_left():
    engine = Engine(nn.Linear(3, 2), "classification")
    assert within_budget(engine, None, "x", print) is print
    assert within_budget(engine, None, "x", print, checks=False) is None


def test_trials_touch_neither_counts_nor_generators():
    generator = torch.Generator().manual_seed(0)
    engine = Engine(convolutions(), "classification", "mc", generator=generator)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert 1 <= data_at_once(engine, images(8, 0)[0], 3 * 2**20) < 8
    assert engine.cost.forward == engine.cost.backward == 0 and engine.chunk is None
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(0).get_state())
    assert torch.equal(torch.get_rng_state(), state)
