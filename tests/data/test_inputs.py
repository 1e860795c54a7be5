"""Inputs of a network: rows taken and put together, in tensors and mappings."""

from collections import UserDict

import pytest
import torch

from laplace_debias.data.inputs import concatenate, map_tensors, size_of, take, widen
from laplace_debias.kfac.interface import datum_keys


def mapping(n=6):
    """Two tensors with a row per datum, one without, and something else."""
    return UserDict(
        scale=torch.tensor(2.0), mask=torch.ones(3, 3), input_ids=torch.arange(n * 2).view(n, 2),
        labels=torch.arange(n), name="a",
    )  # fmt: skip


def test_size_is_that_of_the_key_or_of_the_first_tensor_with_rows():
    assert size_of(torch.zeros(4, 2)) == 4
    assert size_of(mapping()) == 6  # not the mask, which comes first
    assert size_of(mapping(), "labels") == 6
    assert size_of({"scale": torch.tensor(1.0), "x": torch.zeros(5)}) == 5
    with pytest.raises(ValueError, match=r"at least one tensor.*\['name'\].*Remedy"):
        size_of({"name": "a"})


@pytest.mark.parametrize("rows", [slice(1, 4), torch.tensor([4, 0, 4])])
def test_take_takes_the_same_rows_of_every_tensor_with_one_row_per_datum(rows):
    x = mapping()
    part = take(x, rows)
    wanted = [1, 2, 3] if isinstance(rows, slice) else [4, 0, 4]
    assert isinstance(part, UserDict) and part["labels"].tolist() == wanted
    assert part["input_ids"].tolist() == [[2 * i, 2 * i + 1] for i in wanted]
    assert torch.equal(part["mask"], x["mask"]) and part["name"] == "a"
    assert x["labels"].tolist() == list(range(6))  # the user's mapping stays
    assert take(torch.arange(6), rows).tolist() == wanted


@pytest.mark.parametrize("sizes", [[6], [1, 5], [2, 2, 2]])
def test_concatenate_undoes_take(sizes):
    x, starts = mapping(), torch.tensor([0, *sizes]).cumsum(0).tolist()
    slices = [slice(a, b) for a, b in zip(starts[:-1], starts[1:], strict=True)]
    whole = concatenate([take(x, rows, "labels") for rows in slices])
    assert torch.equal(whole["input_ids"], x["input_ids"])
    assert torch.equal(whole["labels"], x["labels"]) and whole["name"] == "a"
    tensor = torch.randn(6, 3)
    assert torch.equal(concatenate([tensor[rows] for rows in slices]), tensor)


def test_tensors_within_mappings_are_changed_in_a_copy():
    x = {"outer": {"half": torch.ones(1).half()}, "index": torch.ones(1, dtype=torch.long), "n": 1}
    wide = widen(x)
    assert wide["outer"]["half"].dtype == torch.float32 and wide["n"] == 1
    assert wide["index"].dtype == torch.long and x["outer"]["half"].dtype == torch.float16
    assert map_tensors(x, lambda t: 3 * t)["outer"]["half"].item() == 3
    assert widen(torch.ones(1, dtype=torch.float64)).dtype == torch.float64


def test_keys_follow_the_datum():
    X = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(0))
    keys = datum_keys(X, 6, 7)
    order = torch.tensor([3, 0, 5])
    assert datum_keys(X[order], 3, 7) == [keys[i] for i in order]
    assert len(set(keys)) == 6 and all(0 <= key < 2**63 for key in keys)
    assert not set(keys) & set(datum_keys(X, 6, 8))


def test_all_entries_of_a_mapping_count_that_have_a_row_per_datum():
    X = {"ids": torch.tensor([[1], [1]]), "mask": torch.tensor([0, 1]), "scale": 2.0}
    one, two = datum_keys(X, 2, 0)
    assert one != two
    assert datum_keys({**X, "scale": 3.0}, 2, 0) == [one, two]
