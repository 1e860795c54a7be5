"""What a run is recognised by: model, trainable set, data, loss and options."""

import json
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias.storage.fingerprints import (
    fingerprint,
    loss_hash,
    model_hash,
    plain_options,
    tensors_hash,
)

X, Y = torch.arange(12.0).view(6, 2), torch.arange(6) % 3


def network(activation=nn.Tanh):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), activation(), nn.Linear(4, 3))


def changes(edit):
    """Which parts of a fingerprint an edit of the ingredients changes."""
    parts = dict(
        model=network(), data={"train": (X, Y), "test": [(X, Y)]}, loss=nn.CrossEntropyLoss()
    )
    parts |= {"options": {"k": 1, "grid": (1.0, 2.0)}}
    before = fingerprint(**parts)
    assert json.loads(json.dumps(before)) == before
    edit(parts)
    after = fingerprint(**parts)
    return {key for key in before if before[key] != after[key]}


def shift(tensor):
    with torch.no_grad():
        tensor.view(-1)[-1] += 1e-3


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda p: None, set()),
        (lambda p: p.update(model=network()), set()),
        (lambda p: p["model"].train(), set()),
        (lambda p: shift(p["model"][3].bias), {"model"}),
        (lambda p: shift(p["model"][1].running_mean), {"model"}),
        (lambda p: p["model"][3].bias.requires_grad_(False), {"model"}),
        (lambda p: p.update(model=network(nn.ReLU)), {"model"}),
        (lambda p: p.update(model=network().double()), {"model"}),
        (lambda p: p["data"].update(train=(X + 1, Y)), {"data"}),
        (lambda p: p["data"].update(test=[(X, Y.flip(0))]), {"data"}),
        (lambda p: p["data"].update(more=[(X, Y)]), {"data"}),
        (lambda p: p.update(loss=nn.CrossEntropyLoss(label_smoothing=0.1)), {"loss"}),
        (lambda p: p.update(loss=nn.CrossEntropyLoss(reduction="sum")), {"loss"}),
        (lambda p: p.update(loss=nn.CrossEntropyLoss(weight=torch.ones(3))), {"loss"}),
        (lambda p: p.update(loss=nn.MSELoss()), {"loss"}),
        (lambda p: p.update(loss=None), {"loss"}),
        (lambda p: p.update(loss=nn.CrossEntropyLoss().train()), set()),
        (lambda p: p["options"].update(k=2), {"options"}),
        (lambda p: p["options"].update(grid=[1.0, 2.0]), set()),
        (lambda p: p["options"].update(grid=[1.0, 3.0]), {"options"}),
    ],
)
def test_every_ingredient_counts_and_nothing_else(edit, expected):
    assert changes(edit) == expected


def test_several_models_by_name():
    one = fingerprint({"a": network(), "b": nn.Linear(1, 1)}, {})
    assert set(one["model"]) == {"a", "b"} and one["model"]["a"] == model_hash(network())


def test_a_name_can_stand_for_the_data():
    class Unread:
        def __iter__(self):
            raise AssertionError("read")

    found = fingerprint(network(), {"train": Unread()}, data_id="CIFAR-10, augmented")
    assert found["data"] == {"id": "CIFAR-10, augmented"}


def test_data_are_read_once_for_all_their_purposes():
    reads = Counter()

    class Counting(TensorDataset):
        def __getitem__(self, i):
            reads[i] += 1
            return super().__getitem__(i)

    loader = DataLoader(Counting(X, Y), 2)
    found = fingerprint(network(), {"train": loader, "test": loader})
    assert found["data"]["train"] == found["data"]["test"]
    assert set(reads.values()) == {3}  # once, and twice to see that they stay the same


def test_hidden_state_of_a_model_counts():
    model = network()
    before = model_hash(model)
    model.register_buffer("scale", torch.ones(1), persistent=False)
    with_buffer = model_hash(model)
    model.scale += 1
    assert len({before, with_buffer, model_hash(model)}) == 3


def test_losses_of_losses():
    class Both(nn.Module):
        def __init__(self, smoothing):
            super().__init__()
            self.parts = nn.ModuleList([nn.CrossEntropyLoss(label_smoothing=smoothing)])

    assert loss_hash(Both(0.1)) == loss_hash(Both(0.1)) != loss_hash(Both(0.2))


def test_tensors_by_type_shape_content_and_order():
    a, b = torch.zeros(2), torch.ones(2)
    hashes = {
        tensors_hash(group)
        for group in ([a], [b], [a, b], [b, a], [a.double()], [a.view(2, 1)], [], [a.bfloat16()])
    }
    assert len(hashes) == 8
    assert tensors_hash([torch.eye(3)[:, 1:].T]) == tensors_hash([torch.eye(3)[1:].clone()])


def test_options_are_told_apart_by_content():
    @dataclass
    class Options:
        k: int

    class Thing:
        pass

    assert plain_options(Options(1)) == {"k": 1} and plain_options({2: {3, 1}}) == {"2": [1, 3]}
    assert plain_options(torch.float64) == "torch.float64"
    assert plain_options(nn.Linear) == "torch.nn.modules.linear.Linear"
    assert plain_options(Thing()) == plain_options(Thing())  # not by address
    one, two = (torch.Generator().manual_seed(seed) for seed in (0, 1))
    assert plain_options(one) != plain_options(two)
    assert plain_options(one) == plain_options(torch.Generator().manual_seed(0))
    assert plain_options(torch.ones(1)) != plain_options(torch.zeros(1))
    assert plain_options(network()) == plain_options(network()) != plain_options(network(nn.ReLU))
