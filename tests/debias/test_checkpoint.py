"""The file of a fit: position, data and generators."""

import pytest
import torch
from torch.utils.data import DataLoader

from laplace_debias.debias.checkpoint import Checkpoint, generators_of
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
