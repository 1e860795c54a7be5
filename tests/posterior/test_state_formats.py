"""States of earlier formats load, or say why not; a state that is refused changes nothing."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace_debias import Laplace
from laplace_debias.kfac.thin import bases_of
from laplace_debias.posterior.state import FORMAT, KEYS
from tests import cases


def recorded(number: int) -> dict[str, Any]:
    """States, predictions and marginal likelihoods that a commit with this format computed."""
    file = Path(__file__).with_name(f"state_format_{number}.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def tensors(value: Any) -> Any:
    """Tensors again, where the file holds their numbers and types."""
    if isinstance(value, dict) and set(value) == {"tensor", "dtype"}:
        dtype = getattr(torch, value["dtype"].removeprefix("torch."))
        return torch.tensor(value["tensor"], dtype=dtype)
    if isinstance(value, dict):
        return {name: tensors(part) for name, part in value.items()}
    return [tensors(part) for part in value] if isinstance(value, list) else value


def network(d: int = 2) -> nn.Module:
    """The network that the states belong to."""
    net = nn.Sequential(nn.Linear(d, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            values = torch.arange(p.numel(), dtype=torch.float64).reshape(p.shape)
            p.copy_((values + 1 + i) / 8 * (-1) ** i)
    return net


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_state_of_an_earlier_format_is_the_posterior_it_was(subset, number):
    saved = recorded(number)[subset]
    la = Laplace(network(), "classification", subset, "kron", debias=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the weights are those of the state
        la.load_state_dict(tensors(saved["state"]))
    X = torch.tensor([[2.0, 1.0], [-1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    expected = torch.tensor(saved["probabilities"], dtype=torch.float64)
    torch.testing.assert_close(la(X), expected, rtol=1e-12, atol=0)
    assert float(la.log_marginal_likelihood()) == pytest.approx(saved["marglik"], rel=1e-12)
    assert la.state_dict()["format"] == FORMAT


def test_a_state_of_few_rows_and_another_loss_is_the_posterior_it_was():
    saved = recorded(4)["few rows"]
    options = {"label_smoothing": 0.1, "class_weights": [1.0, 2.0]}
    la = Laplace(network(8), "classification", "all", "kron", debias=True, **options)
    la.load_state_dict(tensors(saved["state"]))
    assert any(Q.shape[1] < len(Q) for block in bases_of(la.H) for Q in block)
    X = torch.tensor([[2.0, 1.0], [-1.0, 0.0], [0.0, 1.0]], dtype=torch.float64).repeat(1, 4)
    expected = torch.tensor(saved["probabilities"], dtype=torch.float64)
    torch.testing.assert_close(la(X), expected, rtol=1e-12, atol=0)
    assert float(la.log_marginal_likelihood()) == pytest.approx(saved["marglik"], rel=1e-12)
    with pytest.raises(ValueError, match="label_smoothing|class_weights"):
        other = Laplace(network(8), "classification", "all", "kron", debias=True)
        other.load_state_dict(tensors(saved["state"]))


def plain(value: Any) -> bool:
    """Whether a value is a tensor, a number, a string, or a list or tuple of such."""
    if isinstance(value, (list, tuple)):
        return all(map(plain, value))
    return value is None or isinstance(value, (Tensor, int, float, str))


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_state_holds_plain_values_only(subset):
    state = fitted(subset).state_dict()
    assert set(state) == {"format", *KEYS}
    assert all(map(plain, state.values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"format": FORMAT + 1},
            f"Expected a state of format 1 to {FORMAT}.*update laplace_debias",
        ),
        ({"format": None}, r"got None\. Remedy: .*laplace-torch"),
        ({"eigenvalues": ...}, r"got one without eigenvalues\. Remedy"),
    ],
)
def test_other_formats_say_why_not(change, message):
    la = fitted("all")
    state = {k: v for k, v in {**la.state_dict(), **change}.items() if v is not ...}
    with pytest.raises(ValueError, match=message):
        la.load_state_dict(state)


def fitted(subset: str, **options: Any):
    case = cases.MLP
    la = Laplace(case.model(), "classification", subset, "kron", debias=True, **options)
    la.fit(case.data(9, 1), curvature_loader=case.data(9, 2), n_data=50)
    return la


def snapshot(la: Any) -> dict[str, Any]:
    """Everything that is in a posterior and its model."""
    kept = {name: value for name, value in vars(la).items() if name != "_kept"}
    return {**kept, "of the model": dict(vars(la.model))}


def broken(state: dict[str, Any], key: str) -> dict[str, Any]:
    """A state with a part that makes loading fail as late as this part is looked at."""
    values = {
        "last_layer_name": "absent",
        "parameters": [["2.weight", [9, 9]]],
        "eigenvectors": state["eigenvectors"][:1],
        "eigenvalues": [[torch.full_like(t, torch.nan) for t in b] for b in state["eigenvalues"]],
        "mean": None,
        "prior_mean": "nothing",
        "prior_precision": torch.tensor([-1.0]),
    }
    return {**state, key: values[key]}


LATE = ["parameters", "eigenvectors", "eigenvalues", "mean", "prior_mean", "prior_precision"]


@pytest.mark.parametrize("before", ["new", "fitted"])
@pytest.mark.parametrize(
    ("subset", "key"),
    [("last_layer", "last_layer_name")]
    + [(subset, key) for subset in ("all", "last_layer") for key in [*LATE, "weights"]],
)
def test_loading_that_raises_changes_nothing(subset, key, before):
    state = fitted(subset, prior_precision=7.0).state_dict()
    other = Laplace(cases.MLP.model(1), "classification", subset, "kron", debias=True)
    if before == "fitted":
        other.fit(cases.MLP.data(9, 3), curvature_loader=cases.MLP.data(9, 4), n_data=20)
    found = snapshot(other)
    found_deep = copy.deepcopy(found)
    with pytest.raises(Exception, match=".+"), warnings.catch_warnings():
        warnings.simplefilter("error")  # other weights are a warning, here the last thing to raise
        other.load_state_dict(state if key == "weights" else broken(state, key))
    after = snapshot(other)
    assert after.keys() == found.keys()
    for name, value in found.items():
        assert after[name] is value or after[name] == value, name
    for name, value in found_deep.items():
        if isinstance(value, Tensor):
            assert torch.equal(after[name], value), name
    other.fit(cases.MLP.data(9, 5), curvature_loader=cases.MLP.data(9, 6), n_data=20)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_freezing_after_the_fit_leaves_the_posterior_as_it_is(subset):
    la = fitted(subset)
    X = cases.MLP.data(4, 3)[0]
    expected = la(X)
    la.model.requires_grad_(False)
    state = la.state_dict()
    assert torch.equal(la(X), expected)
    la.load_state_dict(state)
    assert torch.equal(la(X), expected)
    again = Laplace(cases.MLP.model(), "classification", subset, "kron", debias=True)
    again.load_state_dict(state)
    assert torch.equal(again(X), expected)


def test_fitting_other_parameters_than_those_built_for_is_refused():
    la = fitted("all")
    la.model[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"Expected the parameters .*'0\.weight'.*Remedy: freeze"):
        la.fit(cases.MLP.data(9, 1), curvature_loader=cases.MLP.data(9, 2), n_data=50)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_weights_in_any_memory_order(subset):
    case = cases.CNN
    strided = case.model().to(memory_format=torch.channels_last)
    strided[4].weight = nn.Parameter(strided[4].weight.detach().T.contiguous().T)
    assert not strided[0].weight.is_contiguous() and not strided[4].weight.is_contiguous()
    X, gen = case.data(4, 3)[0], torch.Generator
    results = []
    for model in (case.model(), strided):
        la = Laplace(model, "classification", subset, "kron", debias=True)
        la.fit(case.data(9, 1), curvature_loader=case.data(9, 2), n_data=50)
        copied = Laplace(model, "classification", subset, "kron", debias=True)
        copied.load_state_dict(la.state_dict())
        assert torch.equal(copied(X), la(X))
        options = {"n_samples": 3, "generator": gen().manual_seed(0)}
        results.append(
            [
                la(X),
                la(X, pred_type="nn", link_approx="mc", **options),
                la.sample(2, generator=gen().manual_seed(1)),
                la.mean,
                la.log_marginal_likelihood(),
            ]
        )
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
