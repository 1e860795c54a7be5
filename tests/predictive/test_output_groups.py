"""Outputs contracted together: the same moments, whatever the groups."""

import pytest
import torch

from laplace_debias.predictive.output_groups import grouped_moments


@pytest.fixture
def contraction():
    """Covariances ``J J^T`` of chosen outputs, with a note of what was asked for."""
    J = torch.randn(2, 12, 7, generator=torch.Generator().manual_seed(0)).double()
    asked = []

    def moments(classes, last=True, mode="covariance"):
        asked.append((classes.shape[1], last))
        rows = J.gather(1, classes.unsqueeze(-1).expand(-1, -1, 7))
        if mode == "variance":
            return [rows.square().sum(-1, keepdim=True)]
        return [(rows @ rows.mT).unsqueeze(-1)]

    return J, moments, asked


@pytest.mark.parametrize("at_once", [None, 1, 2, 3, 4, 100])
def test_covariances_of_each_position(contraction, at_once):
    J, moments, asked = contraction
    classes = torch.arange(12).expand(2, 12)
    (found,) = grouped_moments(moments, classes, "covariance", 4, at_once)
    P = J.unflatten(1, (3, 4))
    torch.testing.assert_close(found.squeeze(-1), P @ P.mT)
    assert [last for _, last in asked] == [False] * (len(asked) - 1) + [True] or at_once in (
        1,
        2,
        3,
    )
    assert asked[-1][1] and max(m for m, _ in asked) <= max(2, min(4, at_once or 4))


@pytest.mark.parametrize("at_once", [None, 1, 5, 12])
def test_variances_of_all_outputs(contraction, at_once):
    J, moments, asked = contraction
    classes = torch.arange(12).expand(2, 12)

    def variances(classes, last=True):
        return moments(classes, last, "variance")

    (found,) = grouped_moments(variances, classes, "variance", 4, at_once)
    torch.testing.assert_close(found.squeeze(-1), J.square().sum(-1))
    assert [last for _, last in asked] == [False] * (len(asked) - 1) + [True]
