"""THE type of factors: how sets of data add up, and what they stand for."""

from dataclasses import replace

import pytest
import torch

from laplace_debias.kfac.factors import Factors, merge
from tests.debias.test_spectrum import psd


def of(seed: int, n: int) -> Factors:
    """Factors of n data, for a weight and a bias."""
    B = psd(2, 3, seed)
    loss = torch.tensor(float(seed))
    return replace(
        Factors.from_blocks(["w", "b"], [[B, psd(3, 3, seed + 9)], [B]], n, 2, loss),
        forward=n,
        backward=3 * n,
    )


def test_scaling_touches_every_block_once():
    blocks = [[torch.eye(2), torch.eye(3)], [torch.eye(2)]]
    weight, bias = Factors.from_blocks(["w", "b"], blocks, n=5, n_outputs=2).scaled_to(35)
    assert torch.kron(*weight).trace() == 7 * 6 and bias[0].trace() == 7 * 2
    assert blocks[0][0].trace() == 2


def test_merge_is_associative_over_batches():
    sets = [([[psd(2, 3, s), psd(3, 3, s + 9)]], n) for s, n in ((0, 2), (1, 5), (2, 3))]
    (b0, n0), (b1, n1), (b2, n2) = sets
    left = merge(merge(b0, n0, b1, n1), n0 + n1, b2, n2)
    right = merge(b0, n0, merge(b1, n1, b2, n2), n1 + n2)
    for one, other in zip(left[0], right[0], strict=True):
        torch.testing.assert_close(one, other)
    A = sum(n * blocks[0][1] for blocks, n in sets) / 10
    torch.testing.assert_close(left[0][1], A)


def test_factors_add_up_in_any_order():
    one, two, three = of(0, 2), of(1, 5), of(2, 3)
    total = (one + two) + three
    other = one + (three + two)
    for block, same in zip(total.blocks, other.blocks, strict=True):
        for got, expected in zip(block, same, strict=True):
            torch.testing.assert_close(got, expected)
    torch.testing.assert_close(total.A[0], (2 * one.A[0] + 5 * two.A[0] + 3 * three.A[0]) / 10)
    torch.testing.assert_close(total.B[1], one.B[1] + two.B[1] + three.B[1])
    assert (total.n, total.weight, total.forward, total.backward) == (10, 10, 10, 30)
    assert total.loss == 3.0


def test_factors_of_other_parameters_do_not_add_up():
    with pytest.raises(ValueError, match="same `params`"):
        of(0, 2) + replace(of(1, 2), names=("w", "c"))


def test_weighted_data_stand_for_what_their_weights_say():
    """Five weighted data that stand for twenty: N / 20, not N / 5."""
    factors = replace(of(0, 5), weight=20)
    torch.testing.assert_close(factors.scaled_to(100)[1][0], 5 * factors.B[1])


def test_forward_passes_alone_give_no_blocks():
    with pytest.raises(ValueError, match="output factors, got none for 'w'.*Remedy"):
        _ = replace(of(0, 2), B=(None, None)).blocks


def test_input_factors_of_one_alone_are_none_of_both():
    """A of some of the data must not pass for A of all of them."""
    whole, without = of(1, 4), replace(of(2, 3), A=(None, None))
    for total in (whole + without, without + whole):
        assert total.A == (None, None) and total.n == 7


def test_outputs_are_there_if_they_were_kept():
    f = torch.ones(4, 2)
    assert replace(of(1, 4), outputs=f).kept_outputs is f
    with pytest.raises(ValueError, match="Expected .*Remedy"):
        _ = of(1, 4).kept_outputs


def test_row_counts_add_up_and_are_those_of_both_or_none():
    one, two = replace(of(1, 4), n_rows=(12, 4)), replace(of(2, 3), n_rows=(9, 3))
    assert (one + two).n_rows == (21, 7)
    counted = replace(one, row_counts=((None, None), (None, None)))
    for total in (counted + two, two + counted):  # one without counts: nothing is said of both
        assert total.row_counts == ()
