"""Predictions from any method and through any link, against explicit linearised networks."""

import pytest
import torch
from laplace.baselaplace import KronLaplace
from laplace.lllaplace import KronLLLaplace

from laplace_debias.predictive.predictions import cheapest_method, chunk_sizes, glm_predictions
from laplace_debias.predictive.predictor import StructuredPredictor
from tests.cases_predictive import STRUCTURED
from tests.fitted_predictive import EXACT, build, double_precision, fitted_cnn  # noqa: F401
from tests.oracles_predictive import dense_covariance

pytestmark = pytest.mark.usefixtures("double_precision")

GRID = [0.5, 4.0]


def moments(la, x, delta):
    """Means and covariances ``[n, C, C]`` of the outputs from explicit matrices."""
    joint = dense_covariance(la, x, delta)
    return la.model(x).detach(), torch.stack([joint[i, :, i] for i in range(len(x))])


def test_regression_gives_mean_and_covariance_per_prior_precision():
    la, x = build(STRUCTURED["mlp"](), likelihood="regression")
    found = list(glm_predictions(StructuredPredictor(la, GRID), x, regression=True))
    assert len(found) == 2
    for (mean, covariance), delta in zip(found, GRID, strict=True):
        f, expected = moments(la, x, delta)
        torch.testing.assert_close(mean, f, **EXACT)
        torch.testing.assert_close(covariance, expected, **EXACT)
    diagonal = glm_predictions(
        StructuredPredictor(la, GRID), x, regression=True, diagonal_output=True
    )
    for (_, variance), (_, covariance) in zip(diagonal, found, strict=True):
        torch.testing.assert_close(variance, covariance.diagonal(dim1=1, dim2=2), **EXACT)


def test_probit_scales_the_logits_by_their_variance():
    la, x = build(STRUCTURED["mlp"]())
    found = glm_predictions(StructuredPredictor(la, GRID), x, regression=False)
    for (log_probs,), delta in zip(found, GRID, strict=True):
        f, covariance = moments(la, x, delta)
        kappa = 1 / (1 + torch.pi / 8 * covariance.diagonal(dim1=1, dim2=2)).sqrt()
        torch.testing.assert_close(log_probs, (kappa * f).log_softmax(-1), **EXACT)


