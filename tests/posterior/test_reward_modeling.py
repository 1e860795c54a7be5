"""Reward models: fitted to preferences between two inputs, predicting the reward of one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from laplace_debias import Laplace, evaluate
from tests import cases


class Reward(nn.Module):
    """One reward for an input, two for a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, 3]`` to ``[n, 1]``, and ``[n, 2, 3]`` to ``[n, 2]``."""
        return self.net(x) if x.ndim == 2 else self.net(x.flatten(0, 1)).view(len(x), 2)


@pytest.mark.parametrize("pairs_first", [True, False])
def test_rewards_and_preferences(pairs_first):
    gen = torch.Generator().manual_seed(0)
    pairs = torch.randn(10, 2, 3, generator=gen, dtype=torch.float64)
    y = torch.randint(2, (10,), generator=gen)
    la = Laplace(
        cases.seeded(Reward).double(), "reward_modeling", "all", "kron", debias="single",
        prior_precision=2.0,
    )  # fmt: skip
    la.fit((pairs, y), n_data=10)
    same = Laplace(
        cases.seeded(Reward).double(), "classification", "all", "kron", debias="single",
        prior_precision=2.0,
    )  # fmt: skip
    same.fit((pairs, y), n_data=10)
    assert torch.equal(la.log_marginal_likelihood(), same.log_marginal_likelihood())
    for of_pairs in (pairs_first, not pairs_first):
        if of_pairs:
            torch.testing.assert_close(la(pairs, fitting=True), same(pairs))
        else:
            x = pairs[:, 0]
            mean, variance = la(x)
            torch.testing.assert_close(mean, la.model(x).detach())
            J = torch.stack(
                [
                    torch.cat([g.flatten() for g in torch.autograd.grad(f, la.params)])
                    for f in (la.model(row[None]).squeeze() for row in x)
                ]
            )
            covariance = torch.linalg.inv(la.posterior_precision.to_matrix())
            expected = torch.einsum("np,pq,nq->n", J, covariance, J)
            torch.testing.assert_close(variance[:, 0, 0], expected)
    options = {"n_samples": 5, "generator": gen}
    mean, variance = la(pairs[:, 0], pred_type="nn", link_approx="mc", **options)
    assert mean.shape == variance.shape == (10, 1)
    assert la.predictive_samples(pairs[:, 0], pred_type="nn", n_samples=5).shape == (5, 10, 1)
    report = evaluate(la, (pairs, y))
    expected = evaluate(same, (pairs, y))
    assert report.nll == pytest.approx(expected.nll, rel=1e-12)
