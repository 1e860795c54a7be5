"""Metrics along a trajectory of CG."""

import copy

import pytest
import torch

from laplace_debias.quadratics import Quadratic, TrajectoryMetrics, cg, evaluate_trajectory
from tests.quadratics.test_quadratic import make_classifier


def test_trajectory_metrics_are_those_of_a_moved_model():
    model, loss, X, y = make_classifier()
    model.append(torch.nn.Dropout(0.5))
    q = Quadratic(model, loss, (X, y), l2=0.05, regularize_biases=False)
    path = cg(q, max_iter=3).iterates
    before = [p.clone() for p in model.parameters()]
    metrics = evaluate_trajectory(
        model, loss, (X, y), path, l2=0.05, regularize_biases=False, chunk_size=7
    )
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert model[3].training and torch.allclose(metrics.loss[0], q.constant)
    moved = copy.deepcopy(model).eval()
    torch.nn.utils.vector_to_parameters(q.theta0 + path[:, 2], moved.parameters())
    weights = sum((moved[i].weight ** 2).sum() for i in (0, 2))
    expected = loss(moved(X), y) + 0.025 * weights
    assert torch.allclose(metrics.loss[2], expected)
    assert torch.equal(metrics.accuracy[2], (moved(X).argmax(1) == y).double().mean())
    assert metrics.best() == int(metrics.loss.argmin())
    blown = TrajectoryMetrics(torch.tensor([1.0, float("nan"), float("inf")]), torch.zeros(3))
    assert blown.best() == 0
    with pytest.raises(ValueError, match="Expected iterates of shape"):
        evaluate_trajectory(model, loss, (X, y), path[:-1])
