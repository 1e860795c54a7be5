"""Options of a posterior that do not go together are refused by name."""

import pytest
import torch
from laplace.curvature import AsdlGGN
from torch import nn

from laplace_debias import Laplace
from laplace_debias.kfac.backend import HookEF
from laplace_debias.network.objective import objective_of
from laplace_debias.posterior.options import (
    check_backend,
    check_objective,
    check_prior_precision,
    check_scales,
    chosen_fisher,
    noise_ratios,
    warn_of_damping,
)


def made(likelihood="classification", **options):
    return Laplace(nn.Linear(2, 3), likelihood, "all", "kron", **({"debias": True} | options))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"draws": True}, "weights each datum, got AsdlGGN"),
        ({"labels": True}, "likelihood='bernoulli'"),
        ({"plain": False}, "class weights, label smoothing"),
    ],
)
def test_what_other_backends_cannot_do(asked, words):
    options = {"debias": "two-batch", "draws": False, "labels": False, "plain": True}
    check_backend("AsdlGGN", **options)
    with pytest.raises(ValueError, match=words):
        check_backend("AsdlGGN", **(options | asked))


def test_the_same_through_the_factory():
    for likelihood, options in (
        ("classification", {"debias": "crossfit"}),
        ("bernoulli", {}),
        ("classification", {"label_smoothing": 0.1}),
        ("regression", {"sigma_noise": [1.0, 2.0, 3.0]}),
    ):
        with pytest.raises(ValueError, match="Expected the backend HookGGN or HookEF"):
            made(likelihood, backend=AsdlGGN, **options)
    assert made(backend=AsdlGGN).fisher == "exact" and made(backend=HookEF).fisher == "empirical"


def test_noises_of_outputs_have_a_common_factor():
    la = made("regression", sigma_noise=[1.0, 2.0, 3.0])
    assert float(la.sigma_noise) == 1 and la.observation_noise.tolist() == [1.0, 2.0, 3.0]
    assert noise_ratios(torch.tensor([0.5])) == (None, torch.tensor([0.5]))
    with pytest.raises(ValueError, match="Remedy: pass e.g. 1.0"):
        noise_ratios("1.0")


def test_class_weights_need_labels():
    weights = objective_of("classification", [1.0, 2.0], 0.0, None, -100)
    check_objective(weights, "two-batch")
    with pytest.raises(ValueError, match="debias='crossfit'"):
        check_objective(weights, "crossfit")


def test_which_vectors():
    options = {"debias": "two-batch", "kfac_approx": "expand", "sampler": "trace"}
    options["backend_kwargs"] = {}
    assert chosen_fisher(None, "empirical", **options) == "empirical"
    assert chosen_fisher("mc", "exact", **options) == "mc"
    assert chosen_fisher(None, "exact", **options, foreign="AsdlGGN") == "exact"
    for wrong, words in (
        ({"fisher": "all"}, "`fisher` to be one of"),
        ({"kfac_approx": "shrink"}, "`kfac_approx` to be one of"),
        ({"sampler": "dice"}, "`sampler` to be one of"),
        ({"backend_kwargs": {"stochastic": True}}, "fisher='mc'"),
        ({"fisher": "mc", "foreign": "AsdlGGN"}, "got them with AsdlGGN"),
        ({"fisher": "mc", "debias": "auto"}, "exact curvature with debias='auto'"),
    ):
        with pytest.raises(ValueError, match=words):
            chosen_fisher(**({"fisher": None, "default": "exact"} | options | wrong))


def test_scales_are_positive():
    check_scales(1.0, torch.tensor(2.0))
    for noise, temperature, name in ((0.0, 1.0, "sigma_noise"), (1.0, float("nan"), "temperature")):
        with pytest.raises(ValueError, match=f"positive, finite `{name}`"):
            check_scales(noise, temperature)
    with pytest.raises(ValueError, match="prior"):
        check_prior_precision(torch.tensor([1.0, -1.0]))


def test_damping_is_named_at_the_users_line(recwarn):
    warn_of_damping(None)
    assert not recwarn
    made(damping=True)
    (said,) = [w for w in recwarn if "damping" in str(w.message)]
    assert said.filename == __file__
