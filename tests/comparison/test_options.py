"""The options of a comparison say what is wrong with them at once."""

import pytest

from laplace_debias.comparison.options import CustomMethod, Prediction, Reference, Work


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


def test_draws_of_a_call():
    assert Work().of(3) == (0, 1, 2)
    assert Work(draws=iter([2, 0])).of(3) == (2, 0)


def test_defaults_are_the_papers():
    assert (Prediction().link_approx, Prediction().n_samples) == ("probit", 40)
    assert CustomMethod("ours", None).settings == {}
