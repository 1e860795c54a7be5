"""The reader: every form that data may come in, and what it says of those it refuses."""

from __future__ import annotations

import math
from collections import UserDict

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias.data.loaders import as_batches
from laplace_debias.data.reading import read

CPU = torch.device("cpu")
X = torch.arange(12.0).reshape(6, 2)
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def read_all(loader, **kwargs):
    """Everything in one pair, and the sizes of the mini-batches."""
    batches = list(read(loader, CPU, **kwargs))
    inputs = [x["x"] if isinstance(x, (dict, UserDict)) else x for x, _ in batches]
    targets = [y for _, y in batches]
    unlabelled = any(y is None for y in targets)
    return torch.cat(inputs), None if unlabelled else torch.cat(targets), [len(x) for x in inputs]


@pytest.mark.parametrize(
    ("loader", "sizes"),
    [
        (DataLoader(TensorDataset(X, Y), batch_size=4), [4, 2]),
        ([(X[:4], Y[:4]), [X[4:], Y[4:]]], [4, 2]),
        (lambda: zip(X.split(4), Y.split(4), strict=True), [4, 2]),
        ((X, Y), [6]),
        ([X, Y], [6]),
        ({"x": X, "labels": Y}, [6]),
        ([{"x": X[:1], "labels": Y[:1]}, UserDict(x=X[1:], labels=Y[1:])], [1, 5]),
        ([(X[:0], Y[:0]), (X, Y), {"x": X[:0], "labels": Y[:0]}], [6]),
    ],
    ids=["loader", "list", "iterator", "pair", "pair-list", "mapping", "mappings", "empty-batch"],
)
@pytest.mark.parametrize("labelled", [True, False])
def test_every_form_gives_the_same_data(loader, sizes, labelled):
    source = loader() if callable(loader) else loader
    inputs, targets, found = read_all(source, labelled=labelled)
    assert torch.equal(inputs, X) and torch.equal(targets, Y)
    assert found == sizes


@pytest.mark.parametrize(
    ("loader", "sizes"),
    [
        (X, [6]),
        ([X], [6]),
        ([X[:3], X[3:]], [3, 3]),
        ((X[:3], X[3:6], X[:0]), [3, 3]),
        (DataLoader(TensorDataset(X), batch_size=5), [5, 1]),
        ({"x": X}, [6]),
        ([(X, ["a"] * 6)], [6]),
        ([(X, Y, Y)], [6]),
    ],
    ids=["tensor", "one", "two", "three", "loader", "mapping", "strings", "triple"],
)
def test_unlabelled_data(loader, sizes):
    inputs, targets, found = read_all(loader, labelled=False)
    assert torch.equal(inputs, X) and targets is None
    assert found == sizes


def test_iterators_are_read_lazily_and_once():
    drawn = []

    def source():
        for i in range(3):
            drawn.append(i)
            yield X, Y

    first = next(read(source(), CPU))
    assert drawn == [0] and torch.equal(first[1], Y)


def with_entry(value):
    broken = X.clone()
    broken[1, 0] = value
    return broken


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([X], r"`\(X, y\)` with targets, got a tensor of shape \[6, 2\]"),
        ([(X,)], r"`\(X, y\)` with targets, got a tuple of 1"),
        (X, r"with targets in `val`, got a tensor of shape \[6, 2\]"),
        ([(X, Y, Y)], r"`\(X, y\)` or mappings, got a tuple of 3"),
        ([()], r"`\(X, y\)` or mappings, got a tuple of 0"),
        (["ab"], r"`\(X, y\)` or mappings, got str"),
        ([(X.numpy(), Y)], "as a tensor, a mapping or a tuple, got ndarray"),
        ([(X, Y.tolist())], "one row per datum, got a list of 6"),
        ([(X, np.zeros(6))], "one row per datum, got ndarray"),
        (TensorDataset(X, Y), r"one row per datum, got a tensor of shape \[\]"),
        ([{"x": X, "target": Y}], r"under the key 'labels'.*got the keys \['target', 'x'\]"),
        ([(with_entry(math.nan), Y)], "finite inputs, got 1 NaN or Inf of 12"),
        ([(with_entry(math.inf), Y)], "finite inputs, got 1 NaN or Inf of 12"),
        ([{"x": with_entry(math.nan), "labels": Y}], "finite inputs, got 1"),
        ([], "at least one labelled datum in `val`, got an empty loader"),
        (iter([]), "at least one labelled datum in `val`, got an empty loader"),
        ([(X[:0], Y[:0])], "at least one labelled datum in `val`"),
        (None, "as `val`, got NoneType"),
        (3, "as `val`, got int"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_remedy(loader, message):
    with pytest.raises(ValueError, match=rf"(?s)Expected.*{message}.*Remedy"):
        list(read(loader, CPU, name="val"))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([with_entry(math.nan)], "finite inputs, got 1"),
        ([(X.numpy(),)], "as a tensor, a mapping or a tuple, got ndarray"),
        ([], "at least one datum in `ood`"),
    ],
)
def test_unlabelled_data_are_checked_too(loader, message):
    with pytest.raises(ValueError, match=rf"Expected.*{message}.*Remedy"):
        list(read(loader, CPU, labelled=False, name="ood"))


def test_a_key_of_ones_own():
    ((x, y),) = read({"x": X, "target": Y}, CPU, "target")
    assert x["x"] is X and torch.equal(y, Y)


def test_a_pair_is_one_mini_batch_unless_it_is_a_list_of_like_inputs():
    assert len(as_batches((X, X), labelled=False)) == 1
    assert as_batches([X, X], labelled=False)[0] is X
    assert len(as_batches([X, X])) == 1  # where targets are needed it can only be a pair


def test_progress_is_shown_only_when_asked_for(capsys):
    list(read([(X, Y)], CPU))
    assert capsys.readouterr().err == ""
    list(read([(X, Y)], CPU, progress="reading"))
    assert "reading" in capsys.readouterr().err
