"""Which data serve what: directions, curvatures, and the number N they stand for."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from laplace_debias.data.loaders import warn_if_sequential
from laplace_debias.data.roles import CURVATURES, DIRECTIONS, TrainingData, training_size

CPU = torch.device("cpu")


def batches(*starts, size=2):
    """Mini-batches whose targets count up from a number."""
    return [(torch.zeros(size, 1), torch.arange(s, s + size)) for s in starts]


def targets(pairs):
    """Targets by role."""
    found = {}
    for role, (_, y) in pairs:
        found.setdefault(role, []).extend(y.tolist())
    return found


def test_one_loader_gives_its_first_two_mini_batches_and_reads_no_further():
    def stream():
        yield from batches(0, 10)
        raise AssertionError("a third mini-batch was read")

    found = targets(TrainingData(stream(), None, 9, CPU).in_roles())
    assert found == {DIRECTIONS: [0, 1], CURVATURES: [10, 11]}


def test_two_loaders_give_all_they_have():
    data = TrainingData(batches(0, 2), batches(10, 12, 14), 99, CPU)
    assert targets(data.in_roles()) == {DIRECTIONS: [*range(4)], CURVATURES: [*range(10, 16)]}


def test_the_same_loader_twice_is_plain_kfac_and_says_so():
    loader = batches(0)
    with pytest.warns(UserWarning, match="not debiased"):
        found = targets(TrainingData(loader, loader, 9, CPU).in_roles())
    assert found[DIRECTIONS] == found[CURVATURES]


def test_too_few_mini_batches():
    with pytest.raises(ValueError, match="at least two mini-batches.*got 1.*Remedy"):
        list(TrainingData(batches(0), None, 9, CPU).in_roles())


def test_data_are_cast_and_brought_to_the_device():
    X, y = torch.ones(2, 1).half(), torch.ones(2, 1).half()
    data = TrainingData([(X, y)], None, 9, CPU, cast=lambda t: t.float())
    ((got, target),) = data.read()
    assert got.dtype == target.dtype == torch.float32
    mapping = {"input_ids": torch.zeros(2, 1), "answer": torch.arange(2)}
    ((got, target),) = TrainingData([mapping], None, 9, CPU, key_y="answer").read()
    assert target.tolist() == [0, 1] and "input_ids" in got


def test_more_data_than_there_are():
    data = TrainingData([], None, 10, CPU)
    counts = {DIRECTIONS: 6, CURVATURES: 5}
    data.check_seen(counts, disjoint=False)  # they may be the same data
    with pytest.raises(ValueError, match="`n_data` of at least 11.*got 10"):
        data.check_seen(counts, disjoint=True)
    with pytest.raises(ValueError, match="`n_data` of at least 12"):
        data.check_seen({DIRECTIONS: 12, CURVATURES: 5}, disjoint=False)


def test_the_number_of_training_data():
    one, other = (DataLoader(TensorDataset(torch.zeros(n, 1))) for n in (7, 9))
    assert training_size(one, None, None) == training_size(one, one, None) == 7
    assert training_size(one, other, 100) == 100
    with pytest.raises(ValueError, match="two loaders read different datasets"):
        training_size(one, other, None)
    for bad in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="positive whole number"):
            training_size(one, None, bad)
    with pytest.raises(ValueError, match="loader of mini-batches, got the dataset TensorDataset"):
        training_size(TensorDataset(torch.zeros(3, 1)), None, None)
    with pytest.raises(ValueError, match="got a list without `.dataset`"):
        training_size([], None, None)
    with pytest.raises(ValueError, match=r"loader of mini-batches .* got a Tensor of shape \[3"):
        training_size(torch.zeros(3, 1), None, None)

    class Stream(IterableDataset):
        def __iter__(self):
            yield from ()

    with pytest.raises(ValueError, match="a Stream without length"):
        training_size(DataLoader(Stream()), None, None)


def test_loaders_in_order_are_warned_about():
    with pytest.warns(UserWarning, match="SequentialSampler"):
        warn_if_sequential(DataLoader(range(4), 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_sequential(DataLoader(range(4), 2, shuffle=True))
        warn_if_sequential([])
