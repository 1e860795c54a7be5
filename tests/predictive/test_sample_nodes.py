"""Samples at a grid of prior precisions from those at a few."""

import pytest
import torch

from laplace_debias.predictive import weight_samples
from laplace_debias.predictive.predictor import StructuredPredictor
from laplace_debias.predictive.sample_nodes import TOLERANCE, sample_nodes
from tests.cases_predictive import STRUCTURED
from tests.fitted_predictive import build, double_precision  # noqa: F401

pytestmark = pytest.mark.usefixtures("double_precision")
GRID = torch.logspace(0, 5, 14, dtype=torch.float64)


def spectrum(seed, centre, width, n=4000):
    g = torch.Generator().manual_seed(seed)
    return [10 ** (centre + width * torch.randn(n, generator=g)) for _ in range(2)]


@pytest.mark.parametrize(("centre", "width"), [(2, 1.0), (0, 2.0), (4, 0.7), (3, 0.05)])
def test_standard_deviations_of_broad_spectra_are_within_the_tolerance(centre, width):
    lams = spectrum(0, centre, width)
    found = sample_nodes(lams, GRID)
    assert found is not None
    nodes, c = found
    assert len(nodes) < len(GRID) and c.shape == (len(nodes), len(GRID))
    lam = torch.cat(lams)
    for share in (lam, torch.ones_like(lam)):  # squared Jacobians along the eigenvectors
        made = ((lam[:, None] + nodes).rsqrt() @ c).square().T @ share
        exact = (1 / (lam[:, None] + GRID)).T @ share
        assert ((made / exact).sqrt() - 1).abs().max() < 1.1 * TOLERANCE  # bins are not values


def test_three_nodes_serve_a_broad_spectrum_and_more_a_hard_one():
    assert len(sample_nodes(spectrum(0, 2, 1.0), GRID)[0]) == 3
    assert len(sample_nodes(spectrum(0, 0, 2.0), GRID)[0]) == 4


def test_few_prior_precisions_are_their_own_nodes():
    lams = spectrum(0, 2, 1.0)
    assert sample_nodes(lams, GRID[:3]) is None
    assert sample_nodes(lams, GRID[:1].expand(6)) is None
    assert sample_nodes([torch.zeros(5)], GRID) is not None  # no curvature at all


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_a_sweep_by_samples_takes_few_products_and_is_near_the_products_of_each(name, monkeypatch):
    la, x = build(STRUCTURED[name](), n=4)
    grid = torch.logspace(-1, 2, 12)
    steps = []
    made = weight_samples.posterior_step

    def counting(eps, block, k):
        steps.append(len(eps) * (block.param is la.params[0]))
        return made(eps, block, k)

    monkeypatch.setattr(weight_samples, "posterior_step", counting)

    def sampled(deltas):
        generator = torch.Generator().manual_seed(0)
        return StructuredPredictor(la, deltas).sampled(x, 20, generator, True).covariance

    together = sampled(grid)
    assert sum(steps) <= 4 * 20 < len(grid) * 20
    alone = torch.stack([sampled([delta]).squeeze(0) for delta in grid.tolist()])
    assert ((together / alone).sqrt() - 1).abs().mean() < TOLERANCE
