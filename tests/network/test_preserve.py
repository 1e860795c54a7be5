"""The user's model is left as it was, also when something raises."""

from __future__ import annotations

import copy

import pytest
import torch
from laplace.curvature import AsdlEF, AsdlGGN, BackPackGGN, CurvlinopsGGN
from laplace.utils import FeatureExtractor
from torch import nn

from laplace_debias import Laplace
from laplace_debias.network.features import computing_model
from laplace_debias.network.preserve import evaluation_mode, preserved
from tests import cases


def fingerprint(model: nn.Module) -> dict:
    """Everything about a model that a user could notice, except ``output_size``."""
    print_ = {"rng": torch.get_rng_state().tolist()}
    for name, p in model.named_parameters():
        grad = None if p.grad is None else (p.grad.data_ptr(), p.grad.clone().tolist())
        print_[name] = (p.data_ptr(), p.detach().tolist(), p.requires_grad, grad, sorted(vars(p)))
    for name, buffer in model.named_buffers():
        print_["buffer " + name] = buffer.tolist()
    for name, m in model.named_modules():
        hooks = {k: list(v) for k, v in vars(m).items() if "hook" in k and hasattr(v, "keys")}
        print_["module " + name] = (
            m.training, sorted(set(vars(m)) - {"output_size"}), hooks, m._is_full_backward_hook
        )  # fmt: skip
    return print_


def lived_in(case: cases.Case) -> nn.Module:
    """A model in mixed modes, with gradients, a user's hook and frozen parts."""
    model = case.model().train()
    model[-1].eval()
    model(case.data(3)[0]).sum().backward()
    model[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("backend", [AsdlGGN, AsdlEF, CurvlinopsGGN, BackPackGGN])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_fit_and_predict_leave_the_model_as_it_was(backend, subset):
    case = cases.MLP
    model = lived_in(case)
    before = fingerprint(model)
    la = Laplace(model, "classification", subset, "kron", debias=True, backend=backend)
    la.fit(case.data(9, 1), curvature_loader=case.data(9, 2), n_data=20)
    assert fingerprint(model) == before
    X = case.data(4, 3)[0]
    gen = torch.Generator().manual_seed(0)
    la(X)
    la(X, link_approx="mc", n_samples=3, generator=gen)
    la(X, pred_type="nn", link_approx="mc", n_samples=3, generator=gen)
    la.functional_samples(X, pred_type="nn", n_samples=3, generator=gen)
    la.predictive_samples(X, pred_type="nn", n_samples=3, generator=gen)
    assert fingerprint(model) == before


@pytest.mark.parametrize("backend", [AsdlGGN, CurvlinopsGGN, BackPackGGN])
def test_failing_half_way_leaves_model_and_posterior_as_they_were(backend):
    case = cases.MLP
    model = lived_in(case)
    la = Laplace(model, "classification", "all", "kron", debias=True, backend=backend)
    la.fit(case.data(9, 1), curvature_loader=case.data(9, 2), n_data=20)
    before, posterior = fingerprint(model), copy.deepcopy(la.state_dict())

    def breaking():
        yield case.data(9, 3)
        raise RuntimeError("disk gone")

    with pytest.raises(RuntimeError, match="disk gone"):
        la.fit(case.data(9, 4), curvature_loader=breaking(), n_data=20)
    assert fingerprint(model) == before
    after = la.state_dict()
    for old, new in zip(posterior["eigenvalues"], after["eigenvalues"], strict=True):
        for one, other in zip(old, new, strict=True):
            assert torch.equal(one, other)
    assert after["n_data"] == 20 and torch.equal(after["loss"], posterior["loss"])


def test_failing_forward_in_nn_prediction_leaves_the_weights():
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)
            self.fail = False

        def forward(self, x):
            if self.fail:
                raise RuntimeError("no")
            return self.layer(x)

    model = Moody().double()
    la = Laplace(model, "classification", "all", "kron", debias=True)
    la.fit(cases.MLP.data(9, 1), curvature_loader=cases.MLP.data(9, 2), n_data=20)
    weights = model.layer.weight.detach().clone()
    model.fail = True
    with pytest.raises(RuntimeError, match="no"):
        la(cases.MLP.data(4)[0], pred_type="nn", link_approx="mc")
    assert torch.equal(model.layer.weight, weights)
    la.mean.zero_()
    assert torch.equal(model.layer.weight, weights), "the mean aliases the parameters"


def test_prediction_runs_in_evaluation_mode():
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.9), nn.Linear(5, 4)).double().train()
    la = Laplace(model, "classification", "all", "kron", debias=True)
    la.fit(cases.MLP.data(9, 1), curvature_loader=cases.MLP.data(9, 2), n_data=20)
    X = cases.MLP.data(4)[0]
    assert torch.equal(la(X), la(X))
    assert model.training and model[1].training


def test_contexts_restore_after_an_exception():
    model = cases.batchnorm_cnn().train()
    model[1].eval()
    before = fingerprint(model)
    with pytest.raises(ZeroDivisionError), preserved(model):
        model.eval()
        model[0].register_forward_hook(lambda *_: None)
        model[0].weight.requires_grad_(False)
        model[0].weight.leftover = 1
        model[1].running_mean += 1
        model[1].register_buffer("running_var", torch.ones(4))
        raise ZeroDivisionError
    assert fingerprint(model) == before
    with pytest.raises(ZeroDivisionError), evaluation_mode(model):
        assert not model.training
        raise ZeroDivisionError
    assert fingerprint(model) == before


@pytest.mark.parametrize("last_layer", [False, True])
def test_half_precision_is_computed_in_single(last_layer):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).bfloat16()
    given = FeatureExtractor(model, last_layer_name="1") if last_layer else model
    with computing_model(given, last_layer) as (net, cast):
        f = net(cast(torch.ones(1, 3).bfloat16()))
        assert f.dtype == torch.float32 and net is not given
        if last_layer:
            f, phi = net.forward_with_features(torch.ones(1, 3))
            torch.testing.assert_close(net.last_layer(phi), f)  # the copy's own hook
            assert len(net.last_layer._forward_hooks) == 1
    assert all(p.dtype == torch.bfloat16 for p in given.parameters())
