"""When two factors count as the same."""

import torch


def assert_same(one, two, rtol=1e-10):
    assert one.n == two.n
    torch.testing.assert_close(one.loss, two.loss, rtol=rtol, atol=0)
    for block, other in zip(one.blocks, two.blocks, strict=True):
        for factor, expected in zip(block, other, strict=True):
            assert factor.dtype == torch.float64
            torch.testing.assert_close(factor, expected, rtol=rtol, atol=1e-12)
