"""Every error says what was expected, what came, and what to do."""

from __future__ import annotations

import pytest
import torch
from laplace.curvature import AsdlGGN
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from laplace_debias import Laplace, freeze_unsupported
from laplace_debias.network.freezing import unsupported_parameters
from tests import cases
from tests.cases import MLP, MLP_REGRESSION, loader


def make(case=MLP, subset="all", **kwargs):
    return Laplace(case.model(), case.likelihood, subset, "kron", debias=True, **kwargs)


def says(message: str):
    """The error must have all three parts; parentheses and the like are taken literally."""
    return pytest.raises(ValueError, match=rf"(?s)[Ee]xpected.*{message}.*Remedy")


class Stream(IterableDataset):
    """A dataset without a length."""

    def __iter__(self):
        """Yield data one by one."""
        X, y = MLP.data(20)
        yield from zip(X, y, strict=True)


def test_loader_with_one_batch():
    with says("at least two mini-batches.*got 1"):
        make().fit(loader(*MLP.data(8)))


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_empty_loader(subset):
    empty = DataLoader(TensorDataset(*MLP.data(3)), batch_size=5, drop_last=True, shuffle=True)
    with says("datum in `train_loader`, got an empty"):
        make(subset=subset).fit(empty)
    with says("datum in `train_loader`, got an empty"):
        make(subset=subset).fit(empty, curvature_loader=MLP.data(3), n_data=9)
    with says("datum in `curvature_loader`, got an empty"):
        make(subset=subset).fit(MLP.data(3), curvature_loader=empty, n_data=9)


def test_iterable_dataset_needs_n_data():
    stream = DataLoader(Stream(), batch_size=5)
    with says("`n_data`; got a Stream without length"):
        make().fit(stream)
    la = make()
    la.fit(stream, n_data=20)
    assert la.n_data == 20


def test_two_datasets_need_n_data():
    with says("`n_data`, because the two loaders read different datasets"):
        make().fit(loader(*MLP.data(8, 1)), curvature_loader=loader(*MLP.data(8, 2)))
    data = TensorDataset(*MLP.data(8))
    la = make()
    la.fit(DataLoader(data, 4), curvature_loader=DataLoader(data, 8))
    assert la.n_data == 8


def test_n_data_smaller_than_seen():
    with says("at least 12.*got 10"):
        make().fit([MLP.data(6, 1), MLP.data(6, 2)], n_data=10)
    with says("at least 11.*got 10"):
        make().fit(MLP.data(4, 1), curvature_loader=MLP.data(11, 2), n_data=10)


@pytest.mark.parametrize("n_data", [0, -3, 2.5, True])
def test_n_data_is_a_positive_whole_number(n_data):
    with says(f"positive whole number, got {n_data}"):
        make().fit([MLP.data(6, 1), MLP.data(6, 2)], n_data=n_data)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_inputs(bad):
    X, y = MLP.data(6)
    X[2, 1] = bad
    with says("finite inputs, got 1 NaN or Inf of 18"):
        make().fit(MLP.data(6), curvature_loader=(X, y), n_data=20)


def test_non_finite_weights_name_the_layer():
    la = make()
    with torch.no_grad():
        la.model[2].weight[0, 0] = float("nan")
    with says("Kronecker factors, got .* of '0.weight'"):
        la.fit(MLP.data(6), curvature_loader=MLP.data(6, 2), n_data=20)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.tensor([0, 1, 4]), r"indices in \[0, 3\].*got values in \[0, 4\]"),
        (torch.tensor([0, -1, 2]), r"indices in \[0, 3\].*got values in \[-1, 2\]"),
        (torch.tensor([0.0, 1.0, 2.0]), "class indices of an integer dtype.*float32"),
        (torch.zeros(3, 4, dtype=torch.long), r"shape \['m'\].*shape \[3, 4\]"),
    ],
)
def test_wrong_class_targets(y, message):
    with says(message):
        make().fit(MLP.data(6), curvature_loader=(MLP.data(3)[0], y), n_data=20)


