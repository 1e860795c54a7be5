"""The factory: which class comes out, and what it is handed."""

import laplace
import pytest
from laplace.curvature import AsdlEF
from laplace.utils.enums import HessianStructure, SubsetOfWeights

from laplace_debias.posterior.kron import DebiasedKronLaplace, DebiasedKronLLLaplace, Laplace
from tests.cases import MLP


@pytest.mark.parametrize("debias", [True, "two-batch", "single", "crossfit"])
@pytest.mark.parametrize(
    ("subset", "cls"), [("all", DebiasedKronLaplace), ("last_layer", DebiasedKronLLLaplace)]
)
def test_every_method_has_a_class_for_both_subsets(debias, subset, cls):
    la = Laplace(MLP.model(), "classification", subset, "kron", debias=debias)
    assert type(la) is cls
    assert la.debias == ("two-batch" if debias is True else debias)
    enums = Laplace(
        MLP.model(), "classification", SubsetOfWeights(subset), HessianStructure.KRON, debias=debias
    )
    assert type(enums) is cls


@pytest.mark.parametrize(
    ("subset", "structure"),
    [("all", "kron"), ("last_layer", "kron"), ("all", "diag"), ("last_layer", "full")],
)
def test_without_debiasing_it_is_laplace_torch(subset, structure):
    ours = Laplace(MLP.model(), "classification", subset, structure)
    theirs = laplace.Laplace(MLP.model(), "classification", subset, structure)
    assert type(ours) is type(theirs)


def test_arguments_are_handed_on():
    la = Laplace(
        MLP.model(), "regression", "all", "kron", debias=True, sigma_noise=0.5, backend=AsdlEF
    )
    assert float(la.sigma_noise) == 0.5 and la._backend_cls is AsdlEF
    assert Laplace(MLP.model(), "regression", "all", "kron", 0.25, debias=True).sigma_noise == 0.25


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"debias": "three-batch"}, "'two-batch'.*got 'three-batch'"),
        ({"debias": True, "hessian_structure": "diag"}, "got 'diag'.*coordinate axes"),
        ({"debias": True, "hessian_structure": "full"}, "got 'full'"),
        ({"debias": True, "subset_of_weights": "subnetwork"}, "got 'subnetwork'"),
    ],
)
def test_what_there_is_not(options, message):
    with pytest.raises(ValueError, match=rf"Expected.*{message}.*Remedy"):
        Laplace(MLP.model(), "classification", **options)
