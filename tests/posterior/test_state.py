"""A saved posterior comes back as the very same posterior."""

from __future__ import annotations

import io
import warnings
from collections import OrderedDict

import pytest
import torch
from laplace import Likelihood
from torch import nn

from laplace_debias import Laplace
from tests import cases


def saved(la) -> dict:
    """The state after a round trip through a file that only holds plain data."""
    file = io.BytesIO()
    torch.save(la.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("debias", ["two-batch", "single"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("case", [cases.MLP, cases.MLP_REGRESSION], ids=lambda c: c.name)
def test_round_trip(case, subset, debias):
    def build():
        return Laplace(
            case.model(), Likelihood(case.likelihood), subset, "kron", debias=debias,
            prior_precision=3.0, temperature=0.5,
        )  # fmt: skip

    la = build()
    if debias == "single":
        la.fit(case.data(9), n_data=50)
    else:
        la.fit(case.data(9, 1), curvature_loader=case.data(9, 2), n_data=50)
    la.prior_precision = torch.tensor([2.0] * la.n_layers)
    again = build()
    again.load_state_dict(saved(la))

    def draw(posterior):
        return posterior.sample(5, generator=torch.Generator().manual_seed(0))

    assert torch.equal(draw(la), draw(again))
    X = case.data(4, 3)[0]
    for one, other in zip(la(X), again(X), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(la.log_marginal_likelihood(), again.log_marginal_likelihood())
    if debias == "two-batch":
        assert la.curvature_bias() == again.curvature_bias()


def test_fitting_goes_on_after_loading():
    case = cases.CNN
    first = Laplace(case.model(), case.likelihood, "all", "kron", debias=True)
    first.fit(case.data(9, 1), override=False, curvature_loader=case.data(9, 2), n_data=50)
    second = Laplace(case.model(), case.likelihood, "all", "kron", debias=True)
    second.load_state_dict(saved(first))
    for la in (first, second):
        la.fit(case.data(9, 3), override=False, curvature_loader=case.data(9, 4), n_data=50)
    assert first.n_data == second.n_data == 100
    for one, other in zip(first.H.eigenvalues, second.H.eigenvalues, strict=True):
        for values, others in zip(one, other, strict=True):
            torch.testing.assert_close(values, others)


def other_width():
    return torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_other_architecture_is_refused(subset):
    la = Laplace(cases.MLP.model(), "classification", subset, "kron", debias=True)
    la.fit(cases.MLP.data(9, 1), curvature_loader=cases.MLP.data(9, 2), n_data=50)
    state = saved(la)
    other = Laplace(other_width().double(), "classification", subset, "kron", debias=True)
    with pytest.raises(ValueError, match=r"(?s)Expected the parameters.*model \[4, 6\].*Remedy"):
        other.load_state_dict(state)
    assert other._fitted is None
    deeper = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh()).double()
    other = Laplace(deeper, "classification", subset, "kron", debias=True)
    with pytest.raises(ValueError, match="(?s)Expected.*Remedy"):
        other.load_state_dict(state)


def test_other_kind_is_refused():
    la = Laplace(cases.MLP.model(), "classification", "all", "kron", debias=True)
    la.fit(cases.MLP.data(9, 1), curvature_loader=cases.MLP.data(9, 2), n_data=50)
    state = saved(la)
    for other in (
        Laplace(cases.MLP.model(), "classification", "last_layer", "kron", debias=True),
        Laplace(cases.MLP.model(), "classification", "all", "kron", debias="single"),
        Laplace(cases.MLP.model(), "regression", "all", "kron", debias=True),
    ):
        with pytest.raises(ValueError, match="Expected a state with .* Remedy"):
            other.load_state_dict(state)


def test_other_weights_warn():
    la = Laplace(cases.MLP.model(0), "classification", "all", "kron", debias=True)
    la.fit(cases.MLP.data(9, 1), curvature_loader=cases.MLP.data(9, 2), n_data=50)
    other = Laplace(cases.MLP.model(1), "classification", "all", "kron", debias=True)
    with pytest.warns(UserWarning, match="weights differ"):
        other.load_state_dict(saved(la))


def test_what_a_posterior_was_set_to_comes_from_its_state():
    case = cases.MLP_REGRESSION
    la = Laplace(case.model(), case.likelihood, "all", "kron", debias="single")
    la.fit(case.data(9), n_data=50)
    la.prior_precision, la.sigma_noise, la.temperature, la.prior_mean = 3.0, 0.4, 0.25, 0.7
    again = Laplace(case.model(), case.likelihood, "all", "kron", debias="single")
    again.load_state_dict(saved(la))
    assert float(again.temperature) == 0.25 and float(again.sigma_noise) == 0.4
    assert float(again.prior_mean) == 0.7
    X = case.data(4, 3)[0]
    for one, other in zip(la(X), again(X), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(la.log_marginal_likelihood(), again.log_marginal_likelihood())


def test_the_loss_that_was_trained_with_is_saved_and_checked():
    net = nn.Sequential(nn.Linear(2, 3)).double()
    batch = (torch.randn(8, 2).double(), torch.arange(8) % 3)
    options = {"class_weights": [1.0, 2.0, 0.5], "label_smoothing": 0.1, "ignore_index": 255}

    def built(**options):
        return Laplace(net, "classification", "all", "kron", debias="single", **options)

    la = built(**options)
    la.fit(batch, n_data=20)
    state = la.state_dict()
    same = built(**options)
    same.load_state_dict(state)
    assert torch.equal(same.H.to_matrix(), la.H.to_matrix())
    for missing in options:
        others = {name: value for name, value in options.items() if name != missing}
        with pytest.raises(ValueError, match=f"Expected a state with {missing}=.*Remedy"):
            built(**others).load_state_dict(state)
    older = {key: value for key, value in state.items() if key != "objective"} | {"format": 3}
    built().load_state_dict(older)  # did not record it


class PerToken(nn.Module):
    """One categorical per token."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[n, T, 2]`` to ``[n, T, 3]``."""
        return self.head(torch.tanh(self.body(x)))


def generated() -> torch.Generator:
    return torch.Generator().manual_seed(4)


X_8 = torch.randn(8, 2, generator=generated()).double()
Y_8 = torch.arange(8) % 3
TOKENS = torch.randn(8, 5, 2, generator=generated()).double()
KINDS: dict[str, tuple] = {
    "tokens": ("classification", (TOKENS, torch.arange(40).reshape(8, 5) % 3), {}, PerToken),
    "ignored tokens": (
        "classification", (TOKENS, torch.arange(40).reshape(8, 5) % 3), {"ignore_index": 2},
        PerToken,
    ),
    "sample weights": (
        "classification", (X_8, Y_8, torch.linspace(0.1, 2.0, 8).double()), {}, None,
    ),
    "bernoulli": ("bernoulli", (X_8, (X_8 @ torch.ones(2, 3).double() > 0).double()), {}, None),
    "noise per output": (
        "regression", (X_8, torch.randn(8, 3, generator=generated()).double()),
        {"sigma_noise": [0.5, 1.0, 2.0]}, None,
    ),
    "some parameters": ("classification", (X_8, Y_8), {"parameters": "head"}, None),
    "few rows": ("classification", (X_8[:1], Y_8[:1]), {}, None),
    "reduce": ("classification", (TOKENS[:, 0], Y_8), {"kfac_approx": "reduce"}, None),
    "empirical": ("classification", (X_8, Y_8), {"fisher": "empirical"}, None),
    "class weights": ("classification", (X_8, Y_8), {"class_weights": [1.0, 2.0, 0.5]}, None),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("debias", ["single", "two-batch"])
def test_every_kind_of_posterior_comes_back_from_a_file(kind, debias, tmp_path):
    likelihood, batch, options, make = KINDS[kind]

    def built():
        torch.manual_seed(0)
        plain = OrderedDict(body=nn.Linear(2, 9), act=nn.Tanh(), head=nn.Linear(9, 3))
        net = (nn.Sequential(plain) if make is None else make()).double()
        return Laplace(net, likelihood, "all", "kron", debias=debias, **options)

    la = built()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tokens are sampled
        torch.manual_seed(1)
        la.fit([batch, batch] if debias == "two-batch" else [batch], n_data=40)
    torch.save(la.state_dict(), tmp_path / "state.pt")
    again = built()
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(la.H.to_matrix(), again.H.to_matrix())
    assert torch.equal(la.log_marginal_likelihood(), again.log_marginal_likelihood())
    one, two = la(batch[0][:3]), again(batch[0][:3])
    pairs = zip(one, two, strict=True) if isinstance(one, tuple) else [(one, two)]
    assert all(torch.equal(a, b) for a, b in pairs)


def test_half_precision_halves_the_state_and_hardly_moves_predictions():
    """Measured deviations are 1e-4; rounding each entry of Q to 11 bits."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 3))
    batches = [(torch.randn(300, 60), torch.randint(3, (300,))) for _ in range(2)]
    la = Laplace(net, "classification", "all", "kron", debias=True)
    la.fit(batches, n_data=1000)
    half, full = la.state_dict(half=True), la.state_dict()

    def size(state):
        return sum(Q.nbytes for block in state["eigenvectors"] for Q in block)

    assert size(full) == 2 * size(half)
    other = Laplace(net, "classification", "all", "kron", debias=True)
    other.load_state_dict(half)
    x = torch.randn(20, 60)
    deviations = [p.output_moments(x)[1].diagonal(dim1=1, dim2=2).sqrt() for p in (other, la)]
    assert deviations[0].dtype == deviations[1].dtype
    off = (deviations[0] / deviations[1] - 1).abs().max()
    assert 0 < off < 1e-3
    assert other.H.eigenvectors[0][0].dtype == torch.float32
