"""laplace-torch's objects as this library reads them."""

import pytest
import torch
from laplace import KronLaplace, Laplace
from laplace.curvature import CurvlinopsGGN
from laplace.utils import FeatureExtractor, KronDecomposed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias.network.upstream import (
    answering,
    backend_of,
    decomposed,
    device_of,
    dtype_of,
    feature_extractor,
    hessian_factor,
    is_last_layer,
    kron_of,
    last_layer_name,
    last_layer_of,
    posterior_params,
    unchecked_prior,
)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def fitted(subset, model=None, **options):
    la = Laplace(model or net(), "regression", subset, "kron", **options)
    X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).double()
    la.fit(DataLoader(TensorDataset(X, X[:, :2]), 4))
    return la


def test_names_that_are_read():
    la = fitted("all", sigma_noise=0.5, temperature=4.0, backend_kwargs={"stochastic": False})
    assert device_of(la) == torch.device("cpu") and dtype_of(la) == torch.float64
    assert float(hessian_factor(la)) == 1 / (0.5**2 * 4)
    backend, constructed, computed = backend_of(la)
    assert constructed == {"stochastic": False} and computed == {}
    other = Laplace(net(), "regression", "all", "kron", backend=CurvlinopsGGN, prior_mean=0.25)
    assert backend_of(other)[0] is CurvlinopsGGN and unchecked_prior(other)[1] == 0.25


def test_precision_is_the_factor_times_the_curvature_plus_the_prior():
    """What `decomposed` and `hessian_factor` mean, against laplace-torch's own matrix."""
    la = fitted("all", sigma_noise=0.5, temperature=4.0, prior_precision=3.0)
    H = decomposed(la)
    assert isinstance(H, KronDecomposed)
    matrix = hessian_factor(la) * H.to_matrix() + 3 * torch.eye(26)
    torch.testing.assert_close(la.posterior_precision.to_matrix(), matrix)
    with pytest.raises(AttributeError, match="fitted.*Remedy"):
        decomposed(Laplace(net(), "regression", "all", "kron"))


def test_last_layers():
    la = fitted("last_layer")
    assert is_last_layer(la) and not is_last_layer(fitted("all"))
    assert last_layer_name(la.model) == "2" and last_layer_name(net()) is None
    assert last_layer_of(la.model) is la.model.model[2]
    assert feature_extractor(la.model) is la.model
    with pytest.raises(TypeError, match="FeatureExtractor .* got Linear.*Remedy"):
        feature_extractor(nn.Linear(1, 1))
    unknown = Laplace(net(), "regression", "last_layer", "kron")
    with pytest.raises(ValueError, match="knows its last layer.*Remedy"):
        last_layer_of(unknown.model)


def test_parameters_of_the_blocks():
    la = fitted("all")
    assert [id(p) for p in posterior_params(la)] == [id(p) for p in la.model.parameters()]
    last = fitted("last_layer")
    assert [tuple(p.shape) for p in posterior_params(last)] == [(2, 4), (2,)]
    # a posterior over the trainable part of the last layer only
    last.model.last_layer.bias.requires_grad_(False)
    assert len(posterior_params(last)) == 2
    Q, lam = last.H.eigenvectors[:1], last.H.eigenvalues[:1]
    last.H = KronDecomposed(Q, lam)
    assert [tuple(p.shape) for p in posterior_params(last)] == [(2, 4)]


def test_blocks_as_laplace_torch_holds_them():
    B, A = torch.randn(2, 2).double(), torch.randn(3, 3).double()
    matrix = kron_of([(B, A), [B]]).to_matrix()
    torch.testing.assert_close(matrix, torch.block_diag(torch.kron(B, A), B))


def test_feature_extractors_without_a_name():
    assert feature_extractor(FeatureExtractor(net())).last_layer is None


def test_private_calls_reach_public_methods():
    @answering
    class Posterior:
        def check_fitted(self):
            raise AttributeError("not yet")

        def output_moments(self, *args):
            return ("moments", *args)

        def network_samples(self, *args, **kwargs):
            return ("samples", *args, kwargs)

        def network_predictions(self, *args, **kwargs):
            return ("predictions", *args, kwargs)

    la = Posterior()
    with pytest.raises(AttributeError, match="not yet"):
        la._check_H_init()
    la._init_H()
    assert la.H.kfacs == []
    assert la._glm_predictive_distribution("X", diagonal_output=True) == (
        "moments", "X", False, True,
    )  # fmt: skip
    assert la._nn_functional_samples("X", 5, a=1) == ("samples", "X", 5, None, {"a": 1})
    assert la._nn_predictive_samples("X", 5, a=1) == ("predictions", "X", 5, None, {"a": 1})


def test_laplace_torch_still_calls_these_names():
    """A release that renames one would leave its own method in charge."""
    for name in (
        "_check_H_init",
        "_init_H",
        "_glm_predictive_distribution",
        "_nn_functional_samples",
        "_nn_predictive_samples",
    ):
        assert callable(getattr(KronLaplace, name)), name
