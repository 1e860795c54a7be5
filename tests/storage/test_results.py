"""Frozen results that save and load, nested ones too."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from laplace_debias.storage.files import write_content
from laplace_debias.storage.results import SavedResult


@dataclass(frozen=True)
class Curve(SavedResult):
    """A tensor with a name."""

    name: str
    values: Tensor


@dataclass(frozen=True)
class Curves(SavedResult):
    """Results in a result."""

    sizes: tuple[int, ...]
    label: str | None
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class NamedCurves(Curves):
    """A class below another."""

    title: str = ""


def curves():
    return (Curve("a", torch.eye(2, dtype=torch.float64)), Curve("b", torch.tensor([1, 2])))


@pytest.mark.parametrize("result", [Curves((4, 8), None, curves()), NamedCurves((), "x", ())])
def test_results_come_back(result, tmp_path):
    loaded = type(result).load(result.save(tmp_path / "new" / "result.npz"))
    assert type(loaded) is type(result)
    assert (loaded.sizes, loaded.label) == (result.sizes, result.label)
    assert len(loaded.curves) == len(result.curves)
    for one, two in zip(loaded.curves, result.curves, strict=True):
        assert one.name == two.name and one.values.dtype == two.values.dtype
        assert torch.equal(one.values, two.values)


def test_other_types_and_paths_are_refused(tmp_path):
    path = curves()[0].save(tmp_path / "curve.npz")
    with pytest.raises(ValueError, match="saved Curves in .*curve.npz, got Curve. Remedy"):
        Curves.load(path)
    write_content(path, [1])
    with pytest.raises(ValueError, match="got other data"):
        Curve.load(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="curve.npz, which cannot be read.*Remedy"):
        Curve.load(path)
    with pytest.raises(ValueError, match=r"ends in \.npz, got .*curve\.json. Remedy"):
        curves()[0].save(tmp_path / "curve.json")