def test_wrong_regression_targets():
    X, y = MLP_REGRESSION.data(6)
    for bad, message in ((y[:, 0], r"\['m', 4\].*got \[6\]"), (y[:, :2], r"got \[6, 2\]")):
        with says(message):
            make(MLP_REGRESSION).fit((X, y), curvature_loader=(X, bad), n_data=20)
    y[0, 0] = float("nan")
    with says("finite regression targets"):
        make(MLP_REGRESSION).fit((X, y), curvature_loader=(X, y), n_data=20)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_predicting_before_fitting(subset):
    la = make(subset=subset)
    X = MLP.data(3)[0]
    for act in (
        lambda: la(X),
        lambda: la.sample(2),
        lambda: la.functional_samples(X),
        lambda: la.predictive_samples(X),
        la.state_dict,
        la.curvature_bias,
        lambda: la.posterior_precision,
    ):
        with pytest.raises(AttributeError, match="Expected a fitted .* Remedy: call `la.fit"):
            act()


@pytest.mark.parametrize("debias", ["yes", 1, None, "True"])
def test_unknown_debias(debias):
    with says(f"`debias` to be 'auto'.*True.*got {debias!r}"):
        Laplace(MLP.model(), "classification", "all", "kron", debias=debias)


@pytest.mark.parametrize(("structure", "why"), [("diag", "nothing is biased"), ("full", "factors")])
def test_debias_needs_kron(structure, why):
    with says(f"got '{structure}'.*{why}"):
        Laplace(MLP.model(), "classification", "all", structure, debias=True)


def test_debias_needs_known_subset():
    with says("'all' or 'last_layer'.*got 'subnetwork'"):
        Laplace(MLP.model(), "classification", "subnetwork", "kron", debias=True)


def test_single_takes_no_curvature_loader():
    la = Laplace(MLP.model(), "classification", "all", "kron", debias="single")
    with says("no `curvature_loader`"):
        la.fit(MLP.data(6), curvature_loader=MLP.data(6), n_data=20)
    la.fit(MLP.data(6), n_data=20)
    with says("debiased fit, got debias='single'"):
        la.curvature_bias()


def test_other_likelihoods():
    with says("'bernoulli' or 'reward_modeling', got 'poisson'"):
        Laplace(MLP.model(), "poisson", "all", "kron", debias=True)


def test_batches_that_are_no_pairs():
    with says("mini-batches `.X, y.` with targets, got a tensor of shape .3, 3."):
        make().fit([torch.randn(3, 3), torch.randn(3, 3), torch.randn(3, 3)], n_data=20)
    with says("under the key 'labels'.*got the keys"):
        make().fit([{"x": torch.randn(3, 3)}, {"x": torch.randn(3, 3)}], n_data=20)


def test_no_supported_layer():
    model = nn.Sequential(nn.PReLU(3), nn.Flatten())
    with says("trainable Conv1d, Conv2d, Conv3d, Linear or normalisation layer, got none .*PReLU"):
        Laplace(model, "classification", "all", "kron", debias=True)


