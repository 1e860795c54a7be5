"""Choice by held-out likelihood: the loss against a dense one, and what it chooses."""

import torch

from examples.research.heldout_likelihood import heldout_loss, likeliest, ridges_of


def test_the_loss_is_the_gaussian_one_of_dense_matrices():
    generator = torch.Generator().manual_seed(0)
    X, Z = (torch.randn(9, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    lam, Q = torch.linalg.eigh(X.T @ X)
    C = Z.T @ Z
    wanted = []
    for d in (0.1, 2.0):
        S, eye = X.T @ X + d * torch.eye(4, dtype=X.dtype), torch.eye(4, dtype=X.dtype)
        wanted.append(torch.logdet(S) + torch.trace(torch.linalg.solve(S, C + d * eye)))
    found = heldout_loss(lam, (Q.T @ C @ Q).diag(), torch.tensor([0.1, 2.0]))
    torch.testing.assert_close(found, float(sum(wanted) / 2), rtol=1e-6, atol=1e-6)


def test_own_eigenvalues_lose_with_few_rows_and_win_with_many():
    generator = torch.Generator().manual_seed(1)
    d, ridges = 20, torch.tensor([1e-3], dtype=torch.float64)

    def rows(n):
        return torch.randn(n, d, generator=generator, dtype=torch.float64)

    chosen = []
    for n, m in ((22, 200), (2000, 10)):  # rows of the basis, of either held-out part
        X, parts = rows(n), [rows(m), rows(m)]
        lam, Q = torch.linalg.eigh(X.T @ X / n)
        c = [(part @ Q).square().mean(0) for part in parts]
        chosen.append(likeliest({"own": (lam, lam), "held-out": tuple(c)}, (c[1], c[0]), ridges))
    assert chosen == ["held-out", "own"]


def test_a_factor_meets_one_ridge_per_direction_of_the_other():
    assert ridges_of(torch.tensor([2.0, 4.0]), 1.0).tolist() == [0.5, 0.25]
    assert ridges_of(None, 3.0).tolist() == [3.0]
    assert bool(ridges_of(torch.zeros(2), 1.0).isfinite().all())
