"""One call: the way that was asked for, with everything that was said."""

import pytest
import torch

from laplace_debias import Laplace, linearized_predictive
from laplace_debias.predictive.predictor import StructuredPredictor


@pytest.fixture(scope="module")
def la():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    la = Laplace(net.double(), "classification", "all", "kron", debias="single")
    la.fit((torch.randn(12, 3, dtype=torch.float64), torch.arange(12) % 3), n_data=12)
    return la


X = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_it_is_the_dense_product(la):
    """J P^-1 J^T with the Jacobian of autograd and laplace-torch's own precision."""
    params = dict(la.model.named_parameters())
    J = torch.func.jacrev(lambda p: torch.func.functional_call(la.model, p, X))(params)
    J = torch.cat([J[name].flatten(2) for name in params], -1)  # [n, C, P]
    for delta in (0.5, 5.0):
        P = la.H.to_matrix() + delta * torch.eye(J.shape[-1], dtype=J.dtype)
        result = linearized_predictive(la, X, delta)
        covariance = (
            result.covariance.squeeze(0) if result.covariance.ndim > 3 else result.covariance
        )
        torch.testing.assert_close(covariance, J @ torch.linalg.solve(P, J.mT))
        torch.testing.assert_close(result.mean, la.model(X).detach())


@pytest.mark.parametrize("method", ["exact", "top", "samples"])
def test_the_method_is_the_one_asked_for(la, method):
    options = {"diagonal_output": True, "n_samples": 7}
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    found = linearized_predictive(la, X, method=method, generator=generators[0], **options)
    predictor = StructuredPredictor(la)
    expected = {
        "exact": lambda: predictor(X, True),
        "top": lambda: predictor.top(X),
        "samples": lambda: predictor.sampled(X, 7, generators[1], True),
    }[method]()
    assert found.method == expected.method == method
    torch.testing.assert_close(found.covariance, expected.covariance)


@pytest.mark.parametrize("options", [{"diagonal_output": True}, {"method": "samples"}])
def test_a_joint_covariance_is_exact_and_whole(la, options):
    with pytest.raises(ValueError, match="Expected joint=True alone.*Remedy"):
        linearized_predictive(la, X, joint=True, **options)
