"""One posterior predicts in several threads at once; its copies are posteriors of their own."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from laplace import KronLLLaplace
from torch import Tensor, nn

from laplace_debias import Laplace, linearized_predictive
from laplace_debias.network.preserve import Change, differentiable, evaluation_mode, held
from laplace_debias.predictive.weight_samples import forward_mode
from tests import cases
from tests.network.test_preserve import fingerprint

N_THREADS = 4


class Slow(nn.Module):
    """Lets another thread go on in the middle of a forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs as they are."""
        time.sleep(1e-3)
        return x


def slow_network() -> nn.Module:
    """A network in mixed modes with dropout, whose forward passes overlap."""
    net = nn.Sequential(
        nn.Linear(3, 5), Slow(), nn.Tanh(), nn.Dropout(0.5), Slow(), nn.Linear(5, 4), Slow()
    )
    return net.double().train()


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    """Threads change places as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def fitted(subset: str):
    model = cases.seeded(slow_network)
    la = Laplace(
        model, "classification", subset, "kron", debias=True, last_layer_name="5"
    ) if subset == "last_layer" else Laplace(
        model, "classification", subset, "kron", debias=True
    )  # fmt: skip
    la.fit(cases.MLP.data(9, 1), curvature_loader=cases.MLP.data(9, 2), n_data=50)
    return la


def exact(la, X, seed):
    return la(X)


def joint_samples(la, X, seed):
    return linearized_predictive(
        la, X, [0.1, 1.0], method="samples", n_samples=2,
        generator=torch.Generator().manual_seed(seed),
    ).covariance  # fmt: skip


def networks(la, X, seed):
    gen = torch.Generator().manual_seed(seed)
    return la(X, pred_type="nn", link_approx="mc", n_samples=2, generator=gen)


WAYS = [exact, joint_samples, networks]


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_threads_predict_as_one_after_the_other_would(subset):
    la = fitted(subset)
    la.model.requires_grad_(False)  # frozen after the fit: predicting must thaw and freeze again
    jobs = [(WAYS[i % 3], cases.MLP.data(2 + i % 4, 10 + i)[0], i) for i in range(24)]
    expected = [way(la, X, seed) for way, X, seed in jobs]
    before, start = fingerprint(la.model), threading.Barrier(N_THREADS)

    def work(number: int) -> list[Tensor]:
        start.wait()
        return [way(la, X, seed) for way, X, seed in jobs[number::N_THREADS]]

    for _ in range(3):
        with ThreadPoolExecutor(N_THREADS) as pool:
            parts = list(pool.map(work, range(N_THREADS)))
        for number, part in enumerate(parts):
            for got, wanted in zip(part, expected[number::N_THREADS], strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0)
    assert fingerprint(la.model) == before
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_model_itself_can_be_used_while_networks_are_sampled():
    la = fitted("all")
    la.model.eval()
    X = cases.MLP.data(3, 4)[0]
    expected, stop, seen = la.model(X), threading.Event(), []

    def watch() -> None:
        while not stop.is_set():
            seen.append(la.model(X))

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            networks(la, X, 0)
            joint_samples(la, X, 0)
        finally:
            stop.set()
        watching.result()
    assert len(seen) > 2
    assert all(torch.equal(f, expected) for f in seen)


def test_laplace_torchs_own_last_layer_predicts_in_threads():
    la = KronLLLaplace(cases.seeded(slow_network), "classification", last_layer_name="5")
    la.fit(cases.loader(*cases.MLP.data(9, 1)))
    batches = [cases.MLP.data(2 + i % 4, 10 + i)[0] for i in range(12)]

    def variance(X: Tensor) -> Tensor:
        return linearized_predictive(la, X).covariance

    expected = [variance(X) for X in batches]
    with ThreadPoolExecutor(N_THREADS) as pool:
        for got, wanted in zip(pool.map(variance, batches), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("first_out", [0, 1])
@pytest.mark.parametrize("context", ["mode", "gradient", "attention"])
def test_overlapping_blocks_put_back_what_was_before_the_first(context, first_out):
    net = nn.Linear(2, 2).requires_grad_(False)
    make, state = {
        "mode": (lambda: evaluation_mode(net), lambda: net.training),
        "gradient": (lambda: differentiable(net, [net.weight]), lambda: net.weight.requires_grad),
        "attention": (forward_mode, torch.backends.mha.get_fastpath_enabled),
    }[context]
    before = state()
    blocks = [make(), make()]
    for block in blocks:
        block.__enter__()
    inside = state()
    assert inside is not before
    blocks[first_out].__exit__(None, None, None)
    assert state() is inside, "the other block still needs it"
    blocks[1 - first_out].__exit__(None, None, None)
    assert state() is before


def test_a_change_that_raises_leaves_nothing_held():
    done: list[str] = []

    def fine():
        done.append("made")
        return lambda: done.append("undone")

    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), held([Change("a", fine), Change("b", broken)]):
        pass
    assert done == ["made", "undone"]
    with held([Change("b", fine)]):
        assert done == ["made", "undone", "made"]


def pickled(la):
    return pickle.loads(pickle.dumps(la))


def through_a_file(la):
    file = io.BytesIO()
    torch.save(la, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("way", [copy.deepcopy, pickled, through_a_file])
def test_a_copy_is_a_posterior_of_its_own(way, subset, named):
    case = cases.MLP
    options = {"last_layer_name": "2"} if named and subset == "last_layer" else {}
    la = Laplace(
        case.model(), "classification", subset, "kron", debias=True, prior_precision=2.0,
        generator=torch.Generator().manual_seed(3), **options,
    )  # fmt: skip
    la.fit(case.data(9, 1), curvature_loader=case.data(9, 2), n_data=50)
    old, new = case.data(4, 3)[0], case.data(6, 4)[0]
    expected = la(new)
    la(old)
    other = way(la)
    assert torch.equal(other(new), expected)
    assert torch.equal(other(new, pred_type="nn", link_approx="mc", n_samples=3,
                             generator=torch.Generator().manual_seed(0)),
                       la(new, pred_type="nn", link_approx="mc", n_samples=3,
                          generator=torch.Generator().manual_seed(0)))  # fmt: skip
    with torch.no_grad():
        next(other.model.parameters()).zero_()
    assert torch.equal(la(new), expected), "the copy shares its weights with the original"
    other.fit(case.data(9, 5), curvature_loader=case.data(9, 6), n_data=50)
    assert torch.equal(la(new), expected)
