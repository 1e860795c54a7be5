"""Inputs and outputs as people have them, wherever the network is called."""

import copy
from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from laplace_debias import Laplace, check_model, evaluate, linearized_predictive
from laplace_debias.network.calling import (
    OutputPicker,
    as_outputs,
    call_model,
    check_positions,
    classes_last,
    flat_outputs,
    pick_tensor,
    wants_keywords,
    weights_of_positions,
)


@dataclass
class Output:
    """As those of ``transformers``."""

    logits: Tensor
    hidden: Tensor


class Words(nn.Module):
    """A classifier of masked tokens that takes keywords, and a loss if there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4).requires_grad_(False)
        self.hidden, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        """Logits in an output of their own."""
        assert labels is None, "a network must not see the labels"
        h = torch.tanh(self.hidden(self.table(input_ids)))
        m = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        pooled = (h * m.unsqueeze(-1)).sum(1) / m.sum(1, keepdim=True)
        return Output(self.head(pooled), h)


class Wrapped(nn.Module):
    """The wrapper that nobody needs to write any more."""

    def __init__(self, words: Words) -> None:
        super().__init__()
        self.words = words

    def forward(self, batch):
        """Logits."""
        return self.words(batch["input_ids"], batch["attention_mask"]).logits


class Pair(nn.Module):
    """Two inputs, a tuple of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(2, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x1, x2):
        """Logits and features."""
        h = torch.tanh(self.one(x1) + self.two(x2))
        return self.head(h), h


