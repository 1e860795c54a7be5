"""Prior precisions and names of methods: what is accepted, and what is said otherwise."""

import pytest
import torch

from laplace_debias.debias.options import debias_mode
from laplace_debias.posterior.options import check_prior_precision


@pytest.mark.parametrize("good", [1.0, 1e-9, torch.tensor([0.5, 2.0])])
def test_positive_finite_prior_precisions_pass(good):
    check_prior_precision(good)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan"), torch.tensor([1.0, 0.0])])
def test_other_prior_precisions_are_refused(bad):
    with pytest.raises(ValueError, match="positive, finite prior precision.*Remedy"):
        check_prior_precision(bad)


def test_methods_have_one_name_each():
    assert debias_mode(True) == debias_mode("two-batch") == "two-batch"
    assert [debias_mode(name) for name in ("single", "crossfit")] == ["single", "crossfit"]
    for bad in (False, None, 1, "debiased"):
        with pytest.raises(ValueError, match="`debias`.*Remedy"):
            debias_mode(bad)
