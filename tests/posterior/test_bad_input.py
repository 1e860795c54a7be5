"""Input that is easily handed over by mistake: handled, or refused in words that help."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from laplace_debias import Laplace
from tests import cases

SUBSETS = pytest.mark.parametrize("subset", ["all", "last_layer"])
X, y = cases.MLP.data(12, 3)
NEW = cases.MLP.data(5, 4)[0]


class TwoLayers(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, 3]`` to ``[n, 4]``."""
        return self.b(torch.tanh(self.a(x)))


class ByKeyword(TwoLayers):
    """The same, with layers called by keyword."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, 3]`` to ``[n, 4]``."""
        return self.b(input=torch.tanh(self.a(input=x)))


class Squeezed(TwoLayers):
    """The same, without the data's dimension for a single datum."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, 3]`` to ``[n, 4]``, and ``[1, 3]`` to ``[4]``."""
        return super().forward(x).squeeze()


def make(subset: str, model: nn.Module | type[nn.Module] | None = None, **options):
    if isinstance(model, type):
        model = cases.seeded(model).double()
    model = model or cases.MLP.model()
    options = {"debias": "single", **options}
    return Laplace(model, "classification", subset, "kron", **options)


def fitted(subset: str, model: nn.Module | type[nn.Module] | None = None, **options):
    la = make(subset, model, **options)
    la.fit((X, y), n_data=12)
    return la


@SUBSETS
def test_empty_mini_batches_are_skipped_in_a_fit_and_refused_in_a_prediction(subset):
    la = make(subset)
    la.fit([(X[:0], y[:0]), (X[:6], y[:6]), (X[:0], y[:0]), (X[6:], y[6:])], n_data=12)
    torch.testing.assert_close(la(NEW), fitted(subset)(NEW), rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="Expected at least one datum"):
        la(NEW[:0])
    with pytest.raises(ValueError, match="Expected at least one labelled datum"):
        la.fit([(X[:0], y[:0])], n_data=12)


@SUBSETS
def test_layers_called_by_keyword(subset):
    one, other = fitted(subset, TwoLayers), fitted(subset, ByKeyword)
    assert torch.equal(one(NEW), other(NEW))
    gen = torch.Generator
    nn_options = {"pred_type": "nn", "link_approx": "mc", "n_samples": 3}
    assert torch.equal(
        one(NEW, generator=gen().manual_seed(0), **nn_options),
        other(NEW, generator=gen().manual_seed(0), **nn_options),
    )


@SUBSETS
def test_a_squeezed_output(subset):
    with pytest.raises(ValueError, match="Expected .*Remedy"):  # found before the fit
        fitted(subset, Squeezed)
    la = fitted(subset, Squeezed, verify=False)
    with pytest.raises(ValueError, match=r"Expected .*Remedy: .*`\.squeeze\(\)`"):
        la(NEW[:1])
    if subset == "all":
        with pytest.raises(ValueError, match=r"one row of outputs per datum, got \[4\]"):
            la(NEW[:1], pred_type="nn", link_approx="mc", n_samples=2)
    else:
        expected = fitted(subset, TwoLayers)
        torch.testing.assert_close(la(NEW), expected(NEW), rtol=1e-12, atol=0)


@SUBSETS
@pytest.mark.parametrize("as_loader", [True, False])
def test_fitting_and_predicting_in_inference_mode(subset, as_loader):
    expected = fitted(subset)
    la, gen = make(subset), torch.Generator
    options = {"link_approx": "mc", "n_samples": 3}
    with torch.inference_mode():
        inputs, labels = X.clone(), y.clone()
        assert inputs.is_inference()
        data = DataLoader(TensorDataset(inputs, labels), 12) if as_loader else (inputs, labels)
        la.fit(data, n_data=12)
        found = [la(NEW.clone()), la(NEW, generator=gen().manual_seed(0), **options)]
        found.append(la(NEW, pred_type="nn", generator=gen().manual_seed(0), **options))
        la.prior_precision = torch.tensor(7.0, dtype=torch.float64)
        found.append(la(NEW))
        la.prior_precision.fill_(9.0)  # a tensor of inference mode does not count its changes
        found.append(la(NEW))
    wanted = [expected(NEW), expected(NEW, generator=gen().manual_seed(0), **options)]
    wanted.append(expected(NEW, pred_type="nn", generator=gen().manual_seed(0), **options))
    for delta in (7.0, 9.0):
        expected.prior_precision = delta
        wanted.append(expected(NEW))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.clone(), other, rtol=1e-10, atol=0)


def drawing(n: int) -> DataLoader:
    """A loader that draws n data with replacement."""
    gen = torch.Generator().manual_seed(0)
    sampler = RandomSampler(range(12), replacement=True, num_samples=n, generator=gen)
    return DataLoader(TensorDataset(X, y), batch_size=6, sampler=sampler)


