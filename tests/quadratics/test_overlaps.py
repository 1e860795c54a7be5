"""Overlaps of eigenspaces."""

import pytest
import torch

from laplace_debias.quadratics import (
    directional_bias,
    eigenspace_overlaps,
    overlap_study,
    partition,
)
from tests.oracles_quadratics import orthonormal
from tests.quadratics.test_quadratic import make_classifier


def test_overlap_rows_sum_to_one_over_a_full_basis():
    U, V = orthonormal(30, 30, 0), orthonormal(30, 30, 1)
    Omega = eigenspace_overlaps(U[:, :7], V)
    assert torch.allclose(Omega.sum(1), torch.ones(7).double(), atol=1e-12)
    assert torch.allclose(Omega[2, 5], (U[:, 2] @ V[:, 5]) ** 2)
    with pytest.raises(ValueError, match="one space"):
        eigenspace_overlaps(U, V[:-1])


def test_overlaps_explain_the_curvature_on_other_data():
    """u_i^T H~ u_i = sum_p lambda~_p Omega_ip, over the full spectrum."""
    model, loss, X, y = make_classifier()
    batches = partition((X, y), 12)
    result = overlap_study(model, loss, batches, k=43, l2=0.1)
    pairs = directional_bias(model, loss, batches, k=43, chosen=(0,), l2=0.1)
    explained = result.overlaps[0, 1] @ result.values[1]
    assert torch.allclose(explained, pairs.curvatures[0, 1], rtol=1e-6)
    assert torch.allclose(result.alignment(), torch.ones(2, 2).double(), atol=1e-9)
    top = overlap_study(model, loss, batches, k=5, l2=0.1)
    assert top.alignment()[0, 1] < 0.999 and torch.allclose(
        top.overlaps[0, 0], torch.eye(5).double(), atol=1e-8
    )