@pytest.mark.parametrize("method", ["exact", "samples"])
@pytest.mark.parametrize("cls", [KronLaplace, KronLLLaplace])
def test_sampled_links_converge_to_the_mean_of_the_softmax(method, cls):
    """Both ways to sample, against 200,000 draws of the explicit Gaussian."""
    la, x = fitted_cnn(cls)
    x = x[:2]
    predictor = StructuredPredictor(la, [0.5])
    result = predictor(x)
    L = torch.linalg.cholesky(result.covariance[0])
    draws = result.mean + torch.einsum(
        "ncd,snd->snc", L, torch.randn(200_000, 2, 3, generator=torch.Generator().manual_seed(1))
    )
    wanted = draws.softmax(-1).mean(0)
    S = 20_000
    ((log_probs,),) = glm_predictions(
        predictor, x, regression=False, link_approx="mc", n_samples=S, method=method,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    error = (log_probs.exp() - wanted).abs()
    assert (error < 5 * draws.softmax(-1).std(0) * (1 / S + 1 / 200_000) ** 0.5).all()


@pytest.mark.parametrize("labels", [True, False])
def test_sampled_links_are_means_over_the_samples_themselves(labels):
    la, x = build(STRUCTURED["mlp"]())
    predictor = StructuredPredictor(la, GRID)
    _, samples = predictor.samples(x, 7, torch.Generator().manual_seed(3))
    found = glm_predictions(
        predictor, x, regression=False, link_approx="mc", method="samples", n_samples=7,
        generator=torch.Generator().manual_seed(3), labels=labels,
    )  # fmt: skip
    for (log_probs,), drawn in zip(found, samples, strict=True):
        if labels:
            log_probs = log_probs[..., 1]  # of yes
        expected = drawn.sigmoid() if labels else drawn.softmax(-1)
        torch.testing.assert_close(log_probs.exp(), expected.mean(0), **EXACT)


def test_sampled_covariances_are_those_of_the_samples():
    """With a generator of one's own, which draws the very weights that are averaged over."""
    la, x = build(STRUCTURED["mlp"](), likelihood="regression")
    predictor = StructuredPredictor(la, GRID)
    f, samples = predictor.samples(x, 7, torch.Generator().manual_seed(3))
    found = glm_predictions(
        predictor, x, regression=True, method="samples", n_samples=7,
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    for (mean, covariance), drawn in zip(found, samples, strict=True):
        torch.testing.assert_close(mean, f, **EXACT)
        expected = sum(torch.einsum("nc,nd->ncd", s - f, s - f) for s in drawn) / 7
        torch.testing.assert_close(covariance, expected, **EXACT)


def test_one_prior_precision_gives_one_prediction():
    la, x = build(STRUCTURED["mlp"]())
    assert len(list(glm_predictions(StructuredPredictor(la), x, regression=False))) == 1


def test_the_generator_decides_and_is_shared_by_all_prior_precisions():
    la, x = build(STRUCTURED["mlp"]())

    def run(seed, grid):
        generator = torch.Generator().manual_seed(seed)
        return [
            part[0]
            for part in glm_predictions(
                StructuredPredictor(la, grid), x, regression=False, link_approx="mc",
                n_samples=5, method="samples", generator=generator,
            )
        ]  # fmt: skip

    assert torch.equal(run(0, GRID)[1], run(0, GRID)[1])
    assert not torch.equal(run(0, GRID)[1], run(1, GRID)[1])
    same = run(0, [2.0, 2.0])
    torch.testing.assert_close(same[0], same[1], **EXACT)


def test_unknown_words():
    la, x = build(STRUCTURED["mlp"]())
    predictor = StructuredPredictor(la)
    with pytest.raises(ValueError, match="method to be one of .*got 'fast'.*Remedy"):
        list(glm_predictions(predictor, x, regression=False, method="fast"))
    with pytest.raises(ValueError, match="link"):
        list(glm_predictions(predictor, x, regression=False, link_approx="logit"))


def test_a_temperature_divides_logits_and_their_deviations():
    la, x = build(STRUCTURED["mlp"]())
    found = glm_predictions(
        StructuredPredictor(la, GRID), x, regression=False, logit_temperature=2.5
    )
    for (log_probs,), delta in zip(found, GRID, strict=True):
        f, covariance = moments(la, x, delta)
        variance = covariance.diagonal(dim1=1, dim2=2) / 2.5**2
        expected = (f / 2.5 / (1 + torch.pi / 8 * variance).sqrt()).log_softmax(-1)
        torch.testing.assert_close(log_probs, expected, **EXACT)


@pytest.mark.parametrize(
    ("C", "k", "S", "diagonal", "top", "shared", "way"),
    [
        (10, 1, 100, True, True, True, "exact"),
        (100, 1, 100, True, True, True, "exact"),  # 400 against 5 x 80
        (101, 1, 100, True, True, True, "top"),
        (400, 1, 100, False, True, True, "exact"),  # no covariances by top; 2,000 against 5 x 400
        (1000, 1, 100, False, True, True, "samples"),
        (1000, 14, 20, True, False, True, "samples"),  # three nodes: 240
        (1000, 14, 20, True, False, False, "exact"),  # a prior per layer: 14 x 80
        (1000, 14, 40, True, True, False, "top"),
    ],
)
def test_auto_takes_the_way_that_costs_least(C, k, S, diagonal, top, shared, way):
    assert cheapest_method(C, k, S, diagonal=diagonal, top=top, shared=shared) == way


def test_outputs_are_cut_only_where_many_data_do_not_fit():
    assert chunk_sizes(32, 20, "variance", 2**40, 2**24, 2**22)[1] is None
    assert chunk_sizes(32, 20, "variance", 2**30, 2**24, 2**22) == (16, 10)