def test_a_sampler_with_replacement_may_draw_more_data_than_there_are():
    la = make("all")
    la.fit(drawing(36))
    drawn = [(one, other) for one, other in drawing(36)]
    expected = make("all")
    expected.fit(drawn, n_data=36)
    assert la.n_data == 12
    for one, other in zip(la.H.eigenvalues[-1], expected.H.eigenvalues[-1], strict=True):
        torch.testing.assert_close(3 * one, other)


def test_a_sampler_with_replacement_is_warned_about_where_data_must_differ():
    with pytest.warns(UserWarning, match="draws with replacement"):
        make("all", debias=True).fit(drawing(36))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make("all", debias=True).fit(cases.loader(X, y, 6))


def padded(lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Mini-batches of token sequences, each padded to a length of its own."""
    gen = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(6, T, 3, generator=gen, dtype=torch.float64),
            torch.randint(4, (6,), generator=gen),
        )
        for T in lengths
    ]


@pytest.mark.parametrize("lengths", [[5, 3, 4, 5], [4, 4, 4, 4]])
def test_padded_mini_batches_of_unequal_length_in_a_stream(lengths):
    batches = padded(lengths)
    la = Laplace(
        cases.TOKENS.model(), "classification", "all", "kron", debias="crossfit",
        sampling="curvature", n_curvature=24, n_pool=24, n_input=24,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    la.fit(iter(batches), n_data=24)
    probabilities = la(batches[1][0])
    assert probabilities.shape == (6, 4) and torch.isfinite(probabilities).all()
    # the whole pool gives the loss, the output layer's B, and A as a mean over all its rows
    model = cases.TOKENS.model().eval()
    f = torch.cat([model(X).detach() for X, _ in batches])
    y = torch.cat([y for _, y in batches])
    torch.testing.assert_close(la.loss, nn.functional.cross_entropy(f, y, reduction="sum"))
    p = f.softmax(-1)
    hessian = torch.diag(p.sum(0)) - p.T @ p
    names = dict(zip(la.parameter_names, la.H.eigenvalues, strict=True))
    lam = torch.linalg.eigvalsh(hessian).clamp(min=0)
    torch.testing.assert_close(names["head.bias"][0], lam, rtol=1e-8, atol=1e-10)
    rows = torch.cat([X.flatten(0, 1) for X, _ in batches])
    torch.testing.assert_close(names["embed.weight"][1].sum(), rows.square().sum() / len(rows))


@SUBSETS
@pytest.mark.parametrize("n_samples", [0, -1, 2.5])
@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_numbers_of_samples(subset, pred_type, n_samples):
    la = fitted(subset)
    with pytest.raises(ValueError, match=f"Expected n_samples of at least 1, got {n_samples}"):
        la(NEW, pred_type=pred_type, link_approx="mc", n_samples=n_samples)


@SUBSETS
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_one_input_with_five_targets(subset, fisher):
    with pytest.raises(ValueError, match="Expected 1 targets for as many data, got 5. Remedy"):
        make(subset, fisher=fisher).fit((X[:1], y[:5]), n_data=12)
    la = Laplace(cases.MLP_REGRESSION.model(), "regression", subset, "kron", debias="single")
    with pytest.raises(ValueError, match="Expected 1 targets for as many data, got 5. Remedy"):
        la.fit((X[:1], torch.zeros(5, 4).double()), n_data=12)


@SUBSETS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("diagonal", [True, False])
def test_half_precision_with_sampled_links(subset, dtype, diagonal):
    options = {"link_approx": "mc", "n_samples": 2000, "diagonal_output": diagonal}
    la = make(subset, cases.MLP.model().to(dtype), prior_precision=0.1)
    la.fit((X.to(dtype), y), n_data=12)
    expected = fitted(subset, prior_precision=0.1)
    found = la(NEW.to(dtype), generator=torch.Generator().manual_seed(0), **options)
    assert found.dtype == dtype
    wanted = expected(NEW, generator=torch.Generator().manual_seed(0), **options)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0.05)


@pytest.mark.parametrize("debias", ["auto", "single", True])
def test_a_network_that_ends_in_a_softmax_is_told_so(debias):
    torch.manual_seed(0)
    X, y = torch.randn(24, 3), torch.randint(4, (24,))
    logits = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    loader = DataLoader(TensorDataset(X, y), 8, shuffle=True)
    for end, warned in ((nn.Softmax(-1), 1), (nn.LogSoftmax(-1), 0), (nn.Identity(), 0)):
        la = Laplace(nn.Sequential(logits, end), "classification", "all", "kron", debias=debias)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            la.fit(loader)
        assert sum("leave out the model's softmax" in str(w.message) for w in said) == warned
