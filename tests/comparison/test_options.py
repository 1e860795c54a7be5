"""The options of a comparison say what is wrong with them at once."""

import pytest
import torch
from torch import nn

from laplace_debias.comparison.options import CustomMethod, Prediction, Reference, Work
from laplace_debias.posterior.kron import Laplace


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Prediction(link_approx="logit"), "link_approx.*got 'logit'. Remedy"),
        (lambda: Prediction(n_samples=0), "n_samples >= 1, got 0. Remedy"),
        (lambda: Prediction(n_bins=0), "n_bins >= 1, got 0. Remedy"),
        (lambda: Reference(size=0), "size >= 1, got 0. Remedy"),
        (lambda: Work(n_shared=0), "n_shared >= 1, got 0. Remedy"),
        (lambda: Work(draws=[]), "at least one draw, got none. Remedy"),
        (lambda: Work(draws=[0, 3]).of(3), r"draws among 0 to 2, got \[0, 3\]. Remedy"),
        (lambda: CustomMethod("full", None), "got 'full'. Remedy"),
        (lambda: CustomMethod("plain", None), "got 'plain'. Remedy"),
    ],
)
def test_bad_values(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_a_reference_is_named_by_what_it_is():
    assert Reference().cell(60) == ("full", "full", 60)
    assert Reference(size=40).cell(60) == ("large-batch-40", "large-batch", 40)
    X, y = torch.randn(8, 3), torch.arange(8) % 2
    keys = set()
    for scale in (1.0, 2.0):
        la = Laplace(nn.Linear(3, 2), "classification", "all", "kron", debias="single")
        la.fit((scale * X, y), n_data=60)
        assert Reference(posterior=la).cell(60) == Reference(posterior=la).cell(60)
        keys |= {Reference(posterior=la).cell(60)[0], Reference(posterior=la, size=8).cell(60)[0]}
    assert len(keys) == 4 and {key.split("-")[0] for key in keys} == {"full", "large"}
    with pytest.raises(ValueError, match="size between 1 and N - 1 = 39, got 40. Remedy"):
        Reference(size=40).cell(40)


def test_draws_of_a_call():
    assert Work().of(3) == (0, 1, 2)
    assert Work(draws=iter([2, 0])).of(3) == (2, 0)


def test_defaults_are_the_papers():
    assert (Prediction().link_approx, Prediction().n_samples) == ("probit", 40)
    assert CustomMethod("ours", None).settings == {}
