"""A quadratic restricted to a plane."""

import pytest
import torch

from laplace_debias.quadratics import Quadratic
from tests.oracles_quadratics import orthonormal
from tests.quadratics.test_quadratic import make_classifier


def test_restriction_is_the_quadratic_on_a_plane_and_along_a_path():
    model, loss, X, y = make_classifier()
    q = Quadratic(model, loss, (X, y), curvature="hessian", l2=0.1)
    D = orthonormal(q.shape[0], 2)
    plane = q.restrict(D)
    tau = orthonormal(12, 2).reshape(3, 4, 2)
    points = q.theta0[:, None] + D @ tau.reshape(-1, 2).T
    assert torch.allclose(plane.value(tau), q.value(points).reshape(3, 4), rtol=1e-10)
    steps = torch.tensor([0.7, -0.2], dtype=torch.float64)
    expected = [q.slopes(D)[0], q.slopes(D, q.theta0 + 0.7 * D[:, 0])[1]]
    assert torch.allclose(plane.slopes(steps), torch.stack(expected), rtol=1e-10)
    with pytest.raises(ValueError, match="one coefficient per direction"):
        plane.value(torch.zeros(3, dtype=torch.float64))
