"""The file of a fit: position, data and generators."""

import pytest
import torch
from torch.utils.data import DataLoader

from laplace_debias.debias import checkpoint
from laplace_debias.debias.checkpoint import Checkpoint
from laplace_debias.debias.packing import generators_of
from laplace_debias.kfac.counts import FitCost


def items(seed=0):
    g = torch.Generator().manual_seed(seed)
    return [("directions", (torch.randn(2, 3, generator=g), torch.arange(2))) for _ in range(4)]


def test_generators_stand_where_they_stood(tmp_path):
    own = torch.Generator().manual_seed(1)
    first = Checkpoint(tmp_path / "a", {}, [own], seconds=0.0)
    for k, _ in enumerate(first.following(iter(items()))):
        torch.rand(3, generator=own)
        torch.rand(2)
        first.processed(FitCost())
        if k == 1:
            break
    expected = torch.rand(1, generator=own), torch.rand(1)
    again = torch.Generator().manual_seed(1)
    second = Checkpoint(tmp_path / "a", {}, [again])
    rest = second.following(iter(items()))
    assert torch.equal(next(rest)[1][0], items()[2][1][0])
    assert torch.equal(torch.rand(1, generator=again), expected[0])
    assert torch.equal(torch.rand(1), expected[1])


@pytest.mark.parametrize("others", [items(1), items()[:1]], ids=["other data", "too few"])
def test_other_data_are_refused(others, tmp_path):
    first = Checkpoint(tmp_path / "a", {}, [], seconds=0.0)
    for _ in first.following(iter(items()[:2])):
        first.processed(FitCost())
    second = Checkpoint(tmp_path / "a", {}, [])
    with pytest.raises(ValueError, match="first 2 mini-batches.*Remedy"):
        next(second.following(iter(others)))


def test_a_mini_batch_that_was_only_read_is_not_counted(tmp_path):
    first = Checkpoint(tmp_path / "a", {}, [], seconds=0.0)
    stream = first.following(iter(items()))
    next(stream)
    next(stream)
    first.processed(FitCost(forward=2, seconds={"passes": 1.0}))
    second = Checkpoint(tmp_path / "a", {}, [])
    assert second.resumed == 1
    assert len(list(second.following(iter(items())))) == 3
    cost = FitCost(forward=1, seconds={"passes": 0.5})
    second.begin(cost)
    assert cost.forward == 3 and cost.seconds == {"passes": 1.5}


def test_generators_of_loaders_are_found_once():
    g, h = torch.Generator(), torch.Generator()
    one = DataLoader([1, 2], shuffle=True, generator=g)
    assert generators_of(h, one, one, None) == [h, g]


class Pair:
    """Two processes, of which the other one says what it has found."""

    def __init__(self, other):
        self.other = other

    def gather(self, own):
        """What both have."""
        return [own, self.other]


@pytest.mark.parametrize(
    ("mine", "other", "expected"),
    [
        ((0, 1), (0, 1), 0),  # nobody has turned: what was written beside does not count
        ((0, 1), (1, -1), 1),  # the other has turned, so this one can
        ((1, -1), (0, 1), 1),  # and the other way round
        ((0, -1), (-1, -1), 0),  # the other was killed before it has written anything
        ((1, -1), (-1, -1), None),  # the other has ended: begin anew
    ],
)
def test_several_processes_begin_in_the_same_phase(mine, other, expected, tmp_path, monkeypatch):
    written = Checkpoint(tmp_path / "a", {"rank": 0}, [], seconds=0.0)
    for phase, path in zip(mine, (written.path, written._next), strict=True):
        if phase >= 0:
            written._phase = phase
            written._write(path, FitCost(), {"phase": phase})
    monkeypatch.setattr(checkpoint, "processes", lambda: Pair(other))
    found = Checkpoint(tmp_path / "a", {"rank": 0}, [])
    assert found.content.get("phase") == expected
    assert not (tmp_path / "a.next").exists()
    foreign = Checkpoint(tmp_path / "b", {"rank": 0}, [])
    foreign._write(foreign.path, FitCost(), {})
    with pytest.raises(ValueError, match="differs in rank"):
        Checkpoint(tmp_path / "b", {"rank": 1}, [])
    assert (tmp_path / "b").exists()  # nothing of another fit is removed