class Joined(nn.Module):
    """The same with one tensor."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, x):
        """Logits."""
        return self.pair(x[:, :2], x[:, 2:])[0]


def texts(n: int, seed: int = 0, kind=dict):
    """A mini-batch of tokens with masks and labels."""
    g = torch.Generator().manual_seed(seed)
    mask = (torch.arange(6) < torch.randint(2, 7, (n, 1), generator=g)).long()
    return kind(
        input_ids=torch.randint(11, (n, 6), generator=g) * mask,
        attention_mask=mask,
        labels=torch.randint(3, (n,), generator=g),
    )


def fitted(model, batches, subset="all", **options):
    la = Laplace(model, "classification", subset, "kron", debias=True, **options)
    la.fit(batches[0], curvature_loader=batches[1], n_data=50)
    return la


@pytest.fixture(scope="module")
def words() -> Words:
    torch.manual_seed(0)
    return Words()


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_model_of_keywords_with_logits_is_as_its_wrapper(words, kind, subset):
    batches = [texts(12, seed, kind) for seed in (1, 2)]
    la = fitted(words, batches, subset)
    other = fitted(Wrapped(words), [dict(b) for b in batches], subset)
    x = texts(5, 3, kind)
    for options in ({}, {"pred_type": "nn", "link_approx": "mc"}):
        ours, theirs = (
            each(data, generator=torch.Generator().manual_seed(0), **options)
            for each, data in ((la, x), (other, dict(x)))
        )
        torch.testing.assert_close(ours, theirs)
    ours, theirs = (
        linearized_predictive(
            each, data, method="samples", generator=torch.Generator().manual_seed(0)
        ).covariance
        for each, data in ((la, x), (other, dict(x)))
    )
    torch.testing.assert_close(ours, theirs)
    assert evaluate(la, [x]).nll == pytest.approx(evaluate(other, [dict(x)]).nll)
    assert evaluate(words, [x]).nll == pytest.approx(evaluate(Wrapped(words), [dict(x)]).nll)


def test_the_model_check_and_a_raw_predictor_take_keywords(words):
    check = check_model(words, texts(4), "classification")
    assert check.supported and check.data is None
    assert [layer.name for layer in check.layers][:2] == ["hidden.weight", "hidden.bias"]


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_several_inputs_are_positional_arguments(subset):
    torch.manual_seed(0)
    pair = Pair()
    x1, x2, y = torch.randn(20, 2), torch.randn(20, 3), torch.randint(2, (20,))
    la = fitted(pair, [((x1[:10], x2[:10]), y[:10]), [((x1[10:], x2[10:]), y[10:])]], subset)
    x = torch.cat([x1, x2], 1)
    other = fitted(Joined(pair), [(x[:10], y[:10]), (x[10:], y[10:])], subset)
    expected = other(x)
    torch.testing.assert_close(la((x1, x2)), expected)
    torch.testing.assert_close(la([x1, x2]), expected)
    loader = torch.utils.data.DataLoader(
        [((a, b), c) for a, b, c in zip(x1, x2, y, strict=True)], 8
    )
    assert evaluate(la, loader).nll == pytest.approx(evaluate(other, [(x, y)]).nll)
    assert evaluate(pair, loader).n_data == 20


def test_crossfit_and_a_grid_search_take_several_inputs():
    torch.manual_seed(0)
    pair = Pair()
    data = [((torch.randn(8, 2), torch.randn(8, 3)), torch.randint(2, (8,))) for _ in range(3)]
    la = Laplace(pair, "classification", "all", "kron", debias="crossfit", n_folds=3)
    la.fit(data, n_data=24)
    la.optimize_prior_precision(method="gridsearch", val_loader=data, grid_size=3)
    assert la(data[0][0]).shape == (8, 2)


def test_a_function_picks_the_output():
    torch.manual_seed(0)
    pair = Pair()
    x1, x2, y = torch.randn(20, 2), torch.randn(20, 3), torch.randint(2, (20,))
    batches = [((x1[:10], x2[:10]), y[:10]), ((x1[10:], x2[10:]), y[10:])]

    class Named(Pair):
        def forward(self, x1, x2):
            scores, h = super().forward(x1, x2)
            return {"features": h, "scores": scores}

    named = Named()
    named.load_state_dict(pair.state_dict())
    la = fitted(named, batches, output=lambda out: out["scores"])
    torch.testing.assert_close(la((x1, x2)), fitted(pair, batches)((x1, x2)))
    with pytest.raises(ValueError, match="entries.*features.*scores.*Remedy.*output="):
        fitted(named, batches)
    with pytest.raises(ValueError, match="`output` to be a function"):
        fitted(named, batches, output="scores")


def test_a_forward_of_one_parameter_takes_the_mapping_itself():
    class One(nn.Module):
        def forward(self, x):
            return x["x"]

    batch = {"x": torch.ones(2, 2), "labels": torch.zeros(2)}
    assert not wants_keywords(One(), batch)
    assert torch.equal(call_model(One(), batch), batch["x"])


def test_a_forward_of_any_keywords_gets_all_but_the_labels():
    class Any(nn.Module):
        def forward(self, *args, **kwargs):
            assert sorted(kwargs) == ["x", "z"]
            return kwargs["x"], None

    batch = {"x": torch.ones(2, 2), "z": 1, "labels": torch.zeros(2)}
    assert torch.equal(call_model(Any(), batch), batch["x"])
    assert torch.equal(
        call_model(OutputPicker(Any(), lambda out: 2 * out[0]), batch), 2 * batch["x"]
    )


def test_what_holds_no_tensor_is_refused():
    for output in (None, ("a", torch.ones(1)), {"loss": torch.ones(1)}):
        with pytest.raises(ValueError, match="something with `logits`.*Remedy"):
            pick_tensor(output)


def test_the_network_is_left_as_it_was(words):
    before = copy.deepcopy(words.state_dict())
    fitted(words, [texts(6, 1), texts(6, 2)], "last_layer")
    assert all(torch.equal(before[name], value) for name, value in words.state_dict().items())
    assert not any(m._forward_hooks for m in words.modules())


def test_other_backends_say_what_they_do_not_take(words):
    from laplace.curvature import AsdlGGN

    with pytest.raises(ValueError, match="of one argument with AsdlGGN.*leave `backend` out"):
        fitted(words, [texts(6, 1), texts(6, 2)], backend=AsdlGGN, verify=False)


def test_layouts_and_back():
    tokens, pixels, voxels = (
        torch.randn(2, 5, 3),
        torch.randn(2, 3, 4, 5),
        torch.randn(2, 3, 4, 5, 6),
    )
    assert classes_last(tokens) is tokens
    assert torch.equal(classes_last(pixels)[1, 2, 3], pixels[1, :, 2, 3])
    assert torch.equal(classes_last(voxels)[1, 2, 3, 4], voxels[1, :, 2, 3, 4])
    for f in (tokens, pixels, voxels, torch.randn(2, 3)):
        assert torch.equal(as_outputs(classes_last(f)), f)
        many = torch.stack([classes_last(f)] * 7)
        assert torch.equal(as_outputs(many, leading=1)[3], f)
        assert flat_outputs(f).shape == (2, f[0].numel())
    assert torch.equal(flat_outputs(pixels)[0, :3], pixels[0, :, 0, 0])


def test_weights_of_data_and_positions():
    f, w = torch.randn(1, 4, 3), torch.tensor([[1.0, 0.0, 2.0, 0.5]])
    assert weights_of_positions(f, None) is None and weights_of_positions(f, w) is w
    assert torch.equal(weights_of_positions(f, torch.tensor([3.0])), torch.full((1, 4), 3.0))
    with pytest.raises(ValueError, match="one per datum, or one per position"):
        weights_of_positions(f, torch.ones(1, 3))


def test_other_likelihoods_have_no_positions():
    check_positions(torch.zeros(2, 3), "regression")
    with pytest.raises(ValueError, match="have classes only"):
        check_positions(torch.zeros(2, 3, 4), "bernoulli")
