"""Content with tensors in one file: types, nesting, and what cannot be written."""

import json

import pytest
import torch

from laplace_debias.storage.files import has_tensors, read_content, write_content


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).T,
        torch.tensor(1e-300, dtype=torch.float64),
        torch.tensor([True, False]),
        torch.zeros(0, 2, dtype=torch.int64),
        torch.tensor([1 + 2j]),
        torch.tensor([float("nan"), float("inf")]),
    ],
)
def test_tensors_come_back_as_they_were(tensor, tmp_path):
    back = read_content(write_content(tmp_path / "a.npz", {"x": [tensor]}))["x"][0]
    torch.testing.assert_close(back, tensor, rtol=0, atol=0, equal_nan=True)


def test_nesting_and_equal_places(tmp_path):
    content = {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, "meta": torch.ones(3), "t": {}}
    back = read_content(write_content(tmp_path / "a.npz", content))
    assert list(back) == ["a/b", "a", "meta", "t"]
    assert back["a/b"].tolist() == [1.0] and back["a"]["b"].tolist() == [0.0]
    assert back["meta"].tolist() == [1.0] * 3 and back["t"] == {}


def test_content_without_tensors_is_json(tmp_path):
    content = {"a": [1, 2.5, None, "ä"], "tensor": "x", "b": {"tensor": "y"}}
    for name in ("a.json", "a.npz"):
        assert read_content(write_content(tmp_path / name, content)) == content
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == content


def test_tensors_are_seen_at_any_depth():
    assert has_tensors([{"a": (torch.ones(1),)}]) and not has_tensors([{"a": (1,)}])


def test_bad_paths_and_content(tmp_path):
    with pytest.raises(ValueError, match=r"ends in \.npz, got .*a\.json. Remedy"):
        write_content(tmp_path / "a.json", torch.ones(1))
    with pytest.raises(ValueError, match=r"ends in \.npz or \.json, got .*a\.txt"):
        write_content(tmp_path / "a.txt", 1)
    with pytest.raises(TypeError, match="Expected numbers, strings.*set.*Remedy"):
        write_content(tmp_path / "a.json", {"a": {1}})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        read_content(tmp_path / "a.json")


def test_files_of_others_are_named(tmp_path):
    import numpy as np

    np.savez(tmp_path / "a.npz", x=np.ones(1))
    with pytest.raises(ValueError, match=r"a\.npz, which cannot be read.*Remedy: delete"):
        read_content(tmp_path / "a.npz")
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "pickled.npy").rename(tmp_path / "pickled.npz")
    with pytest.raises(ValueError, match=r"pickled\.npz, which cannot be read"):
        read_content(tmp_path / "pickled.npz")
