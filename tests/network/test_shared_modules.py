"""One module under two names: right results, and the user's own parameters stay in it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace_debias import Laplace, linearized_predictive
from laplace_debias.quadratics import Quadratic, evaluate_trajectory
from tests import cases


def twice() -> nn.Module:
    """A layer that is called twice, by two names, and a head."""
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(3, 4)).double()


def once_more() -> nn.Module:
    """The same network with the layer's module under one name only."""

    class Twice(nn.Module):
        """Calls one layer twice."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Map ``[n, 3]`` to ``[n, 4]``."""
            return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))

    return Twice().double()


def results(model: nn.Module) -> dict[str, torch.Tensor]:
    """Numbers that need the model with other weights than its own."""
    X, y = cases.MLP.data(6, 3)
    la = Laplace(model, "classification", "all", "kron", debias=True)
    la.fit(cases.MLP.data(9, 1), curvature_loader=cases.MLP.data(9, 2), n_data=50)
    P = la.n_params
    options = {"n_samples": 4, "generator": torch.Generator().manual_seed(0)}
    found = {
        "samples": linearized_predictive(la, X, method="samples", **options).covariance,
        "networks": la(X, pred_type="nn", link_approx="mc", **options),
        "exact": la(X),
    }
    vectors = torch.randn(P, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for curvature in ("ggn", "hessian"):
        q = Quadratic(
            model, nn.CrossEntropyLoss(), (X, y), curvature=curvature, chunk_size=4, max_columns=1
        )
        found[curvature] = q @ vectors
        found[curvature + " gram"] = q.gram(vectors)
        found[curvature + " gradient"] = q.gradient
    found["trajectory"] = evaluate_trajectory(
        model, nn.CrossEntropyLoss(), (X, y), 0.1 * vectors
    ).loss
    return found


def test_the_models_own_parameters_stay_and_results_are_right():
    model = cases.seeded(twice)
    own = dict(model.named_parameters(remove_duplicate=False))
    values = {name: p.detach().clone() for name, p in own.items()}
    found = results(model)
    for name, p in model.named_parameters(remove_duplicate=False):
        assert p is own[name] and torch.equal(p, values[name]), name
    assert all(isinstance(layer.weight, nn.Parameter) for layer in (model[0], model[2], model[4]))
    expected = results(cases.seeded(once_more))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("curvature", ["ggn", "hessian", "kfac"])
def test_products_that_raise_leave_the_parameters(curvature):
    model = cases.seeded(twice)
    own = dict(model.named_parameters(remove_duplicate=False))
    q = Quadratic(model, nn.CrossEntropyLoss(), cases.MLP.data(6, 3), curvature=curvature)
    calls = []

    def fail(*_: object) -> None:
        calls.append(1)
        raise RuntimeError("no")

    handle = q._model[4].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        q @ torch.ones(q.shape[0], dtype=torch.float64)
    handle.remove()
    assert calls
    assert dict(model.named_parameters(remove_duplicate=False)) == own
