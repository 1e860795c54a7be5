"""The biases over batch sizes, against dense matrices."""

import torch

from laplace_debias.quadratics import bias_by_batch_size, partition
from tests.oracles_quadratics import dense_kfac
from tests.quadratics.test_quadratic import make_classifier


def test_kfac_over_batch_sizes_matches_dense():
    model, loss, X, y = make_classifier()
    result = bias_by_batch_size(
        model, loss, (X, y), batch_sizes=(4, 12), k=3, curvature="kfac", seed=3
    )
    for size, part in zip((4, 12), result.results, strict=True):
        batches = partition((X, y), size, generator=torch.Generator().manual_seed(3))
        K = [dense_kfac(model, batch[0]) for batch in batches]
        U = torch.linalg.eigh(K[0]).eigenvectors.flip(1)[:, :3]
        expected = torch.stack([(U * (k @ U)).sum(0) for k in K])
        assert torch.allclose(part.curvatures[0], expected, rtol=1e-7)
        assert part.batch_size == size and part.curvature == "kfac"
