"""Sums over processes, of which the second is played by its known share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace_debias.data.processes import Processes, shared_out
from laplace_debias.kfac import sums
from laplace_debias.kfac.engine import Engine
from laplace_debias.kfac.factors import Factors
from laplace_debias.kfac.sums import factors_of_all

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(12) % 3


def network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    return net.double()


def of(part: slice) -> Factors:
    return Engine(network(), "classification").factors(X[part], Y[part])


class Group:
    """Two processes, of which the other one's shares and tensors are known beforehand."""

    def __init__(self, other: Factors | None) -> None:
        self.rank, self.size = 0, 2
        self.other, self.tensors = other, list[Tensor]()

    def gather(self, own: Any) -> list[Any]:
        """Both descriptions."""
        return [own, None if self.other is None else sums._share(self.other)]

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add what the other process has."""
        return tensor.add_(self.tensors.pop(0)) if self.tensors else tensor


def in_two(monkeypatch: Any, own: Factors | None, other: Factors | None) -> Factors | None:
    group = Group(other)
    if other is not None:
        n_rows = other.n_rows or (other.n,) * len(other.names)
        ours = (0,) * len(n_rows) if own is None else own.n_rows or (own.n,) * len(n_rows)
        shares = [b / max(a + b, 1) for a, b in zip(ours, n_rows, strict=True)]
        last: Tensor | None = None
        for (B, *_), A, share in zip(other.blocks, other.A, shares, strict=True):
            same = last is not None and last.shape == B.shape and torch.equal(last, B)
            group.tensors += [] if same else [B.clone()]
            group.tensors += [] if A is None else [share * A]
            last = B
        group.tensors.append(other.summed_loss.double())
    monkeypatch.setattr(sums, "processes", lambda: group)
    return factors_of_all(own, torch.device("cpu"))


def assert_same(found: Factors | None, expected: Factors) -> None:
    assert found is not None
    for one, two in zip(found.blocks, expected.blocks, strict=True):
        for factor, other in zip(one, two, strict=True):
            torch.testing.assert_close(factor, other)
    assert (found.n, found.n_rows, found.weight) == (expected.n, expected.n_rows, expected.weight)
    assert (found.forward, found.backward) == (expected.forward, expected.backward)
    torch.testing.assert_close(found.summed_loss, expected.summed_loss)


@pytest.mark.parametrize("cut", [4, 6, 9])
def test_two_processes_have_the_factors_of_all_data(monkeypatch, cut):
    own, other = of(slice(0, cut)), of(slice(cut, 12))
    assert_same(in_two(monkeypatch, own, other), of(slice(0, 12)))


def test_a_process_without_data_has_the_factors_of_the_others(monkeypatch):
    assert_same(in_two(monkeypatch, None, of(slice(0, 12))), of(slice(0, 12)))
    assert_same(in_two(monkeypatch, of(slice(0, 12)), None), of(slice(0, 12)))
    assert in_two(monkeypatch, None, None) is None


def test_a_process_without_data_adds_no_rows_to_the_few_of_the_others():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(2, 9, dtype=torch.float64)
    few = Engine(net, "classification").factors(x, Y[:2], few_rows=True)
    none = sums._zeros(sums._share(few), torch.device("cpu"))
    shapes = [
        (tuple(M.shape), tuple(zero.shape))
        for pair in ((few.B, none.B), (few.A, none.A))
        for M, zero in zip(*pair, strict=True)
        if M is not None
    ]
    assert any(rows != columns for (rows, columns), _ in shapes)  # some are few
    for (rows, columns), zero in shapes:
        assert zero == ((columns, columns) if rows == columns else (0, columns))


def test_factors_that_kept_outputs_or_rows_are_refused(monkeypatch):
    own = of(slice(0, 6))
    kept = {"outputs": torch.zeros(6, 3)}, {"rows": (torch.zeros(6, 3), *[None] * 5)}
    for more in kept:
        with pytest.raises(ValueError, match="without outputs and rows.*Remedy"):
            in_two(monkeypatch, replace(own, **more), None)


def test_rows_of_layers_that_few_data_reach_are_counted_by_layer(monkeypatch):
    """One row, or none, in this process; A is averaged by rows, not by data."""
    own, other = of(slice(0, 6)), of(slice(6, 12))
    A, C = own.A[0].clone(), other.A[0].clone()
    for n, m in ((1, 3), (1, 0), (0, 1), (0, 0)):
        one = replace(own, n_rows=(n, *own.n_rows[1:]), A=(A.clone(), *own.A[1:]))
        two = replace(other, n_rows=(m, *other.n_rows[1:]), A=(m * C / max(m, 1), *other.A[1:]))
        total = in_two(monkeypatch, one, two if n + m else replace(two, A=one.A))
        expected = (n * A + m * C) / max(n + m, 1)
        torch.testing.assert_close(total.A[0], expected)


def test_jobs_are_dealt_out():
    assert shared_out([1.0, 8.0, 4.0, 3.0], None) == [0, 0, 0, 0]
    assert shared_out([1.0, 8.0, 4.0, 3.0], Processes(0, 2)) == [1, 0, 1, 1]