class Zoo(nn.Module):
    """Supported layers among everything that K-FAC cannot represent."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 4))
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.tied, self.twin = nn.Linear(4, 4), nn.Linear(4, 4)
        self.twin.weight = self.tied.weight
        self.head = nn.Linear(4, 3)

    def forward(self, ids):
        """Map ``[n, T]`` to ``[n, 3]``."""
        h = self.norm(self.embedding(ids) + self.token)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(torch.tanh(self.twin(self.tied(self.normed(h)))).mean(dim=1))


def test_unsupported_layers_are_listed_and_can_be_frozen():
    model = Zoo().double()
    with says(
        r"'token' \(Parameter\), 'embedding' \(Embedding\), "
        r"'attention' \(MultiheadAttention\).*'tied' \(Linear with a shared weight\)"
    ):
        Laplace(model, "classification", "all", "kron", debias=True)
    names = freeze_unsupported(model).layers
    assert {"token", "embedding", "attention", "attention.out_proj", "tied"} == set(names)
    assert unsupported_parameters(model) == [] and freeze_unsupported(model).layers == ()
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    norm = ["norm.weight", "norm.bias"]
    behind = [f"normed.parametrizations.weight.original{i}" for i in (0, 1)]
    rest = ["tied.bias", "twin.bias", "head.weight", "head.bias"]
    assert trainable == [*norm, "normed.bias", *behind, *rest]
    la = Laplace(model, "classification", "all", "kron", debias=True)
    ids = torch.arange(30).reshape(10, 3) % 7
    la.fit((ids, torch.arange(10) % 3), curvature_loader=(ids, torch.arange(10) % 3), n_data=20)
    assert la(ids).shape == (10, 3)


def test_layer_that_is_never_called():
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 4), nn.Linear(3, 4)

        def forward(self, x):
            return self.used(x)

    la = Laplace(Unused().double(), "classification", "all", "kron", debias=True)
    with says("call the layer of parameter unused.weight"):
        la.fit(MLP.data(6), curvature_loader=MLP.data(6), n_data=20)


def test_asdl_refuses_calls_with_different_numbers_of_positions():
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.head = nn.Linear(3, 3), nn.Linear(3, 4)

        def forward(self, x):
            return self.head(self.shared(self.shared(x).mean(dim=1)))

    la = Laplace(Uneven().double(), "classification", "all", "kron", debias=True, backend=AsdlGGN)
    batch = cases.TOKENS.data(6)
    with says("equally many positions"):
        la.fit(batch, curvature_loader=batch, n_data=20)


def test_sequential_sampler_warns():
    with pytest.warns(UserWarning, match="SequentialSampler"):
        make().fit(DataLoader(TensorDataset(*MLP.data(20)), batch_size=10))


def test_damping_warns():
    with pytest.warns(UserWarning, match="no effect"):
        make(damping=True)


def test_overflow_of_half_precision_names_the_layer():
    model = MLP.model().half()
    la = Laplace(model, "classification", "all", "kron", debias=True)
    X, y = MLP.data(20)
    with says("curvature of '.*' to fit into torch.float16"):
        la.fit((X.half(), y), curvature_loader=(X.half(), y), n_data=10**9)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_scales_must_be_positive(subset):
    for bad in (-1.0, 0.0, float("nan"), float("inf")):
        with says("positive, finite prior precision"):
            make(subset=subset, prior_precision=bad)
        with says("positive, finite `temperature`"):
            make(subset=subset, temperature=bad)
    with says("positive, finite `sigma_noise`"):
        make(MLP_REGRESSION, subset, sigma_noise=-1.0)
    with says("`sigma_noise` to be a number, or one for each output, got '1.2'"):
        make(MLP_REGRESSION, subset, sigma_noise="1.2")
    la = make(subset=subset)
    la.fit(MLP.data(6), curvature_loader=MLP.data(6, 2), n_data=20)
    with says("positive, finite prior precision"):
        la.prior_precision = torch.tensor([-1.0])
    assert la.prior_precision.item() == 1.0


def test_things_that_are_no_tensors():
    X, y = MLP.data(6)
    with says("inputs of a mini-batch as a tensor, a mapping or a tuple, got ndarray"):
        make().fit([(X.numpy(), y.numpy())] * 2, n_data=20)
    la = make()
    with says("loader of mini-batches, got the dataset TensorDataset"):
        la.fit(TensorDataset(X, y))
    la.fit((X, y), curvature_loader=MLP.data(6, 2), n_data=20)
    with says("inputs as a tensor, a mapping or a tuple, got ndarray"):
        la(X.numpy())


def test_marginal_likelihood_before_fitting():
    with pytest.raises(AttributeError, match="Expected a fitted"):
        make().log_marginal_likelihood()


def test_models_that_return_no_tensor():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x):
            return {"scores": self.layer(x)}

    la = Laplace(Pair().double(), "classification", "all", "kron", debias=True)
    with says("returns a tensor, something with `logits`.*got dict with the entries"):
        la.fit(MLP.data(6), curvature_loader=MLP.data(6, 2), n_data=20)
